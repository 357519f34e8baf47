"""`bench --batch`: one row per batch, the same answers in each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_trt.bench import batches
from dflash_trt.bench.interactivity import Timeline
from dflash_trt.bench.overlap import host_times
from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.cli import main
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from tests.runtime.toy import ToyCodec, ToyPair, as_engines


@pytest.fixture(scope="module")
def engine(
    tiny_checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("engines") / "pair"
    build_cpu(*tiny_checkpoints, BuildOptions("pair", block=4, max_seq_len=256, max_batch=2), out)
    return out


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("one", "two", "three")))
    return path


def bench(engine: Path, prompts: Path, out: Path, sizes: str) -> int:
    options = ["--prompts", prompts, "--max-tokens", 12, "--json", out, "--batch", sizes]
    return main(["bench", *map(str, [engine, *options])])


def test_rows(engine: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In flight are as many as the row says, and an answer that differs is counted."""
    flights, run_level = [], batches.run_level

    def watched(runtime, prompts, batch, options):  # type: ignore[no-untyped-def]
        flights.append((len(prompts), batch, options.draft, options.adaptive))
        seconds, lines = run_level(runtime, prompts, batch, options)
        if len(flights) == 10:  # the drafted run of batch 2
            lines[1].generation.tokens[3] += 1
        return seconds, lines

    monkeypatch.setattr(batches, "run_level", watched)
    assert bench(engine, prompts, tmp_path / "out.json", "1,2") == 0
    modes = [(False, False), (True, False), (True, True)]
    assert flights[1::2] == [(3, batch, *mode) for batch in (1, 2) for mode in modes]
    one, two = json.loads((tmp_path / "out.json").read_text())["batches"]
    assert (one["batch"], two["batch"]) == (1, 2)
    assert one["changed"] == {"autoregressive": 0, "dflash": 0, "adaptive": 0}
    assert two["changed"] == {"autoregressive": 0, "dflash": 1, "adaptive": 0}
    for row in (one, two):
        assert set(row["tokens_per_second"]) == {"autoregressive", "dflash", "adaptive"}
        assert min(row["tokens_per_second"].values()) > 0
        assert row["acceptance_length"] == one["acceptance_length"] >= 1
        assert 0 <= row["drafts_per_cycle"] <= 3  # widths are 4, 2 and 1; all may be the fastest
        assert set(row["host"]) == {"after", "beside"}
        for times in row["host"].values():
            assert 0 < times["host_ms"] < times["cycle_ms"]


def test_other_drafts_accepted_are_a_change() -> None:
    a, b = Timeline(Generation(), 0.0), Timeline(Generation(), 0.0)
    assert not batches._other_drafts(a, b)
    b.generation.metrics.accepted_by_slot = [1]
    assert batches._other_drafts(a, b)
    assert not batches._other_tokens(a, b)


def test_text_made_after_the_engines_counts_as_the_hosts_time() -> None:
    """Making text takes 20 ms, the engines 40 or more: seen where it comes after them, hidden beside
    them. Answers are the same as ever."""

    class SlowText(ToyCodec):
        def push(self, ids: Sequence[int]) -> str:
            time.sleep(0.02)
            return super().push(ids)

    class SlowEngines(ToyPair):
        def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
            time.sleep(0.04)
            super().verify(slots, width, logits)

    runtime = Runtime(as_engines(SlowEngines(slots=1)), SlowText())  # type: ignore[arg-type]
    options = GenerationOptions(30, draft=False, ignore_eos=True)
    times = host_times(runtime, [[1]], options)
    after, beside = times["after"], times["beside"]
    assert after["host_ms"] > 19
    assert beside["host_ms"] < after["host_ms"] / 2
    assert beside["cycle_ms"] < after["cycle_ms"] - 10


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("3", "batch 3: this engine has 2 slots (--max-batch)"),
        ("1,0", "batch 0: this engine has 2 slots (--max-batch)"),
    ],
)
def test_refusals(
    engine: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    sizes: str, message: str,
) -> None:  # fmt: skip
    out = tmp_path / "out.json"
    assert bench(engine, prompts, out, sizes) == 2
    assert message in capsys.readouterr().err
    prompts.write_text('{"prompt": "one"}\n')
    assert bench(engine, prompts, out, "2") == 2
    assert "batch 2: needs as many prompts, there are 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        bench(engine, prompts, out, "1,x")
    assert "--batch: '1,x': numbers with commas, such as 1,2,4" in capsys.readouterr().err
    assert not out.exists()
