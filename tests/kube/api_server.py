"""A stand-in for kube-apiserver over a `Store`: what helm, kubectl and the controllers of this package need of it.

Discovery, objects and their status, lists, watches, server-side apply, dry runs, graceful deletion, logs of pods. No
authentication, no RBAC, no admission beyond the schemas. Plain HTTP on a loopback address.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.kube.kinds import (
    Document,
    Kind,
    group_list,
    openapi_document,
    openapi_index,
    resource_list,
)
from tests.kube.paths import Query, Target, document_of, split_path, target_of
from tests.kube.schemas import KUBERNETES_VERSION
from tests.kube.selection import labels_of, matches_fields, matches_query
from tests.kube.store import ApiError, Event, Key, Store
from tests.kube.writes import Writer, is_apply, read_body, read_delete_options

_LONGEST_WATCH_S = 600.0
_WATCH_LOOK_S = 0.5


class ApiServer:
    """Serves until `stop`. `log_of` gives the log of a pod's container, by (key, container name)."""

    def __init__(self, store: Store, *, host: str, log_of: Callable[[Key, str], str]) -> None:
        self.store = store
        self.writer = Writer(store)
        self.log_of = log_of
        handler = type("Handler", (_Handler,), {"api": self})
        self._http = ThreadingHTTPServer((host, 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="kube-apiserver")

    @property
    def url(self) -> str:
        """Where clients connect."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """In a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Closes the socket; watches end with the store."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One request after the other of one connection."""

    protocol_version = "HTTP/1.1"
    api: ApiServer

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do(self) -> None:
        """Any method."""
        path, query = split_path(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        try:
            self._answer(path, query, body)
        except ApiError as exc:
            failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
            self._send({**failure, "reason": exc.reason, "message": exc.message, "code": exc.code}, exc.code)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has gone

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do

    def _answer(self, path: str, query: Query, body: bytes) -> None:
        if self.command == "GET" and (document := self._discovery(path)) is not None:
            return self._send(document)
        target = target_of(path)
        kind = None if target is None else self.api.store.kinds.get(target.api, target.plural)
        if target is None or kind is None:
            raise ApiError(404, "NotFound", f"the server could not find the requested resource {path}")
        if self.command == "GET":
            return self._read(target, kind, query)
        if self.command == "DELETE":
            return self._delete(target, kind, query, read_delete_options(body, self._content_type))
        return self._write(target, kind, query, body)

    def _discovery(self, path: str) -> Document | None:
        kinds = self.api.store.kinds
        major, minor = KUBERNETES_VERSION.split(".")
        fixed: dict[str, Callable[[], Document]] = {
            "/version": lambda: {"major": major, "minor": minor, "gitVersion": f"v{KUBERNETES_VERSION}.0"},
            "/api": lambda: {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": lambda: group_list(kinds),
            "/openapi/v3": lambda: openapi_index(kinds),
        }
        if path in fixed:
            return fixed[path]()
        found = document_of(path)
        if found is None:
            return None
        api, is_openapi = found
        if api not in kinds.apis:
            raise ApiError(404, "NotFound", f"no group and version {api}")
        return openapi_document(kinds, api) if is_openapi else resource_list(kinds, api)

    # --- reading

    def _read(self, target: Target, kind: Kind, query: Query) -> None:
        store = self.api.store
        if not target.name:
            return self._watch(target, kind, query) if query.flag("watch") else self._list(target, kind, query)
        key = _key(target)
        document = store.get(key)
        if document is None:
            raise ApiError(404, "NotFound", f'{target.plural} "{target.name}" not found')
        if target.subresource == "log":
            return self._send_text(self.api.log_of(key, query.text("container")))
        return self._send(_scale_of(document) if target.subresource == "scale" else document)

    def _list(self, target: Target, kind: Kind, query: Query) -> None:
        version = self.api.store.version
        items = [document for document in self._all(target) if _is_wanted(document, query)]
        metadata = {"resourceVersion": str(version)}
        self._send({"kind": f"{kind.name}List", "apiVersion": kind.api, "metadata": metadata, "items": items})

    def _all(self, target: Target) -> list[Document]:
        return self.api.store.list(target.api, target.plural, target.namespace or None)

    def _watch(self, target: Target, kind: Kind, query: Query) -> None:
        version = self.api.store.version
        began = query.text("resourceVersion")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if query.flag("sendInitialEvents") or began in ("", "0"):
            for document in filter(lambda found: _is_wanted(found, query), self._all(target)):
                self._send_event("ADDED", document)
        else:
            version = min(version, int(began))
        if query.flag("sendInitialEvents"):
            annotations = {"k8s.io/initial-events-end": "true"}
            metadata = {"resourceVersion": str(version), "annotations": annotations}
            self._send_event("BOOKMARK", {"kind": kind.name, "apiVersion": kind.api, "metadata": metadata})
        for event in self._events(version, float(query.text("timeoutSeconds") or _LONGEST_WATCH_S)):
            key = event.key
            is_here = (key.api, key.plural) == (target.api, target.plural) and target.namespace in ("", key.namespace)
            if is_here and _is_wanted(event.document, query):
                self._send_event(event.type, event.document)

    def _events(self, version: int, timeout_s: float) -> Iterator[Event]:
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and not self.api.store.is_closed:
            for event in self.api.store.events_since(version, timeout_s=_WATCH_LOOK_S):
                version = event.version
                yield event

    def _send_event(self, event: str, document: Document) -> None:
        self.wfile.write(json.dumps({"type": event, "object": document}).encode() + b"\n")
        self.wfile.flush()

    # --- writing

    @property
    def _content_type(self) -> str:
        return (self.headers.get("Content-Type") or "").partition(";")[0]

    def _write(self, target: Target, kind: Kind, query: Query, body: bytes) -> None:
        content_type = self._content_type
        document = read_body(body, content_type, kind)
        writer, dry_run = self.api.writer, "dryRun" in query.values
        if self.command == "POST" and not target.name:
            key = _key(target, document["metadata"]["name"])
            return self._send(writer.create(key, kind, document, dry_run=dry_run), 201)
        if self.command == "POST" and target.subresource == "eviction":
            return self._delete(target, kind, query, {})
        key = _key(target)
        if target.subresource == "status":
            return self._send(writer.set_status(key, document))
        if target.subresource == "scale":
            return self._send(_scale_of(writer.scale(key, document)))
        if self.command == "PUT":
            return self._send(writer.replace(key, kind, document, dry_run=dry_run))
        if is_apply(content_type):
            manager = query.text("fieldManager")
            return self._send(writer.apply(key, kind, document, manager, dry_run=dry_run))
        return self._send(writer.patch(key, kind, document, content_type, dry_run=dry_run))

    def _delete(self, target: Target, kind: Kind, query: Query, options: dict[str, Any]) -> None:
        if not target.name:
            raise ApiError(405, "MethodNotAllowed", "collections are not deleted here: delete by name")
        key = _key(target)
        policy = options.get("propagationPolicy") or query.text("propagationPolicy")
        if "dryRun" not in query.values and not options.get("dryRun"):
            is_pod = kind.name == "Pod"
            self.api.store.delete(key, graceful=is_pod, foreground=policy == "Foreground" and not is_pod)
            self.api.writer.forget(key)
        self._send({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    # --- answering

    def _send(self, document: Document, code: int = 200) -> None:
        self._send_bytes(json.dumps(document).encode(), "application/json", code)

    def _send_text(self, text: str) -> None:
        self._send_bytes(text.encode(), "text/plain", 200)

    def _send_bytes(self, content: bytes, content_type: str, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _key(target: Target, name: str = "") -> Key:
    return Key(api=target.api, plural=target.plural, namespace=target.namespace, name=name or target.name)


def _is_wanted(document: Document, query: Query) -> bool:
    return matches_query(query.text("labelSelector"), labels_of(document)) and matches_fields(
        query.text("fieldSelector"), document
    )


def _scale_of(document: Document) -> Document:
    metadata = {name: document["metadata"].get(name) for name in ("name", "namespace", "uid", "resourceVersion")}
    replicas = document["spec"].get("replicas", 1)
    status = {"replicas": document.get("status", {}).get("replicas", 0)}
    spec = {"replicas": replicas}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}
