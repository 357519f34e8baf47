"""The project's first line: plans of gpt-oss-120b and its drafter, compiled without a checkpoint.

And plans in which ranks meet: gpt-oss-120b for eight GPUs, SmolLM2 for two.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.engines.directory import read_manifest
from dflash_trt.engines.plan import Plan, expanded_caches, widened_weights
from dflash_trt.engines.tensorrt_directory import read_plans

pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")

COMMAND = (
    "build", "--target", "gpt-oss-120b", "--block", "16", "--backend", "tensorrt-rtx",
    "--compute-capability", "12.0",
)  # fmt: skip
MOST_SECONDS, MOST_BYTES = 90, 2_000_000_000
EXPERT = ((5760, 2880), (2880, 2880))


def test_gpt_oss_120b_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All 36 layers with sinks, windows and MXFP4 experts, within time and memory."""
    folder = tmp_path / "e"
    assert main([*COMMAND, "--output", str(folder)]) == 0
    told = capsys.readouterr().err
    assert "verifies 16 tokens, drafts 10" in told
    assert "not here, so plans only" in told
    manifest = read_manifest(folder)
    assert (manifest.block, manifest.drafted, manifest.trained_block) == (16, 9, 10)
    reports = read_plans(folder)["plans"]
    assert set(reports) == {"target.verify", "target.prefill", "drafter.draft", "drafter.inject"}
    assert sum(report.cpu_seconds for report in reports.values()) < MOST_SECONDS
    assert max(report.peak_bytes for report in reports.values()) < MOST_BYTES
    assert sum(report.plan_bytes for report in reports.values()) < 100e6, "a plan holds no weights"
    assert not (folder / "weights.safetensors").exists()
    for name in ("target.verify", "target.prefill"):
        report, plan = reports[name], Plan.read(folder / f"{name}.engine")
        assert report.capabilities == (120,)
        assert report.kernels["attention"] == 36
        assert report.kernels["plugin"] == 37, "an expert plugin in each layer, and the verify's"
        assert len(report.ours["MixtureOfExperts"]) == len(report.ours["CachedAttention"]) == 36
        caches = [b for b in report.bindings if b.role == "cache" and b.direction == "input"]
        assert len(caches) == 72
        assert all(b.made_of[1] == "sinks" for b in caches)
        assert expanded_caches(plan, caches[0].shape[2], 8) == []
        assert widened_weights(plan, EXPERT) == []
        assert report.scratch_bytes < 32e6
    assert reports["drafter.draft"].kernels["attention"] == 8


def meetings(folder: Path, plan: str) -> Counter[str]:
    """Collectives in the program text of a plan, by kind."""
    operations = Plan.read(folder / f"{plan}.engine").operations
    return Counter(o.kind for o in operations if o.kind.startswith("comm_"))


def test_eight_ranks_of_gpt_oss_120b_are_compiled(tmp_path: Path) -> None:
    """One pair of plans for all ranks: a key head each, 12 of the 90 blocks of an expert."""
    folder = tmp_path / "e"
    command = ["--block", "10", "--tp", "8", "--output", str(folder)]
    assert main([*COMMAND, *command]) == 0
    reports = read_plans(folder)["plans"]
    assert sum(report.cpu_seconds for report in reports.values()) < MOST_SECONDS
    assert max(report.peak_bytes for report in reports.values()) < MOST_BYTES
    for name in ("target.verify", "target.prefill"):
        report, plan = reports[name], Plan.read(folder / f"{name}.engine")
        assert meetings(folder, name) == {"comm_allreduce": 72, "comm_allgather": 1}
        assert plan.ranks == 8
        assert len(report.collectives) == 73
        assert report.kernels["plugin"] == 36, "an expert plugin in each layer"
        caches = [b for b in report.bindings if b.role == "cache" and b.direction == "input"]
        assert {b.shape[1] for b in caches} == {1}
        blocks = {b.shape for b in report.bindings if b.name.endswith(("up.blocks", "down.blocks"))}
        assert blocks == {(128, 768, 1440), (128, 2880, 192)}
    assert not meetings(folder, "drafter.draft")


def test_two_ranks_of_smollm2_are_compiled(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    assert main([
        "build", "--target", "smollm2-135m", "--tp", "2", "--backend", "tensorrt-rtx",
        "--compute-capability", "12.0", "--no-weights", "--output", str(folder),
    ]) == 0  # fmt: skip
    for name in ("target.verify", "target.prefill"):
        assert meetings(folder, name) == {"comm_allreduce": 60, "comm_allgather": 1}
    for name in ("drafter.draft", "drafter.inject"):
        assert not meetings(folder, name)
