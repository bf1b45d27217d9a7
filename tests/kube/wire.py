"""Reads the API's protobuf encoding, in which Helm sends the records of its releases: Secrets, and their deletion."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from tests.kube.kinds import Document

MAGIC = b"k8s\x00"
_RAW_FIELD = 2
_META_TEXTS = {1: "name", 3: "namespace", 6: "resourceVersion"}
_DELETE_TEXTS = {4: "propagationPolicy", 5: "dryRun"}
_META_MAPS = {11: "labels", 12: "annotations"}


def decode_secret(body: bytes) -> Document:
    """The Secret in an envelope of `MAGIC` and a runtime.Unknown message. Raises ValueError for anything else."""
    secret: Document = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {}}
    for number, value in _fields(_message(body)):
        if number == 1:
            secret["metadata"] = _metadata(_bytes(value))
        elif number == 2:
            key, content = _entry(_bytes(value))
            secret["data"][key] = base64.b64encode(content).decode()
        elif number == 3:
            secret["type"] = _bytes(value).decode()
    return secret


def decode_delete_options(body: bytes) -> Document:
    """What a DELETE asks for: `propagationPolicy` and `dryRun`, where they are given. Raises ValueError."""
    options: Document = {}
    for number, value in _fields(_message(body)):
        if number in _DELETE_TEXTS:
            options[_DELETE_TEXTS[number]] = _bytes(value).decode()
    return options


def _message(body: bytes) -> bytes:
    if not body.startswith(MAGIC):
        raise ValueError("not the protobuf encoding of Kubernetes")
    return _bytes(dict(_fields(body[len(MAGIC) :]))[_RAW_FIELD])


def _metadata(message: bytes) -> Document:
    metadata: Document = {}
    for number, value in _fields(message):
        if number in _META_TEXTS and value:
            metadata[_META_TEXTS[number]] = _bytes(value).decode()
        elif number in _META_MAPS:
            key, content = _entry(_bytes(value))
            metadata.setdefault(_META_MAPS[number], {})[key] = content.decode()
    return metadata


def _entry(message: bytes) -> tuple[str, bytes]:
    pair = dict(_fields(message))
    return _bytes(pair[1]).decode(), _bytes(pair.get(2, b""))


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where text or a message was expected")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of each field: a number, or the bytes of a text, message or fixed-size value."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(message, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[at]
        at += 1
        result |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return result, at
