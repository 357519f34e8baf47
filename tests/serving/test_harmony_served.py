"""A gpt-oss engine behind the OpenAI server: channels, tool calls and prompts, whole and streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.cli import main
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.engines.directory import read_manifest
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.harmony_codec import HarmonyCodec
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions
from tests import o200k, tiny
from tests.runtime.test_harmony import ANSWER, WEATHER
from tests.serving.conftest import Served, running, serving, wait_for
from tests.serving.scripted import ScriptedPair
from tests.tiny_gpt_oss import tiny_gpt_oss

TEMPLATE = "<|start|>{{ messages[0].content }}<|message|><|channel|>"  # how a checkpoint is known
ASK = [{"role": "user", "content": "Weather in Zürich?"}]
PREAMBLE = (
    "<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.a <|constrain|>json<|message|>{}<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.b<|message|>{"x": [1, 2]}<|call|>'
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny and random, with gpt-oss's vocabulary."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    target = tiny_gpt_oss(
        folder / "target", vocab_size=o200k.ROWS, num_hidden_layers=2, layer_types=None
    )
    o200k.tokenizer(o200k.vocabulary(folder)).save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 199999}))
    taps = {"target_layer_ids": [0, 1], "mask_token_id": 200000}
    drafter = tiny.tiny_drafter(
        folder / "drafter", vocab_size=o200k.ROWS, num_target_layers=2, dflash_config=taps
    )
    options = BuildOptions(
        "gpt-oss", block=8, max_seq_len=384, chat_arguments={"reasoning_effort": "low"}
    )
    build_cpu(open_target(target), open_drafter(drafter), options, folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module")
def codec(engine: Path) -> HarmonyCodec:
    return HarmonyCodec(engine, read_manifest(engine, verify=False).chat_arguments)


def scripted(engine: Path, codec: HarmonyCodec, answer: str, run: int) -> Runtime:
    """Says `answer`, `run` tokens a cycle."""
    manifest = read_manifest(engine, verify=False)
    return Runtime(ScriptedPair(manifest, codec.chat.encode(answer), run), codec)  # type: ignore[arg-type]


@contextmanager
def saying(engine: Path, codec: HarmonyCodec, answer: str, run: int) -> Iterator[Served]:
    """A server of it."""
    runtime, options = scripted(engine, codec, answer, run), ServerOptions()
    host = EngineHost(engine, options)
    host.start = lambda: host.adopt(runtime)  # type: ignore[method-assign]
    with running(host, options) as url:
        wait_for(lambda: host.ready)
        yield Served(url, host, runtime)


def ask(served: Served, **values: object):
    asked = {"model": "gpt-oss", "messages": ASK, "temperature": 0, **values}
    return served.client().chat.completions.create(**asked)


def gathered(chunks) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls and finish reason of a stream."""
    content, thought, calls, reason = "", "", {}, ""
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, thought, [(name, text) for name, text in calls.values()], reason


def of(choice) -> tuple[str, str, list[tuple[str, str]], str]:
    """The same of a whole answer."""
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    thought = getattr(choice.message, "reasoning_content", "")
    return choice.message.content or "", thought, calls, choice.finish_reason


