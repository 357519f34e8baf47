"""A mesh of threads in one process: every rank's engine without MPI."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import NoReturn

import numpy as np

from dflash_trt.engines.onnxruntime_ranks import RankPair


class Room:
    """Where the threads meet; one that does not come breaks the meeting for all."""

    def __init__(self, size: int) -> None:
        self.parts: list[np.ndarray] = [np.zeros(0)] * size
        self.barrier = Barrier(size, timeout=60)


class ThreadMesh:
    """One rank's view of a room, which counts its meetings and the bytes that it brought there."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, len(room.parts)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def _meet(self, kind: str, part: np.ndarray) -> list[np.ndarray]:
        self.calls[kind] += 1
        self.bytes[kind] += part.nbytes
        self.room.parts[self.rank] = part.copy()
        self.room.barrier.wait()
        parts = list(self.room.parts)
        self.room.barrier.wait()
        assert {p.shape for p in parts} == {part.shape}, f"ranks are at different {kind}s"
        return parts

    def broadcast(self, message: np.ndarray) -> None:
        message[:] = self._meet("broadcast", message)[0]

    def fail(self, error: BaseException) -> NoReturn:
        self.room.barrier.abort()
        raise error

    def all_reduce(self, part: np.ndarray) -> None:
        part[:] = sum(self._meet("all_reduce", part))

    def all_gather(self, part: np.ndarray, whole: np.ndarray) -> None:
        whole[:] = np.stack(self._meet("all_gather", part))


class Ranks:
    """All ranks of an engine directory; `pair` is rank 0's, the others follow in threads."""

    def __init__(self, path: Path, size: int) -> None:
        room = Room(size)
        self.meshes = [ThreadMesh(room, rank) for rank in range(size)]
        self.pairs = [RankPair(path, mesh, threads=1, verify=False) for mesh in self.meshes]
        self._pool = ThreadPoolExecutor(size - 1)
        self._followers = [self._pool.submit(pair.follow) for pair in self.pairs[1:]]

    @property
    def pair(self) -> RankPair:
        return self.pairs[0]

    def close(self) -> None:
        self.pair.stop()
        for follower in self._followers:
            follower.result(timeout=60)
        self._pool.shutdown()
