"""Loading an engine whose target is shared by a mesh of processes.

Run as `python -m dflash_trt.engines.ranks DIR RANKS THREADS` it is a rank that another has started.
"""

from __future__ import annotations

import atexit
import signal
import sys
from pathlib import Path

from dflash_trt.engines.mpi import join, share_threads
from dflash_trt.engines.onnxruntime_ranks import RankPair
from dflash_trt.errors import InputError


def join_ranks(path: Path, ranks: int, threads: int = 0, start: bool = False) -> RankPair:
    """On rank 0 the pair to drive; the other ranks follow it, and end the process when it ends.

    threads: of each rank, 0 for this machine's cores, divided among its ranks. start: this process
    is rank 0 and starts the others; else `mpirun` has started all.
    """
    follower = ("-m", "dflash_trt.engines.ranks", str(path), str(ranks), str(threads))
    mesh = join(path, ranks, follower if start else ())
    count = share_threads(threads, mesh.local)
    pair = mesh.together(lambda: RankPair(path, mesh, count))
    if mesh.rank == 0:

        @atexit.register
        def end() -> None:
            pair.stop()
            mesh.watch.close()

        return pair
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 is stopped, and lets the others go
        signal.signal(number, signal.SIG_IGN)
    pair.follow()
    mesh.watch.close()
    raise SystemExit(0)


if __name__ == "__main__":
    try:
        join_ranks(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except InputError as error:
        sys.exit(f"dflash-trt: {error}")
