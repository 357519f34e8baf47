"""Memory of a build: of this process and of those that it started, together."""

from __future__ import annotations

import ctypes
from threading import Event, Thread

import psutil

_PERIOD = 0.5  # seconds between two looks
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class PeakMemory(Thread):
    """Looks at the processes until the block ends; `peak` is the largest sum seen, in bytes.

    Pages that several of them map are shared out between them (PSS), where the system counts so.
    """

    def __init__(self) -> None:
        super().__init__(name="dflash-memory", daemon=True)
        self.peak = 0
        self._end = Event()

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()

    def run(self) -> None:
        this = psutil.Process()
        while True:
            self.peak = max(self.peak, sum(map(_used, [this, *this.children(recursive=True)])))
            if self._end.wait(_PERIOD):
                return


def keep_little_free_memory() -> None:
    """From now on this process gives memory back as it is freed, where the C library is glibc: for one
    that builds. (The library's own thresholds grow with the largest block that was ever freed.)"""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_TRIM_THRESHOLD, 128 << 10)
        mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def return_free_memory() -> None:
    """Give memory that is free back to the system. (glibc keeps it, and what was needed for one
    network stays with the next.)"""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def _used(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
    except psutil.Error:  # it has ended
        return 0
    return int(getattr(info, "pss", info.rss))
