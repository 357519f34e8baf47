"""The process that MPI's launcher sees for a rank: it starts the rank's own and waits for it.

`mpirun` kills all ranks within milliseconds once a process of its own has died, before anyone can say
which it was. With this one in between, the ranks' watch (`engines.watch`) has the time to say it. If
this process ends first, the rank's own dies with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE")  # set by launchers for each process
_SUPERVISED = "DFLASH_TRT_SUPERVISED"
_PROGRAM = "import sys; from dflash_trt.cli import main; sys.exit(main())"
_LAST_WORDS = 2.0  # seconds for the other ranks to say who has died
_PR_SET_PDEATHSIG = 1


def supervise(arguments: Sequence[str]) -> None:
    """In a process that a launcher started for one of several ranks: become its supervisor. Returns
    everywhere else, and in the rank's own process."""
    if os.environ.get(_SUPERVISED) or not any(os.environ.get(s, "1") != "1" for s in _SIZES):
        return
    os.execv(sys.executable, [sys.executable, *supervised("-c", _PROGRAM, *arguments)])


def supervised(*arguments: str) -> list[str]:
    """Arguments of a Python that run another Python with `arguments` under a supervisor."""
    return ["-m", "dflash_trt.supervisor", *arguments]


def die_with_parent() -> None:
    """Run in a child between fork and exec: it is killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    child = subprocess.Popen(
        [sys.executable, *arguments],
        close_fds=False,  # the launcher talks to the rank through one
        env={**os.environ, _SUPERVISED: "1"}, preexec_fn=die_with_parent,
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda which, _: child.send_signal(which))
    status = child.wait()
    if status < 0 or status > 2:
        time.sleep(_LAST_WORDS)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
