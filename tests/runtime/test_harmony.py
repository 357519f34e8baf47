"""Harmony: what a parser that looks at single tokens loses when a block commits several."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_trt.errors import InputError
from dflash_trt.runtime.harmony import Delta, HarmonyChat, HarmonyStream, whole_messages
from tests import o200k

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ANSWER = (
    "<|channel|>analysis<|message|>Two places: 東京 and 🧑‍🚀 base.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city": "Zürich"}<|end|>'
    "<|start|>assistant<|channel|>final<|message|>  It is 20 °C.\n\n<b>Fine</b> 🧑‍🚀<|return|>"
)
MESSAGES = [
    Delta(0, "analysis", "", "Two places: 東京 and 🧑‍🚀 base."),
    Delta(1, "commentary", "functions.get_weather", '{"city": "Zürich"}'),
    Delta(2, "final", "", "  It is 20 °C.\n\n<b>Fine</b> 🧑‍🚀"),
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> HarmonyChat:
    return HarmonyChat(o200k.vocabulary(tmp_path_factory.mktemp("vocabulary")))


def read(stream: HarmonyStream, tokens: Sequence[int], size: int) -> list[Delta]:
    found: list[Delta] = []
    for begin in range(0, len(tokens), size):
        found += stream.push(tokens[begin : begin + size])
    return found + stream.finish()


@pytest.mark.parametrize("size", range(1, 17))
def test_blocks_of_any_size(chat: HarmonyChat, size: int) -> None:
    """Headers, a tool call, characters of several tokens and the last token inside a block."""
    stream = chat.stream()
    assert whole_messages(read(stream, chat.encode(ANSWER), size)) == MESSAGES
    assert not stream.broken


@pytest.mark.parametrize("size", [1, 4, 64])
def test_an_answer_cut_off_in_a_character(chat: HarmonyChat, size: int) -> None:
    """The budget ends inside an emoji: what there is of it is not lost."""
    tokens = chat.encode("<|channel|>final<|message|>ok 🧑‍🚀")
    (delta,) = whole_messages(read(chat.stream(), tokens[:-1], size))
    assert delta.text.startswith("ok 🧑")
    assert delta.text.endswith("\N{REPLACEMENT CHARACTER}")


def test_prompt(chat: HarmonyChat) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Zürich?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I need the tool.",
            "tool_calls": [
                {"id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "20 °C"},
    ]
    tokens = chat.prompt(messages, [WEATHER], effort="low", date="2026-01-31")
    parts = (
        "Current date: 2026-01-31", "Reasoning: low", "Be brief.", "namespace functions",
        "Weather in Zürich?", "<|channel|>analysis<|message|>I need the tool.",
        "to=functions.get_weather", '{"city": "Zürich"}', "functions.get_weather to=assistant",
    )  # fmt: skip
    text = chat._encoding.decode(tokens)
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert text.endswith("20 °C<|end|><|start|>assistant")
    assert chat.stop_ids == (200002, 200012)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "robot", "content": "x"}], "role 'robot'"),
        ([{"role": "tool", "tool_call_id": "c9", "content": "x"}], "names no call"),
    ],
)
def test_messages_that_cannot_be_rendered(chat: HarmonyChat, messages: list, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        chat.prompt(messages)
    with pytest.raises(InputError, match="effort 'none': low, medium, high"):
        chat.prompt([], effort="none")
