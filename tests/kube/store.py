"""The API server's memory: objects, their versions, and the events that watches and controllers follow.

Every method is atomic; what goes in and comes out is copied, so nobody changes an object but through here.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from tests.kube.kinds import Document, Kinds

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
FOREGROUND = "foregroundDeletion"
_SERVER_FIELDS = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")


class ApiError(Exception):
    """What a client is told: an HTTP status, the API's word for it, and a sentence."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Where an object is. `namespace` is empty for what is cluster-wide."""

    api: str
    plural: str
    namespace: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One change; `version` orders them all."""

    version: int
    type: EventType
    key: Key
    document: Document


def now_text() -> str:
    """The time now, as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """All objects of one cluster."""

    def __init__(self) -> None:
        self.kinds = Kinds()
        self._objects: dict[Key, Document] = {}
        self._events: list[Event] = []
        self._changed = threading.Condition(threading.RLock())
        self._version = 0
        self.is_closed = False

    @property
    def version(self) -> int:
        """Of the latest change."""
        return self._version

    def get(self, key: Key) -> Document | None:
        """One object, if it is there."""
        with self._changed:
            return deepcopy(self._objects.get(key))

    def list(self, api: str, plural: str, namespace: str | None = None) -> list[Document]:
        """All objects of a kind, oldest first; of one namespace, or of all."""
        with self._changed:
            return [
                deepcopy(document)
                for key, document in self._objects.items()
                if (key.api, key.plural) == (api, plural) and namespace in (None, key.namespace)
            ]

    def create(self, key: Key, document: Document) -> Document:
        """Adds an object. Raises ApiError when there is one of that name."""
        with self._changed:
            if key in self._objects:
                raise ApiError(409, "AlreadyExists", f'{key.plural} "{key.name}" already exists')
            new = deepcopy(document)
            new["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now_text(), "generation": 1}
            if key.namespace:
                new["metadata"]["namespace"] = key.namespace
            return self._put(key, new, "ADDED")

    def update(self, key: Key, change: Callable[[Document], Document]) -> Document:
        """Replaces an object by what `change` makes of it; what the server owns stays. Raises ApiError if absent.

        A change that changes nothing is none: no new version, no event.
        """
        with self._changed:
            old = self._objects.get(key)
            if old is None:
                raise ApiError(404, "NotFound", f'{key.plural} "{key.name}" not found')
            new = deepcopy(change(deepcopy(old)))
            for name in (*_SERVER_FIELDS, "resourceVersion"):
                new["metadata"].pop(name, None)
                if name in old["metadata"]:
                    new["metadata"][name] = old["metadata"][name]
            if new == old:
                return deepcopy(old)
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
            return self._put(key, new, "MODIFIED")

    def set_status(self, key: Key, status: Document) -> None:
        """Replaces an object's status, if the object is still there."""
        with self._changed:
            if key in self._objects:
                self.update(key, lambda old: {**old, "status": status})

    def delete(self, key: Key, *, graceful: bool, foreground: bool = False) -> Document:
        """Removes an object, or marks it when somebody has to end it first. Raises ApiError if absent."""
        with self._changed:
            if key not in self._objects:
                raise ApiError(404, "NotFound", f'{key.plural} "{key.name}" not found')
            document = self._objects[key]
            if not graceful and not foreground:
                return self._remove(key)
            if "deletionTimestamp" in document["metadata"]:
                return deepcopy(document)
            marked = deepcopy(document)
            marked["metadata"]["deletionTimestamp"] = now_text()
            if foreground:
                marked["metadata"]["finalizers"] = [FOREGROUND]
            return self._put(key, marked, "MODIFIED")

    def remove(self, key: Key) -> None:
        """Takes an object out for good, if it is there."""
        with self._changed:
            if key in self._objects:
                self._remove(key)

    def _remove(self, key: Key) -> Document:
        document = self._objects.pop(key)
        self._note(key, document, "DELETED")
        return deepcopy(document)

    def _put(self, key: Key, document: Document, event: EventType) -> Document:
        self._objects[key] = document
        self._note(key, document, event)
        return deepcopy(document)

    def _note(self, key: Key, document: Document, event: EventType) -> None:
        self._version += 1
        document["metadata"]["resourceVersion"] = str(self._version)
        self._events.append(Event(version=self._version, type=event, key=key, document=deepcopy(document)))
        self._changed.notify_all()

    def events_since(self, version: int, *, timeout_s: float) -> list[Event]:
        """Changes after `version`; waits for the first one. Empty when the time is up or the store was closed."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while self._version <= version and not self.is_closed:
                left_s = give_up - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._events[version:]  # versions count events from 1

    def close(self) -> None:
        """Ends every wait, now and later."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