CASES = {
    "channels and a call": (
        ANSWER,
        (
            "  It is 20 °C.\n\n<b>Fine</b> 🧑‍🚀",
            "Two places: 東京 and 🧑‍🚀 base.",
            [("get_weather", '{"city": "Zürich"}')],
            "tool_calls",
        ),
    ),
    "a preamble and two calls": (
        PREAMBLE, ("I look.", "", [("a", "{}"), ("b", '{"x": [1, 2]}')], "tool_calls"),
    ),
    "an answer": (
        "<|channel|>final<|message|>Sunny.<|return|>never", ("Sunny.", "", [], "stop"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", [1, 3, 8])
@pytest.mark.parametrize("case", CASES)
def test_an_answer_whole_and_streamed(
    engine: Path, codec: HarmonyCodec, case: str, run: int
) -> None:
    """Runs of accepted tokens cross the borders of messages, headers and characters. `<|call|>` ends
    the answer though the checkpoint's own stop ids do not name it."""
    answer, wanted = CASES[case]
    with saying(engine, codec, answer, run) as served:
        whole = ask(served, tools=[WEATHER])
        assert of(whole.choices[0]) == wanted
        assert gathered(ask(served, tools=[WEATHER], stream=True)) == wanted
    assert "chat_format" not in whole.choices[0].dflash


def test_stop_texts_count_in_what_is_shown(engine: Path, codec: HarmonyCodec) -> None:
    answer = (
        "<|channel|>analysis<|message|>Say stop here.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>One. stop here<|return|>"
    )
    wanted = ("One. ", "Say stop here.", [], "stop")
    with saying(engine, codec, answer, 4) as served:
        assert of(ask(served, stop="stop").choices[0]) == wanted
        assert gathered(ask(served, stop="stop", stream=True)) == wanted


def test_tokens_outside_the_format_are_said(engine: Path, codec: HarmonyCodec) -> None:
    broken = "<|channel|>final<|message|>Yes.<|end|>No.<|start|>assistant<|return|>"
    with saying(engine, codec, broken, 4) as served:
        choice = ask(served).choices[0]
        last = list(ask(served, stream=True))[-1].choices[0]
    assert choice.message.content == "Yes."
    assert choice.dflash["chat_format"] == last.dflash["chat_format"] != ""


def test_the_prompt_is_harmonys(engine: Path, codec: HarmonyCodec) -> None:
    """Instructions, tools, effort, and what was thought before a call."""
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "reasoning_content": "Ask the tool.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "20 °C"},
    ]
    with saying(engine, codec, CASES["an answer"][0], 8) as served:
        answer = ask(served, messages=messages, tools=[WEATHER])
        ask(served, extra_body={"reasoning_effort": "high"})
        plain = served.client().completions.create(model="gpt-oss", prompt="Once", temperature=0)
    *_, first, second, third = served.runtime._scheduler._engines.prompts
    assert first == codec.chat_ids(messages, [WEATHER])
    assert answer.usage.prompt_tokens == len(first)
    text = codec.chat._encoding.decode(first)
    for part in (
        "Reasoning: low",
        "Be brief.",
        "type get_weather",
        "Ask the tool.",
        "20 °C<|end|>",
    ):
        assert part in text
    assert "Reasoning: high" in codec.chat._encoding.decode(second)
    assert third == codec.ids("Once")
    assert plain.choices[0].text == "finalSunny."  # as it is: no turn of the assistant's was open


def test_the_engine_itself_is_served(engine: Path) -> None:
    """Built from a checkpoint that says Harmony, with the vocabulary of its own tokenizer."""
    with serving(engine, ServerOptions(threads=1)) as served:
        ids = served.runtime.prompt_ids("Weather in Zürich?")
        wanted = served.runtime.generate(ids, GenerationOptions(12))
        answer = ask(served, max_tokens=12)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(wanted.tokens) > 0
        assert answer.choices[0].message.content == wanted.text
        assert gathered(ask(served, max_tokens=12, stream=True))[0] == wanted.text


def test_run_prints_the_answer_or_all_channels(
    engine: Path,
    codec: HarmonyCodec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(*more: str) -> str:
        runtime = scripted(engine, codec, ANSWER, 3)
        monkeypatch.setattr(Runtime, "load", lambda *_: runtime)
        assert main(["run", str(engine), "Weather?", *more]) == 0
        return capsys.readouterr().out

    answer, thought, [(_, call)], _ = CASES["channels and a call"][1]
    plain = printed()
    assert plain.startswith(f"{answer}\n\n")
    assert plain.rstrip().endswith("thoughts and calls are left out, --channels prints them")
    titled = f"[analysis]\n{thought}\n\n[commentary to functions.get_weather]\n{call}\n\n[final]\n"
    assert printed("--channels").startswith(f"{titled}{answer}\n\n")
    content = json.loads(printed("--json"))
    assert content["text"] == answer
    assert [m["channel"] for m in content["messages"]] == ["analysis", "commentary", "final"]


def test_refusals(
    engine: Path, tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["run", str(tiny_engine), "x", "--channels"]) == 2
    assert "chat format has none" in capsys.readouterr().err
    (tmp_path / "chat_template.jinja").write_text("")
    (tmp_path / "tokenizer.json").write_text(tiny.byte_tokenizer().to_str())
    with pytest.raises(InputError, match="TIKTOKEN_ENCODINGS_BASE to a folder that holds o200k"):
        HarmonyCodec(tmp_path, {})
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    assert main(["run", str(engine), "x"]) == 2
    assert "pip install 'dflash-trt[harmony]'" in capsys.readouterr().err


def test_a_vocabulary_that_is_given_is_used(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(InputError, match="cannot be loaded"):
        HarmonyCodec(engine, {})
    o200k.vocabulary(tmp_path)
    assert HarmonyCodec(engine, {}).chat_ids(ASK)
