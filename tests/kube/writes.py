"""What a client writes: read from the body, merged into what is there, validated, stored. The server's other half."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

from tests.kube.kinds import Document, Kind
from tests.kube.merge import apply_configuration, merge_patch, strategic_merge
from tests.kube.schemas import problems
from tests.kube.store import ApiError, Key, Store
from tests.kube.wire import decode_delete_options, decode_secret

Merge = Callable[[Document, Document], Document]
_PATCHES: dict[str, Merge] = {
    "application/merge-patch+json": merge_patch,
    "application/strategic-merge-patch+json": strategic_merge,
}
_APPLY = "application/apply-patch+yaml"


def read_body(body: bytes, content_type: str, kind: Kind) -> Document:
    """An object, or a patch of one. Raises ApiError for an encoding that is not understood."""
    if "protobuf" in content_type:
        if kind.name != "Secret":
            raise ApiError(415, "UnsupportedMediaType", f"{kind.name} as protobuf is not understood here: send JSON")
        return decode_secret(body)
    return _plain(body, content_type)


def read_delete_options(body: bytes, content_type: str) -> Document:
    """The options of a DELETE, if it has any."""
    if not body:
        return {}
    return decode_delete_options(body) if "protobuf" in content_type else _plain(body, content_type)


def _plain(body: bytes, content_type: str) -> Document:
    document: Any = yaml.safe_load(body) if "yaml" in content_type else json.loads(body)
    if not isinstance(document, dict):
        raise ApiError(400, "BadRequest", "a JSON object was expected")
    return document


class Writer:
    """Carries writes out. A dry run does all but keep the result."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._applied: dict[tuple[Key, str], Document] = {}

    def create(self, key: Key, kind: Kind, document: Document, *, dry_run: bool) -> Document:
        """POST."""
        self._check(kind, key, document)
        if dry_run:
            if self._store.get(key) is not None:
                raise ApiError(409, "AlreadyExists", f'{key.plural} "{key.name}" already exists')
            return _dry(key, document)
        created = self._store.create(key, {"apiVersion": kind.api, "kind": kind.name, **document})
        if kind.name == "CustomResourceDefinition":
            self._store.kinds.add_definition(created)
        return created

    def replace(self, key: Key, kind: Kind, document: Document, *, dry_run: bool) -> Document:
        """PUT: everything but the status."""
        return self._change(key, kind, lambda old: {**document, "status": old.get("status", {})}, dry_run=dry_run)

    def patch(self, key: Key, kind: Kind, patch: Document, content_type: str, *, dry_run: bool) -> Document:
        """PATCH as a merge or strategic merge patch."""
        merge = _PATCHES.get(content_type)
        if merge is None:
            raise ApiError(415, "UnsupportedMediaType", f"patches of type {content_type} are not understood here")
        return self._change(key, kind, lambda old: merge(old, patch), dry_run=dry_run)

    def apply(self, key: Key, kind: Kind, configuration: Document, manager: str, *, dry_run: bool) -> Document:
        """PATCH as server-side apply: creates the object when there is none."""
        if self._store.get(key) is None:
            result = self.create(key, kind, configuration, dry_run=dry_run)
        else:
            previous = self._applied.get((key, manager), {})
            result = self._change(
                key, kind, lambda old: apply_configuration(old, previous, configuration), dry_run=dry_run
            )
        if not dry_run:
            self._applied[key, manager] = configuration
        return result

    def set_status(self, key: Key, document: Document) -> Document:
        """PUT or PATCH of the status alone."""
        return self._store.update(
            key, lambda old: {**old, "status": merge_patch(old.get("status", {}), document.get("status", {}))}
        )

    def scale(self, key: Key, document: Document) -> Document:
        """PUT or PATCH of the scale subresource."""
        replicas = document["spec"]["replicas"]
        return self._store.update(key, lambda old: {**old, "spec": {**old["spec"], "replicas": replicas}})

    def forget(self, key: Key) -> None:
        """The object is gone, and with it who applied what."""
        self._applied = {known: value for known, value in self._applied.items() if known[0] != key}

    def _change(
        self, key: Key, kind: Kind, change: Callable[[Document], Document], *, dry_run: bool
    ) -> Document:
        old = self._store.get(key)
        if old is None:
            raise ApiError(404, "NotFound", f'{key.plural} "{key.name}" not found')
        new = change(old)
        self._check(kind, key, new)
        return _dry(key, new) if dry_run else self._store.update(key, change)

    def _check(self, kind: Kind, key: Key, document: Document) -> None:
        if found := problems(kind, document):
            raise ApiError(422, "Invalid", f'{kind.name} "{key.name}" is invalid: {"; ".join(found)}')


def _dry(key: Key, document: Document) -> Document:
    metadata = {"uid": "00000000-0000-0000-0000-000000000000", "resourceVersion": "0", **document["metadata"]}
    return {**document, "metadata": {**metadata, **({"namespace": key.namespace} if key.namespace else {})}}


def is_apply(content_type: str) -> bool:
    """Whether a PATCH is server-side apply."""
    return content_type == _APPLY
