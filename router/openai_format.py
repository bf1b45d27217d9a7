"""Bodies that OpenAI clients expect: chunks, answers, usage, errors. Plain data; choices are `openai_choice`'s."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.errors import TandemError, wire_status
from tandem.rpc.tandem.v1 import inference_pb2

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """What all chunks of one response share, and which of the two APIs it belongs to."""

    kind: Literal["chat", "text"]
    response_id: str
    model: str
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choices: Sequence[Json], *, usage: Json | None = None) -> Json:
        """One event of a stream. With include_usage every chunk has `usage`, null but in the last."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return self._head(name) | {"choices": list(choices)} | ({"usage": usage} if self.include_usage else {})

    def whole(self, choices: Sequence[bytes], usage: Json) -> bytes:
        """The answer without streaming, as JSON; so are the choices."""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        head, tail = json_bytes(self._head(name)), json_bytes({"usage": usage})
        return b"".join((head[:-1], b',"choices":[', b",".join(choices), b"],", tail[1:]))

    def _head(self, name: str) -> Json:
        return {"id": self.response_id, "object": name, "created": self.created, "model": self.model}


def json_bytes(body: Json) -> bytes:
    """Without spaces, in UTF-8. Raises ValueError for numbers that JSON cannot say."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def usage_body(usages: Sequence[inference_pb2.Usage]) -> Json:
    """The sum over a response's choices."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def error_body(error: TandemError) -> Json:
    """OpenAI's error object."""
    kind = wire_status(error).openai_type
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
