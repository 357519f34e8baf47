"""Two processes under `mpirun`: an answer, and ends of all kinds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("mpi4py", reason="pip install 'dflash-trt[mpi]'")
BIN = Path(sys.executable).parent
MPIRUN, COMMAND = (shutil.which(n, path=str(BIN)) for n in ("mpirun", "dflash-trt"))
pytestmark = pytest.mark.skipif(
    MPIRUN is None or COMMAND is None, reason="no mpirun beside this Python; pip install mpich"
)


def mpirun(*arguments: object) -> list[str]:
    return [str(MPIRUN), "-n", "2", *map(str, arguments)]


@pytest.fixture
def engine(tiny_engines: dict[int, Path]) -> Path:
    return tiny_engines[2]


def test_run_answers_once(engine: Path) -> None:
    command = mpirun(COMMAND, "run", engine, "hello", "--max-tokens", 6, "--ignore-eos", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads(done.stdout)["token_ids"]) == 6, "rank 0 alone writes"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_a_rank_that_dies_or_hangs_ends_all(engine: Path, rank: int, signal: str) -> None:
    """Within seconds, with a sentence that names it; no process is left, and no shared memory."""
    command = mpirun(COMMAND, "run", engine, "hello", "--max-tokens", 200, "--ignore-eos")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout
        assert job.stderr
        job.stdout.read(1)  # the answer has begun
        everyone = psutil.Process(job.pid).children(recursive=True)
        culprit = next(p for p in everyone if is_worker(p) and p.environ()["PMI_RANK"] == str(rank))
        culprit.suspend()
        shared = re.findall(r"/dev/shm/\w+", Path(f"/proc/{culprit.pid}/maps").read_text())
        begin = time.monotonic()
        if signal == "KILL":
            culprit.kill()
        _, text = job.communicate(timeout=90)
    assert f"rank {rank} (" in text.decode()
    assert f"process {culprit.pid})" in text.decode()
    assert job.returncode != 0
    assert time.monotonic() - begin < 60
    _, alive = psutil.wait_procs(everyone, timeout=10)
    assert not alive
    assert shared
    assert not [path for path in shared if Path(path).exists()]


def test_a_rank_ends_with_its_supervisor(engine: Path) -> None:
    command = mpirun(COMMAND, "run", engine, "hello", "--max-tokens", 200, "--ignore-eos")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout
        job.stdout.read(1)
        everyone = psutil.Process(job.pid).children(recursive=True)
        culprit = next(p for p in everyone if "dflash_trt.supervisor" in p.cmdline())
        culprit.kill()
        job.communicate(timeout=90)
    assert job.returncode != 0
    assert not psutil.wait_procs(everyone, timeout=10)[1]


def is_worker(process: psutil.Process) -> bool:
    return "DFLASH_TRT_SUPERVISED" in process.environ()


def test_two_builds_are_no_mesh(engine: Path, tmp_path: Path) -> None:
    other = shutil.copytree(engine, tmp_path / "other")
    manifest = other / "engine.json"
    manifest.write_text(manifest.read_text().replace('"name": "t"', '"name": "another"'))
    command = mpirun(COMMAND, "run", engine, "hello")
    command[1:1] = ["-n", "1", str(COMMAND), "run", str(other), "hello", ":"]
    command[command.index("2")] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "dflash-trt: rank 1 (" in done.stderr
    assert done.stderr.count("has another build") == 1


STARTING = """
import sys
from pathlib import Path
from dflash_trt.runtime.generate import Runtime
runtime = Runtime.load(Path(sys.argv[1]), threads=1, start_ranks=True)
print(len(runtime.prompt_ids("hello")) > 0)
"""


def test_a_process_starts_its_ranks_where_its_environment_is_not_on_path(engine: Path) -> None:
    """With its own Python, and the mpiexec beside it."""
    done = subprocess.run(
        [sys.executable, "-c", STARTING, str(engine)], env={**os.environ, "PATH": os.defpath},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


@pytest.mark.parametrize(("count", "text"), [(1, "1 was started"), (3, "3 were started")])
def test_another_number_of_ranks_is_refused(engine: Path, count: int, text: str) -> None:
    command = [str(MPIRUN), "-n", str(count), str(COMMAND), "run", str(engine), "hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"is for 2 ranks, {text}; begin the command with: mpirun -n 2" in done.stderr
    assert done.stderr.count("dflash-trt:") == 1
