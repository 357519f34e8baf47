"""Requests of OpenAI's API, checked: an unknown key or a value out of range is an error."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StringConstraints

from dflash_trt.errors import InputError
from dflash_trt.runtime.options import SMALLEST_PENALTY, GenerationOptions

StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(strict=True, ge=-100, le=100)]
NonNegative = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Positive = Annotated[StrictInt, Field(ge=1, lt=2**31)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Text = Annotated[str, StringConstraints(min_length=1)]


class Strict(BaseModel):
    """Unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: StrictBool = False


class ResponseFormat(Strict):
    type: Literal["text"]


class Sampling(Strict):
    """What both endpoints take. top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
    stop_token_ids, draft and adaptive are ours; metadata, service_tier, store and user mean nothing here."""

    usual_tokens: ClassVar[int | None] = (
        None  # length of an answer where none is given; None: what fits
    )
    model: str | None = None
    n: Annotated[StrictInt, Field(ge=1, le=16)] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: NonNegative | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, ge=SMALLEST_PENALTY, le=100)] | None = (
        None
    )
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    seed: Seed | None = None
    min_tokens: NonNegative | None = None
    ignore_eos: StrictBool | None = None
    draft: StrictBool | None = None
    adaptive: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: StrictBool | None = None
    user: str | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return None

    def options(self, max_tokens: int, index: int) -> GenerationOptions:
        """Choice `index` of the answer; a seed counts on from one choice to the next."""
        values = {
            name: getattr(self, name)
            for name in _SAME_NAME
            if getattr(self, name) is not None
        }  # fmt: skip
        values["temperature"] = 1.0 if self.temperature is None else self.temperature
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationOptions(
            max_tokens=max_tokens,
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias={int(key): value for key, value in (self.logit_bias or {}).items()},
            seed=None if self.seed is None else self.seed + index,
            logprobs=self.wanted_logprobs(),
            **values,
        )


_SAME_NAME = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "draft", "adaptive",
)  # fmt: skip


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: Text
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    """One turn. Content of several parts is joined; `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        text = self.content
        if isinstance(text, list):
            text = "".join(part.text for part in text)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text or "",
        }
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        for key in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        return message


class FunctionSpec(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionSpec


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None

    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs: needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def used_tools(self) -> list[dict[str, Any]]:
        """Tools as the chat template takes them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class CompletionRequest(Sampling):
    """POST /v1/completions: the prompt as it is, text or token ids, one or several."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=64)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=64)]
    )
    usual_tokens: ClassVar[int | None] = 16
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
