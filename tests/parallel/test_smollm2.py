"""SmolLM2 on two ranks, with its real weights: nine heads, three key heads, nothing divides by two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines.build import BuildOptions, build_cpu
from tests.parallel.test_mpi import mpirun, pytestmark

__all__ = ["pytestmark"]


def reports(command: Sequence[object]) -> list[dict]:
    """What every rank has printed, in the order of ranks."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=root, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(found, key=lambda report: report["rank"])


@pytest.fixture(scope="module")
def found(
    smollm2: tuple[TargetCheckpoint, DrafterCheckpoint],
    smollm2_engine: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict, list[dict]]:
    """Of one process, and of two."""
    two = tmp_path_factory.mktemp("ranks") / "smollm2"
    build_cpu(*smollm2, BuildOptions("smollm2", block=8, max_seq_len=1024, ranks=2), two)
    python = (sys.executable, "-m", "tests.parallel.answering")
    (one,) = reports([*python, smollm2_engine])
    return one, reports(mpirun(*python, two))


def test_two_ranks_give_the_tokens_of_one(found: tuple[dict, list[dict]]) -> None:
    one, ranks = found
    assert ranks[0]["tokens"] == one["tokens"]
    assert sum(map(len, one["tokens"])) > 64


def test_a_rank_takes_at_most_three_fifths_of_the_memory(found: tuple[dict, list[dict]]) -> None:
    """Rank 0 with the drafter as well as the other. SmolLM2 alone, cut in half, would be 50%."""
    one, ranks = found
    assert [report["rank"] for report in ranks] == [0, 1]
    for report in ranks:
        assert report["memory"] <= 0.6 * one["memory"], (report["memory"], one["memory"])
