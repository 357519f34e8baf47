"""Tools: through the chat template, and back out of the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Delta, Generation
from dflash_trt.serving.openai.answers import ChatAnswer
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions
from dflash_trt.serving.openai.readers import ToolTextReader
from dflash_trt.serving.openai.tools import ToolParser, ToolTemplate
from tests.serving.conftest import Served, running

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<it's> ü"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TEXT = f"One <moment>. {CALL} and {CALL}<tool_call>nonsense</tool_call> <tool"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_tools_go_through_the_template(served: Served, folder: Path) -> None:
    """The prompt that was run is the template's text, descriptions unescaped."""
    options = ServerOptions()
    host = EngineHost(folder, options)
    host.start = lambda: host.adopt(served.runtime)  # type: ignore[method-assign]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
    ]
    turns = 'user:Rain?\nassistant:{"a": 1}\ntool:no\n'
    text = f"{json.dumps(TOOLS[0], ensure_ascii=False)}\n<tool_call>{turns}"
    with running(host, options) as url:
        server = Served(url, host, served.runtime)
        asked = {"model": "tiny", "max_tokens": 2, "temperature": 0}
        answer = server.client().chat.completions.create(messages=messages, tools=TOOLS, **asked)
        assert answer.usage.prompt_tokens == len(served.runtime.codec.ids(text))
        ids = host.chat_ids([{"role": "user", "content": "Rain?"}], TOOLS)
        assert served.runtime.codec.text(ids).endswith("user:Rain?\n")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(size: int) -> None:
    parser, shown, calls = ToolParser(), "", []
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    for i, piece in enumerate(pieces):
        text, found = parser.push(piece, last=i == len(pieces) - 1)
        shown, calls = shown + text, calls + found
    assert shown == "One <moment>.  and <tool_call>nonsense</tool_call> <tool"
    assert [call["index"] for call in calls] == [0, 1]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Zürich"}
    assert calls[0]["id"] != calls[1]["id"]


def test_answers_carry_calls(served: Served) -> None:
    generation = Generation(text=CALL, finish_reason="stop")
    answer = ChatAnswer("m", "f", served.runtime.codec, [ToolTextReader()])
    choice = answer.whole([generation])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    streaming = ChatAnswer("m", "f", served.runtime.codec, [ToolTextReader()])
    assert streaming.chunk(0, Delta((1,), CALL[:20]), generation) is None
    chunk = streaming.chunk(0, Delta((2,), CALL[20:]), generation)
    assert chunk is not None
    assert chunk["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    last = streaming.chunk(0, Delta(finish_reason="stop"), generation)
    assert last is not None
    assert last["choices"][0]["finish_reason"] == "tool_calls"


def test_refusals(folder: Path) -> None:
    template = ToolTemplate(folder, {})
    broken = {"function": {"name": "f", "arguments": "{"}}
    with pytest.raises(InputError, match="arguments of f are not JSON"):
        template.render([{"role": "assistant", "content": "", "tool_calls": [broken]}], TOOLS)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}{{ tools }}<tool_call>")
    with pytest.raises(InputError, match="refuses these messages: no"):
        ToolTemplate(folder, {}).render([], TOOLS)
