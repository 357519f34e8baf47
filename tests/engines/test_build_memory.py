"""What a build for the CPU takes of the memory: a model is in it once, as its engine has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

# Builds, and says by how many bytes the process has grown at most. What stands in memory before,
# some 150 MB, is the interpreter with what it imports.
PROGRAM = """
import sys
from pathlib import Path
from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.engines.build import BuildOptions, build_cpu

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

target, drafter, precision, out = sys.argv[1:]
pair = open_target(Path(target)), open_drafter(Path(drafter))
options = BuildOptions("memory", block=8, precision=precision, max_seq_len=128)
before = memory("VmRSS")
build_cpu(*pair, options, Path(out))
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of 240 MB, and a drafter of 70; no matrix is a large part of them."""
    folder = tmp_path_factory.mktemp("memory")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096}
    target = tiny.tiny_target(folder / "target", **sizes)
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return target, tiny.tiny_drafter(folder / "drafter", **sizes, **one)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_build_takes_little_more_than_its_weights(
    folders: tuple[Path, Path], precision: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, folders), precision, str(tmp_path / "e")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    grown, weights = int(ended.stdout), (tmp_path / "e" / "weights.bin").stat().st_size
    assert grown < 1.3 * weights
