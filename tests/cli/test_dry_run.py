"""`build --dry-run`: sizes without weights, and that they are what a build then makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.engines.build import BuildOptions, source_graphs
from dflash_trt.planner.build_size import build_size
from tests import tiny


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    command = ["build", "--dry-run", *(str(a) for a in arguments)]
    status = main(command)
    seen = capsys.readouterr()
    return status, seen.out, seen.err


def test_gpt_oss_120b(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = dry_run(
        capsys, "--target", "gpt-oss-120b", "--block", 16, "--gpu", "b200", "--max-batch", 8
    )
    assert status == 0
    assert "verifies 16 tokens, drafts 10" in err
    assert "backend tensorrt-rtx, which the recipe gpt-oss-120b is for" in err
    assert "compute capability 12.0, 12.1, likewise" in err
    assert "fits" in out
    assert "does NOT fit" not in out
    assert "target.verify.engine" in out
    assert "b200 has compute capability 10.0: plans for it come with --backend tensorrt" in out


def test_a_gpu_that_the_plans_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = dry_run(capsys, "--target", "gpt-oss-20b", "--gpu", "gb10")
    assert "fits: 16.0 GB of 128 GB on one gb10" in out
    assert "has compute capability" not in out


def test_a_rank_of_gpt_oss_120b(capsys: pytest.CaptureFixture[str]) -> None:
    """Which N fit on a card: one does not, and 16 would leave a rank without a key head."""
    arguments = ("--target", "gpt-oss-120b", "--tp", 8, "--gpu", "rtx-pro-6000", "--max-batch", 64)
    status, out, _ = dry_run(capsys, *arguments)
    assert status == 0
    assert "on each of 8 ranks, which meet 73 times in a cycle: 72 sums of 3686.4 kB" in out
    assert "weights.rank7.safetensors" in out
    assert "rank8" not in out
    assert "--tp on rtx-pro-6000: 1 does NOT fit (" in out
    assert "; 8 fits (" in out


def test_only_what_can_be_cut_is_said_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--target", "qwen3-4b", "--precision", "fp8", "--gpu", "b200")
    _, out, _ = dry_run(capsys, *arguments)
    assert "--tp on b200: 1 fits (" in out
    assert "; 2 cannot be; 4 cannot be; 8 cannot be" in out


def test_a_rank_on_the_cpu_is_the_one_with_the_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2: one of three key heads, so 1024 + 128 rows of 64 numbers, twice in 30 layers."""
    arguments = ("--target", "smollm2-135m", "--tp", 2, "--max-seq-len", 1024)
    _, out, _ = dry_run(capsys, *arguments)
    assert "all of it on rank 0 of 2 ranks, which meet 61 times in a cycle" in out
    assert f"keys and values: target   {2 * 30 * 1152 * 64 * 4 / 1e6:6.1f} MB" in out


def test_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--target", "gpt-oss-120b", "--gpu", "rtx-pro-6000", "--max-batch", 64)
    assert "does NOT fit" in dry_run(capsys, *arguments)[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "voodoo2"], "gpu 'voodoo2'"),
        (
            ["--precision", "nvfp4", "--gpu", "h200"],
            "precision 'nvfp4': GPUs of compute capability 9.0 have no products in it",
        ),
        (
            ["--precision", "fp8", "--compute-capability", "8.6"],
            "precision 'fp8': GPUs of compute capability 8.6 have no products in it",
        ),
        (["--compute-capability", "9.0"], "tensorrt-rtx cannot compile for compute capability 9.0"),
        (
            ["--precision", "fp8", "--tp", 2],
            "precision 'fp8': tensorrt-rtx cuts a target over ranks in bf16 only",
        ),
        (["--tp", 16], "tp 16: the target has 8 key/value heads"),
        (["--tp", 0], "tp 0: a target has at least one rank"),
        (["--precision", "int4"], "precision 'int4': tensorrt-rtx offers bf16, fp8, nvfp4"),
        (["--max-seq-len", 200000], "max-seq-len 200000: the target ends at 131072 positions"),
    ],
)
def test_what_cannot_be_built(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[object], sentence: str
) -> None:
    status, _, err = dry_run(capsys, "--target", "gpt-oss-20b", *arguments)
    assert status == 2
    assert sentence in err


def test_files_are_those_of_the_build(tiny_checkpoints: tuple, tiny_engine: Path) -> None:
    options = BuildOptions("tiny", block=8, max_seq_len=512)
    sources = source_graphs(*tiny_checkpoints, options)
    target, drafter = tiny_checkpoints
    size = build_size(target.config, drafter.config, options, sources, "cpu")
    assert set(size.files) == {
        str(f.relative_to(tiny_engine)) for f in tiny_engine.rglob("*") if f.is_file()
    }
    keys_and_values = 2 * 4 * tiny.LAYERS * tiny.KV_HEADS * tiny.HEAD_DIM  # bytes of one token
    assert size.caches["target"] == (512 + 128) * keys_and_values
