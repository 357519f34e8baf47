"""Tools: their descriptions go through the chat template, calls are read back from the answer.

A call is what the template's own turns write: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_trt.errors import InputError

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolTemplate:
    """An engine directory's chat template, rendered with tools."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        source = (folder / "chat_template.jinja").read_text()
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._arguments = dict(arguments)
        names = find_undeclared_variables(environment.parse(source))
        self._knows_tools = "tools" in names and OPEN in source

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        """The text of a chat with tools; refused where the template has no place for them."""
        if not self._knows_tools:
            raise InputError("tools: this model's chat template takes no tools")
        try:
            return self._template.render(
                messages=[_parsed(message) for message in messages],
                tools=tools,
                add_generation_prompt=True,
                **self._arguments,
            )
        except TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from None


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of earlier calls as objects, which is what templates write out."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [_parsed_call(call) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        raise InputError(f"tool_calls: arguments of {function['name']} are not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass
class ToolParser:
    """Splits text that comes in pieces into what is shown and whole tool calls."""

    _held: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def push(self, piece: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """(text to show, calls completed). What is no valid call is shown as it came."""
        text, shown, calls = self._held + piece, "", []
        while (begin := text.find(OPEN)) >= 0 and (end := text.find(CLOSE, begin)) >= 0:
            call = _read_call(text[begin + len(OPEN) : end])
            shown += text[:begin] if call else text[: end + len(CLOSE)]
            text = text[end + len(CLOSE) :]
            if call:
                calls.append(call)
        keep = 0 if last else _undecided(text)
        shown, self._held = shown + text[: len(text) - keep], text[len(text) - keep :]
        calls = [{"index": len(self.calls) + i, **call} for i, call in enumerate(calls)]
        self.calls += calls
        return shown, calls


def _undecided(text: str) -> int:
    """How much of the end may still become a call."""
    begin = text.find(OPEN)
    if begin >= 0:
        return len(text) - begin
    sizes = range(min(len(OPEN) - 1, len(text)), 0, -1)
    return next((size for size in sizes if OPEN.startswith(text[-size:])), 0)


def _read_call(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
        name, arguments = content["name"], content["arguments"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(name, str):
        return None
    written = arguments if isinstance(arguments, str) else _json(arguments)
    function = {"name": name, "arguments": written}
    return {"id": call_id(), "type": "function", "function": function}


def call_id() -> str:
    return f"call_{token_hex(12)}"
