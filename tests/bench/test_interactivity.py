"""What the concurrency sweep counts, and the example that shows it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from threading import Lock, Timer

import pytest

from dflash_trt.bench import interactivity
from dflash_trt.bench.endpoints import Finished, LocalRuntime
from dflash_trt.bench.interactivity import (
    Level,
    Timeline,
    comparison,
    run_level,
    summarise,
    sweep,
)
from dflash_trt.bench.prompts import lengthened
from dflash_trt.errors import InputError
from dflash_trt.planner.calibration import GRAPHS
from dflash_trt.planner.hardware import find_gpu
from dflash_trt.planner.interactivity import curves
from dflash_trt.planner.roofline import Setting
from dflash_trt.planner.shapes import find_plan
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from dflash_trt.runtime.metrics import GenerationMetrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "latency_at_interactivity.py"


def timeline(*arrivals: tuple[float, int]) -> Timeline:
    return Timeline(Generation(), submitted=10.0, arrivals=list(arrivals))


def level(mode: str, users: int, tpot: float, tokens: int) -> Level:
    return Level(mode, users, 1, 0, 1.0, 0, tokens, None, {}, {"p50": tpot}, {})


def test_tokens_are_counted_not_chunks() -> None:
    """Three deliveries of 1, 4 and 5 tokens: TPOT is the span over nine tokens, not two gaps."""
    line = timeline((10.5, 1), (10.7, 4), (11.4, 5))
    assert line.ttft == pytest.approx(0.5)
    assert line.tokens == 10
    assert line.tpot == pytest.approx(0.1)
    assert line.gaps == pytest.approx([0.2, 0.7])
    found = summarise("dflash", 1, 2.0, [line, timeline()])
    assert (found.output_tokens, found.throughput, found.failed) == (10, 5.0, 1)
    assert found.interactivity == pytest.approx(10.0)


def test_every_figure_of_a_level() -> None:
    """A hundred requests with TTFT of 1 to 99 and of 200 ms, TPOT twice that, deliveries four times
    that apart, of two tokens; and one that failed."""
    lines = [timeline()]
    lines[0].generation.metrics = GenerationMetrics(prompt_tokens=9, cycles=9, committed=9)
    for i in (*range(1, 100), 200):
        first = 10 + i / 1e3
        line = timeline((first, 1), (first + 4 * i / 1e3, 2), (first + 8 * i / 1e3, 2))
        line.generation.metrics = GenerationMetrics(prompt_tokens=7, cycles=2, committed=5)
        lines.append(line)
    assert summarise("dflash", 4, 10.0, lines).row() == {
        "mode": "dflash", "users": 4, "input": 7, "requests": 101, "failed": 1,
        "tok/s/user": 9.9, "out tok/s": 50.0, "all tok/s": 120.0, "accept": 2.5,
        "TTFT p50": 50.5, "TTFT p90": 90.1, "TTFT p99": 100.01,
        "TPOT p50": 101.0, "TPOT p90": 180.2, "TPOT p99": 200.02,
        "chunk p50": 202.0, "chunk p90": 360.4, "chunk p99": 400.04,
    }  # fmt: skip
    assert summarise("autoregressive", 4, 10.0, lines).acceptance_length is None


def test_ratios_at_equal_concurrency_and_interactivity() -> None:
    levels = [
        level("autoregressive", 1, 10.0, 100),
        level("autoregressive", 4, 20.0, 200),
        level("dflash", 1, 5.0, 200),
        level("dflash", 4, 16.0, 300),
    ]
    one, four = comparison(levels)
    assert (one["plain ends at"], four["plain ends at"]) == (100.0, 100.0)
    assert (one["at tok/s/user"], four["at tok/s/user"]) == (200.0, 62.5)
    assert one["equal concurrency"] == 2.0
    assert one["equal interactivity"] is None  # 200 tokens/s per user: plain decoding ends at 100
    assert four["equal concurrency"] == 1.5
    # At 62.5 tokens/s per user the plain curve is a quarter of the way from 50 to 100.
    assert four["equal interactivity"] == pytest.approx(300 / 175, abs=1e-3)


class Server:
    """Notes what it is asked; every third request of a level fails."""

    name, slots = "noting", None

    def __init__(self) -> None:
        self.asked: list[GenerationOptions] = []

    def count(self, text: str) -> int:
        return len(text)

    def submit(self, prompt: object, options: GenerationOptions, finished: Finished) -> Timeline:
        self.asked.append(options)
        line = timeline((10.5, 1), (10.9, options.max_tokens - 1))
        line.failure = "full" if len(self.asked) % 3 == 0 else None
        finished()
        return line


def test_warm_up_and_failures_are_in_no_figure() -> None:
    """Of each level one short request per user comes first; a failed one, whatever it had sent
    before, is counted as that only."""
    server = Server()
    plain, drafted = sweep(server, ["one", "two"], [2], GenerationOptions(20, ignore_eos=True))
    assert all(o.ignore_eos for o in server.asked)
    short, full = (False, 8), (False, 20)
    assert [(o.draft, o.max_tokens) for o in server.asked[:6]] == [short] * 2 + [full] * 4
    assert all(o.draft for o in server.asked[6:])
    for level in (plain, drafted):
        assert (level.requests, level.failed, level.output_tokens) == (4, 2, 40)
        assert level.ttft_ms["p50"] == pytest.approx(500)
        assert level.interactivity == pytest.approx(47.5, rel=1e-3)


def test_a_level_of_which_everything_fails_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    line = timeline()
    line.failure = "refused"
    monkeypatch.setattr(interactivity, "run_level", lambda *_: (1.0, [line] * 4))
    with pytest.raises(InputError, match="concurrency 2, autoregressive: refused"):
        sweep(Server(), ["one"], [2], GenerationOptions(20))


def test_the_time_of_the_warm_up_is_not_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    line = timeline((10.5, 1), (10.9, 19))

    def run(_: object, prompts: list, concurrency: int, options: GenerationOptions) -> tuple:
        return (100.0 if options.max_tokens == 8 else 2.0), [line] * len(prompts)

    monkeypatch.setattr(interactivity, "run_level", run)
    for level in sweep(Server(), ["one"], [2], GenerationOptions(20)):
        assert (level.seconds, level.throughput) == (2.0, 40.0)


class Busy(Server):
    """Takes some time for a request; notes how many there are at once, and how many are done."""

    def __init__(self) -> None:
        self.now = self.most = self.done = 0
        self.lock = Lock()

    def submit(self, prompt: object, options: GenerationOptions, finished: Finished) -> Timeline:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        Timer(0.02, self.end, [finished]).start()
        return timeline()

    def end(self, finished: Finished) -> None:
        with self.lock:
            self.now, self.done = self.now - 1, self.done + 1
        finished()


def test_as_many_requests_are_in_flight_as_there_are_users() -> None:
    server = Busy()
    seconds, lines = run_level(server, ["one"] * 7, 3, GenerationOptions(4))
    assert (server.most, server.done, len(lines)) == (3, 7, 7)
    assert seconds > 0.06, "three times three at once"


def test_a_sweep_over_an_engine(tiny_engine: Path) -> None:
    endpoint = LocalRuntime(Runtime.load(tiny_engine))
    options = GenerationOptions(20, ignore_eos=True)
    levels = sweep(endpoint, ["one", "another"], [1], options)
    assert [x.mode for x in levels] == ["autoregressive", "dflash"]
    for x in levels:
        assert (x.requests, x.failed, x.output_tokens) == (4, 0, 80)
        assert x.ttft_ms["p50"] > 0
    with pytest.raises(InputError, match="concurrency 9: this engine has 1 slots"):
        sweep(endpoint, ["one"], [9], options)


def test_a_servers_own_count_is_taken_over_its_chunks() -> None:
    line = timeline((10.5, 0), (10.7, 0), (11.5, 0))
    line.counted = 11
    assert (line.tokens, line.tpot) == (11, pytest.approx(0.1))


def test_prompts_of_a_length(tiny_engine: Path) -> None:
    """Longer by words of the others, never shorter, their own question last."""
    count = LocalRuntime(Runtime.load(tiny_engine)).count
    texts = ["How long is a piece of string?", "Why is the sky blue today? " * 12]
    short, long = lengthened(texts, 200, count)
    assert count(short) == pytest.approx(200, rel=0.05)
    assert short.endswith(texts[0])
    assert long == texts[1]
    with pytest.raises(InputError, match="isl: message lists are not lengthened"):
        lengthened([[{"role": "user", "content": "a"}]], 10, count)


def run_example(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return int(end.value.code or 0)


def test_the_example_writes_its_figures(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "figures"
    assert run_example(monkeypatch, tiny_engine, "--osl", 16, "--isl", 120, "-o", out) == 0
    names = {p.name for p in out.iterdir()}
    assert names == {"levels.json", "levels.csv", "pareto.png", "latency.png", "index.html"}
    levels = json.loads((out / "levels.json").read_text())["levels"]
    assert [level["users"] for level in levels] == [1, 1]  # one slot
    assert levels[0]["input"] == pytest.approx(120, rel=0.1)
    page = (out / "index.html").read_text()
    assert "http" not in page
    for part in ("tiny, measured", "<th>plain ends at</th>", "TPOT: (end-to-end - TTFT)"):
        assert part in page


def test_the_example_asks_for_what_its_options_say(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    asked = []

    def noted(
        endpoint: object, prompts: list, users: list, options: GenerationOptions, **_: object
    ):
        asked.append((users, options))
        return [level(mode, 1, 10.0, 100) for mode in ("autoregressive", "dflash")]

    monkeypatch.setattr(interactivity, "sweep", noted)
    options = ["--osl", 16, "--block", 4, "--concurrency", "1,3"]
    assert run_example(monkeypatch, tiny_engine, *options, "-o", tmp_path) == 0
    assert asked == [([1, 3], GenerationOptions(16, width=4, ignore_eos=True))]


def test_modelled_figures_are_the_planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    options = ["--modelled", "b300", "--tp", 8, "--tau", 3, "--concurrency", "1,4"]
    assert run_example(monkeypatch, *options, "-o", tmp_path) == 0
    levels = json.loads((tmp_path / "levels.json").read_text())["levels"]
    plan = find_plan("gpt-oss-120b")
    setting = Setting(plan, find_gpu("b300"), GRAPHS, "mxfp4", 1, 2048, plan.block, ranks=8)
    both = curves(setting, 3.0, (1, 4))
    for row, point in zip(levels, (*both.plain, *both.dflash), strict=True):
        assert row["users"] == point.batch
        assert row["tok/s/user"] == pytest.approx(point.interactivity, rel=1e-3)
        assert row["out tok/s"] == pytest.approx(point.throughput, rel=1e-2)
    assert [row["accept"] for row in levels] == [None, None, 3, 3]


def test_modelled_figures_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Terminal, page, tables and pictures, each by itself, and with the sources of the constants."""
    pytest.importorskip("matplotlib")
    from dflash_trt.bench import plots
    from tests.bench.drawn import draw_instead, words

    drawn = draw_instead(monkeypatch, plots)
    assert run_example(monkeypatch, "--modelled", "b200", "-o", tmp_path) == 0
    shown = capsys.readouterr().out
    files = [(tmp_path / name).read_text() for name in ("index.html", "levels.csv", "levels.json")]
    for text in (shown, *files, *map(words, drawn)):
        assert "MODELLED, not measured" in text
    for source in ("launch floors chosen", "NVIDIA", "data sheet", "docs/planner.md"):
        assert source in " ".join(shown.split())
        assert source in files[0]
    assert files[1].count("MODELLED") == len(files[1].splitlines()) - 1
    assert run_example(monkeypatch, "--modelled", "abacus", "-o", tmp_path) == 2
    assert "gpu 'abacus'" in capsys.readouterr().err
