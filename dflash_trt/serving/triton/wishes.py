"""From a request's tensors to a prompt and generation options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime

Tensors = Mapping[str, NDArray[Any]]
_SAMPLING = {
    "max_tokens": int, "min_tokens": int, "temperature": float, "top_p": float, "top_k": int,
    "min_p": float, "repetition_penalty": float, "presence_penalty": float,
    "frequency_penalty": float, "seed": int, "logprobs": int, "ignore_eos": bool,
}  # fmt: skip
_RENAMED = {
    "max_tokens": "max_tokens",
    "request_output_len": "max_tokens",
    "min_length": "min_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "random_seed": "seed",
}


@dataclass(frozen=True)
class Wish:
    """One row of a request. echo: what stands before the answer's text; returned: the
    `return_..` inputs that are true."""

    prompt: list[int]
    options: GenerationOptions
    stream: bool
    echo: str
    returned: frozenset[str]


class Row:
    """The tensors of one row, read by name; None where one was left out."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def many(self, name: str) -> list[Any]:
        values = self._tensors.get(name)
        if values is None:
            return []
        return [_text(name, v) if isinstance(v, bytes) else v for v in values.reshape(-1).tolist()]

    def one(self, name: str) -> Any:
        if name not in self._tensors:
            return None
        values = self.many(name)
        if len(values) != 1:
            raise InputError(f"{name}: holds {len(values)} values, 1 is expected")
        return values[0]


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InputError(f"{name}: is not UTF-8") from None


def rows(tensors: Tensors, batched: bool) -> Iterator[Row]:
    """A request's rows; `batched`: the first dimension counts them."""
    if not batched:
        yield Row(tensors)
        return
    counts = {len(values) for values in tensors.values()}
    if len(counts) != 1:
        raise InputError("the batch dimension differs between inputs")
    for index in range(counts.pop()):
        yield Row({name: values[index] for name, values in tensors.items()})


def read_wish(row: Row, runtime: Runtime) -> Wish:
    """What a row asks for; refused by name where it cannot be had."""
    prompt, text = _prompt(row, runtime)
    returned = [n for n in _RETURNED if row.one(n)]
    stream = bool(row.one("stream") or row.one("streaming"))
    options = _options(row, any("log" in name for name in returned))
    echo = text if row.one("exclude_input_in_output") is False else ""
    return Wish(prompt, options, stream, echo, frozenset(returned))


_RETURNED = (
    "return_log_probs", "return_finish_reason", "return_cumulative_logprob", "return_logprobs",
    "return_num_input_tokens", "return_num_output_tokens", "return_figures",
)  # fmt: skip


def _prompt(row: Row, runtime: Runtime) -> tuple[list[int], str]:
    """Token ids, and the text they came from."""
    given = [name for name in ("text_input", "messages", "input_ids") if row.many(name)]
    if len(given) != 1:
        raise InputError("give exactly one of text_input, messages and input_ids")
    if given == ["input_ids"]:
        return _ids(row), ""
    text = row.one(given[0])
    if given == ["messages"]:
        return runtime.prompt_ids(_messages(text)), ""
    if row.one("apply_chat_template") is False:
        return runtime.codec.ids(text), text
    return runtime.prompt_ids(text), text


def _ids(row: Row) -> list[int]:
    ids, length = row.many("input_ids"), row.one("input_lengths")
    if length is not None and not 0 < length <= len(ids):
        raise InputError(f"input_lengths {length}: input_ids has {len(ids)} tokens")
    return ids[:length]


def _messages(text: str) -> list[dict[str, Any]]:
    messages = _json("messages", text)
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise InputError("messages: must be a list of objects with role and content, as JSON")
    return messages


def _is_message(message: Any) -> bool:
    keys = ("role", "content")
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in keys)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InputError(f"{name}: is not JSON") from None


def _options(row: Row, logprobs: bool) -> GenerationOptions:
    values = _sampling_parameters(row.one("sampling_parameters")) | _own_tensors(row)
    stops = [*values.pop("stop", ()), *filter(None, row.many("stop_words"))]
    end = row.one("end_id")
    ends = [*values.pop("stop_token_ids", ()), *([] if end in (None, -1) else [end])]
    _refuse_unsupported(row)
    if values.get("top_k", 0) < 0:
        values["top_k"] = 0
    if values.get("top_p") == 0:
        del values["top_p"]
    if "temperature" not in values and _samples(values):
        values["temperature"] = 1.0
    if logprobs:
        values.setdefault("logprobs", 0)
    return GenerationOptions(stop=tuple(stops), stop_token_ids=tuple(ends), **values)


def _samples(values: Mapping[str, Any]) -> bool:
    """Without a temperature, top_k or top_p say that tokens are drawn."""
    return values.get("top_k", 1) != 1 or values.get("top_p", 1) < 1


def _own_tensors(row: Row) -> dict[str, Any]:
    names = {name: name for name in (*_SAMPLING, "draft", "adaptive")} | _RENAMED
    read = {key: row.one(name) for name, key in names.items()}
    read |= {key: row.one(name) for name, key in _RENAMED.items() if row.one(name) is not None}
    return {key: value for key, value in read.items() if value is not None}


def _refuse_unsupported(row: Row) -> None:
    if any(row.many("bad_words")):
        raise InputError("bad_words: not supported")
    if row.one("beam_width") not in (None, 1):
        raise InputError("beam_width: only 1 is supported")


def _sampling_parameters(text: str | None) -> dict[str, Any]:
    """vllm_backend's JSON object of parameters."""
    if not text:
        return {}
    content = _json("sampling_parameters", text)
    if not isinstance(content, dict):
        raise InputError("sampling_parameters: must be a JSON object")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if value is not None:
            values |= _parameter(key, value)
    return values


def _parameter(key: str, value: Any) -> dict[str, Any]:
    try:
        if key in _SAMPLING:
            return {key: _number(value, _SAMPLING[key])}
        if key == "stop":
            return {key: [value] if isinstance(value, str) else _list_of(value, str)}
        if key == "stop_token_ids":
            return {key: _list_of(value, int)}
        if key == "logit_bias":
            return {key: {int(token): float(bias) for token, bias in value.items()}}
    except (TypeError, ValueError, AttributeError):
        raise InputError(f"sampling_parameters: {key} cannot be {value!r}") from None
    if key == "n" and value == 1:
        return {}
    raise InputError(f"sampling_parameters: {key} is not supported")


def _number(value: Any, kind: type) -> Any:
    """Numbers may come as text; a fraction is no integer."""
    converted = kind(value)
    if isinstance(value, bool) != (kind is bool) or (kind is int and converted != float(value)):
        raise ValueError
    return converted


def _list_of(value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise TypeError
    return value
