"""The bodies that OpenAI clients expect: choices, chunks, usage, errors. Builds plain data; sends nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from router.output import OutputDelta
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

    def opening(self, index: int, prompt_token_ids: Sequence[int]) -> Json | None:
        """The choice of the first chunk: chat names the role; None where there is nothing to say."""
        extra = {"prompt_token_ids": list(prompt_token_ids)} if self.return_token_ids else {}
        if self.kind == "chat":
            return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None) | extra
        return self._choice(index, {"text": ""}, None) | extra | {"token_ids": []} if extra else None

    def delta(self, index: int, delta: OutputDelta) -> Json | None:
        """The choice of one further chunk; None where there is nothing to say."""
        if not (delta.text or delta.finish_reason or (self.return_token_ids and delta.token_ids)):
            return None
        reason = delta.finish_reason.value if delta.finish_reason else None
        if self.kind == "text":
            content: Json = {"text": delta.text}
        else:
            content = {"delta": {"content": delta.text} if delta.text or not reason else {}}
        return self._choice(index, content, reason) | self._token_ids(delta)

    def choice(self, index: int, output: OutputDelta, prompt_token_ids: Sequence[int]) -> Json:
        """The choice of an answer without streaming."""
        reason = output.finish_reason.value if output.finish_reason else None
        message = {"role": "assistant", "content": output.text, "refusal": None}
        content: Json = {"text": output.text} if self.kind == "text" else {"message": message}
        extra = {"prompt_token_ids": list(prompt_token_ids)} if self.return_token_ids else {}
        return self._choice(index, content, reason) | self._token_ids(output) | extra

    def _token_ids(self, output: OutputDelta) -> Json:
        return {"token_ids": list(output.token_ids)} if self.return_token_ids else {}

    def _choice(self, index: int, content: Mapping[str, Any], finish_reason: str | None) -> Json:
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

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
