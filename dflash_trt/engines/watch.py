"""Ranks watch each other, so that none waits forever for one that is gone.

MPI alone leaves a rank waiting where another has died, hangs or has failed. So rank 0 has a connection
to every other rank, over which both sides say twice a second how far they are: how many meetings of the
mesh they have entered and left. The first trouble ends every rank, with one sentence that names who
caused it. Time is counted in a rank's own words, not by a clock: ranks that were stopped and go on
together have missed nothing.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from time import monotonic
from typing import NoReturn

PERIOD = 0.5  # seconds between two words
SILENCE = 20  # own words without one from a rank: it is taken for dead
PATIENCE = 30  # for so many words a rank may keep the others waiting
STATUS = 70  # exit status of a rank that ends because of another


@dataclass
class Progress:
    """How far a rank is: meetings entered and left, since which of the watch's words, and at which
    it was last heard."""

    entered: int = 0
    left: int = 0
    since: int = 0
    heard: int = 0

    def update(self, entered: int, left: int, now: int) -> None:
        self.heard = now
        if (entered, left) != (self.entered, self.left):
            self.entered, self.left, self.since = entered, left, now


def laggard(ranks: Mapping[int, Progress], now: int) -> int | None:
    """The rank that others have waited for longer than `PATIENCE`: the one that is least far."""
    waiting = [p for p in ranks.values() if p.entered > p.left and now - p.since > PATIENCE]
    last = min(ranks, key=lambda rank: ranks[rank].entered)
    if any(p.entered > ranks[last].entered for p in waiting):
        return last
    return None


class Watch(Thread):
    """The thread that watches, and says, on one rank. `names` says who each rank is in a sentence;
    `links` are connections to other ranks; `progress` gives meetings entered and left here."""

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        links: Mapping[int, socket.socket],
        progress: Callable[[], tuple[int, int]],
    ) -> None:
        super().__init__(name="dflash-watch", daemon=True)
        self._words = 0
        self._rank, self._names, self._own = rank, names, progress
        self._links = dict(links)
        self._ranks = {r: Progress() for r in (rank, *links)}
        self._text = dict.fromkeys(links, b"")
        self._lock, self._open = Lock(), True

    def run(self) -> None:
        spoken = 0.0
        while self._open and self._links:
            ready, _, _ = select.select(list(self._links.values()), [], [], PERIOD / 2)
            for rank in [r for r, link in self._links.items() if link in ready]:
                self._listen(rank)
            if monotonic() - spoken >= PERIOD:
                spoken = monotonic()
                self._speak()
                self._check()

    def close(self) -> None:
        """Say goodbye: that this rank ends from here on is no trouble."""
        self._open = False
        self._say({"bye": True})

    def fail(self, reason: str) -> NoReturn:
        """End every rank because of trouble in this one."""
        self._end(f"{self._names[self._rank]} {reason}")

    def _speak(self) -> None:
        entered, left = self._own()
        self._words += 1
        self._ranks[self._rank].update(entered, left, self._words)
        self._say({"entered": entered, "left": left})

    def _say(self, words: dict) -> None:
        with self._lock:
            for link in list(self._links.values()):
                try:
                    link.sendall(json.dumps(words).encode() + b"\n")
                except OSError:
                    continue  # whoever is gone is noticed where it is listened to

    def _listen(self, rank: int) -> None:
        try:
            data = self._links[rank].recv(65536)
        except OSError:
            data = b""
        *lines, self._text[rank] = (self._text[rank] + data).split(b"\n")
        for line in lines:
            words = json.loads(line)
            if "fail" in words:
                os._exit(STATUS) if self._rank else self._end(words["fail"])
            if "bye" in words:
                del self._links[rank], self._ranks[rank]
                return
            self._ranks[rank].update(words["entered"], words["left"], self._words)
        if not data and self._open:
            self._end(f"{self._names[rank]} has ended")

    def _check(self) -> None:
        for rank in self._links:
            if self._words - self._ranks[rank].heard > SILENCE:
                self._end(f"{self._names[rank]} has not answered for {SILENCE * PERIOD:.0f} s")
        late = laggard(self._ranks, self._words) if self._rank == 0 else None
        if late is not None:
            self._end(f"{self._names[late]} keeps the others waiting for {PATIENCE * PERIOD:.0f} s")

    def _end(self, sentence: str) -> NoReturn:
        print(f"dflash-trt: {sentence}; all ranks end", file=sys.stderr, flush=True)
        self._say({"fail": sentence})
        os._exit(STATUS)
