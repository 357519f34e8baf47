"""The commands of the README on the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.cli import main
from dflash_trt.engines.build import BuildOptions, build_cpu

QUESTIONS = [
    {"question": "A pen costs 3 dollars and a book costs 12. What do two pens and a book cost?"},
    {"prompt": "Name two planets."},
    {"messages": [{"role": "user", "content": "What is the capital of Italy?"}]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n")
    return path


def test_run_prints_the_answer_and_the_figures(
    smollm2_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "What is the capital of France?"
    assert main(["run", str(smollm2_engine), question, "--compare"]) == 0
    text, _, figures = capsys.readouterr().out.strip().rpartition("\n\n")
    assert "Paris" in text
    for part in ("tokens/s", "acceptance length", "drafts wasted", "speed-up"):
        assert part in figures
    assert main(["run", str(smollm2_engine), question, "--json", "--no-draft"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == text
    assert answer["finish_reason"] == "stop"


def test_bench_reports_everything(smollm2_engine: Path, prompts: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    arguments = ["bench", smollm2_engine, "--prompts", prompts, "--max-tokens", 40, "--json", out]
    arguments += ["--report", picture, "--compare-autoregressive"]
    assert main([*map(str, arguments)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    assert report["prompts"] == 3
    assert report["lossless"] == {"prompts": 3, "different": 0}
    assert 1 < report["acceptance_length"] <= 8
    assert len(report["acceptance_per_slot"]) == 7
    assert set(report["tokens_per_second"]) == {"autoregressive", "dflash"}
    for key in ("drafts_wasted", "cycle_cost", "host_share", "speedup", "ttft_ms", "tpot_ms"):
        assert report[key] > 0
    assert report["host_share"] < 0.05
    times = report["ms_per_cycle"]
    assert times["verify"] > times["draft"] > times["host"] > 0
    step = report["ms_per_plain_step"]
    assert step["draft"] == 0
    assert step["verify"] > step["host"] > 0
    cycles = report["cycles_by_committed"]
    mean = sum(n * count for n, count in enumerate(cycles, 1)) / sum(cycles)
    assert report["acceptance_length"] == pytest.approx(mean, abs=1e-3)
    assert report["differences"] == []


def test_bench_lists_differences_of_integer_engines(
    smollm2: tuple[TargetCheckpoint, DrafterCheckpoint], prompts: Path, tmp_path: Path
) -> None:
    """Integer kernels round one row and eight rows differently; answers part at near ties only."""
    engine, out = tmp_path / "int8", tmp_path / "figures.json"
    build_cpu(*smollm2, BuildOptions("int8", 8, "int8", max_seq_len=512), engine)
    arguments = ["bench", engine, "--prompts", prompts, "--json", out, "--compare-autoregressive"]
    assert main([*map(str, arguments)]) == 0
    report = json.loads(out.read_text())
    assert report["lossless"]["different"] == len(report["differences"])
    for difference in report["differences"]:
        assert 0 <= difference["top2_gap"] < 0.5


def test_inspect(smollm2_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(smollm2_engine)]) == 0
    out = capsys.readouterr().out
    assert "verifies 8, drafts 7 tokens per cycle" in out
    assert "weights.bin" in out
