"""Loading an engine whose target is shared by a mesh of processes."""

from __future__ import annotations

import atexit
import signal
from pathlib import Path

from dflash_trt.engines.mpi import join, share_threads
from dflash_trt.engines.onnxruntime_ranks import RankPair


def join_ranks(path: Path, ranks: int, threads: int = 0) -> RankPair:
    """On rank 0 the pair to drive; the other ranks follow it, and end the process when it ends.

    threads: of each rank, 0 for this machine's cores, divided among its ranks.
    """
    mesh = join(path, ranks)
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
