"""Bodies that OpenAI clients expect: chunks, answers, usage, errors. Plain data; choices are `openai_choice`'s."""

from __future__ import annotations

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
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choices: Sequence[Json], *, usage: Json | None = None) -> Json:
        """One event of a stream. With include_usage every chunk has `usage`, null but in the last."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return self._body(name, choices) | ({"usage": usage} if self.include_usage else {})

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """The answer without streaming."""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._body(name, choices) | {"usage": usage}

    def _body(self, name: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.response_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


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
