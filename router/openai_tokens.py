"""POST /tokenize and /detokenize, as vLLM has them: what a prompt's tokens would be, and the text of tokens."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, model_validator
from starlette.responses import JSONResponse, Response

from router.frontend import Frontend
from router.openai_chat import Message, ToolBody, tool_use
from router.openai_messages import served_messages
from router.openai_types import parse_body
from router.prompt import Conversation, Prompt
from router.sse import read_body
from router.template_use import TemplateUse, told_variables
from router.validation import check_token_ids
from tandem.errors import InvalidRequest


class TokenizeBody(BaseModel):
    """Either a prompt or messages."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolBody] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_served_messages(cls, values: dict[str, Any]) -> dict[str, Any]:
        messages = values.get("messages")
        return {**values, "messages": served_messages(messages)} if isinstance(messages, list) else values

    def asked(self) -> Prompt:
        """The prompt. Raises InvalidRequest for both or neither."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if self.messages is None:
            assert self.prompt is not None
            return self.prompt
        if self.continue_final_message and self.add_generation_prompt:
            why = "continue_final_message goes with add_generation_prompt=false: it begins no other message"
            raise InvalidRequest(why, param="continue_final_message")
        return Conversation(
            messages=tuple(message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)),
            tools=tool_use(self.tools or (), None, parallel=True),
            template=TemplateUse(
                begins_answer=self.add_generation_prompt,
                continues_last=self.continue_final_message,
                variables=told_variables(self.chat_template_kwargs, self.reasoning_effort),
            ),
        )


class DetokenizeBody(BaseModel):
    """Token ids."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    tokens: list[int]


class TokenApi:
    """The handlers of one router."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = parse_body(await read_body(request), TokenizeBody)
        model = self._frontend.served_model(body.model)
        tokens = list(await self._frontend.prompt_tokens(body.asked()))
        spell = self._frontend.tokenizer.token_text
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": model.max_context_tokens,
                "tokens": tokens,
                "token_strs": [spell(token)[0] for token in tokens] if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize. Special tokens are spelled out."""
        body = parse_body(await read_body(request), DetokenizeBody)
        self._frontend.served_model(body.model)
        tokenizer = self._frontend.tokenizer
        check_token_ids(body.tokens, vocab_size=tokenizer.vocab_size, param="tokens")
        return JSONResponse({"prompt": tokenizer.decode(body.tokens, keep_special=True)})
