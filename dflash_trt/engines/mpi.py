"""The mesh over MPI: one process per rank, started by `mpirun -n N`."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn, TypeVar

import numpy as np
import onnxruntime as ort

import dflash_trt
from dflash_trt.engines.directory import MANIFEST
from dflash_trt.engines.watch import Watch
from dflash_trt.errors import InputError
from dflash_trt.supervisor import supervised

_CONNECT_SECONDS = 20
# Waiting for others: without a pause at first, then often asked, then seldom. MPI's own waiting never
# pauses, and takes the core from the rank that is waited for where there are more of them than cores.
_SPIN_SECONDS, _BUSY_SECONDS, _SHORT_NAP, _LONG_NAP = 200e-6, 0.1, 20e-6, 1e-3
Made = TypeVar("Made")


@dataclass(frozen=True)
class Member:
    """Who a rank is, and what it has been asked to load."""

    rank: int
    host: str
    process: int
    build: str

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.process})"


class MpiMesh:
    """The ranks of an MPI communicator, see `engines.mesh.Mesh`."""

    def __init__(self, comm: Any, members: list[Member]) -> None:
        from mpi4py import MPI

        self._comm, self._mpi = comm, MPI
        self.rank, self.size = comm.rank, comm.size
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._entered = self._left = 0
        self.local = sum(m.host == members[self.rank].host for m in members)
        names = [m.name for m in members]
        links = _connect(comm, members)
        self.watch = Watch(self.rank, names, links, lambda: (self._entered, self._left))
        self.watch.start()

    def broadcast(self, message: np.ndarray) -> None:
        self._count("broadcast", message)
        _wait(self._comm.Ibcast(message, 0))

    def all_reduce(self, part: np.ndarray) -> None:
        self._count("all_reduce", part)
        self._meet(lambda: self._comm.Iallreduce(self._mpi.IN_PLACE, part))

    def all_gather(self, part: np.ndarray, whole: np.ndarray) -> None:
        self._count("all_gather", part)
        self._meet(lambda: self._comm.Iallgather(part, whole))

    def _count(self, kind: str, array: np.ndarray) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += array.nbytes

    def _meet(self, begin: Callable[[], Any]) -> None:
        self._entered += 1
        _wait(begin())
        self._left += 1

    def fail(self, error: BaseException) -> NoReturn:
        """End every rank: this one cannot go on."""
        self.watch.fail(f"failed: {type(error).__name__}: {error}")

    def together(self, load: Callable[[], Made]) -> Made:
        """`load()` on every rank; where it fails on one, that is an error on all, which names it."""
        made, trouble = None, ""
        try:
            made = load()
        except Exception as error:
            trouble = str(error) if isinstance(error, InputError) else f"{error!r}"
        found = self._comm.allgather(trouble)
        for rank, text in enumerate(found):
            if text:
                self.watch.close()
                refuse(self.rank, f"rank {rank}: {text}")
        assert made is not None
        return made


def join(path: Path, ranks: int, follower: Sequence[str] = ()) -> MpiMesh:
    """Meet the other ranks, and make sure that all are to load the same build of `ranks` ranks.

    follower: the arguments of a Python that runs another rank, where this process is to start them.
    """
    comm = _communicator(ranks, follower)
    digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    build = f"{digest} {dflash_trt.__version__} {ort.__version__}"
    own = Member(comm.rank, socket.gethostname(), os.getpid(), build)
    members: list[Member] = comm.allgather(own)
    _unname_shared_memory()
    if comm.size != ranks:
        advice = "" if follower else f"; begin the command with: mpirun -n {ranks}"
        were = "was" if comm.size == 1 else "were"
        refuse(comm.rank, f"{path}: is for {ranks} ranks, {comm.size} {were} started{advice}")
    for member in members:
        if member.build != members[0].build:
            refuse(comm.rank, f"{member.name} has another build of {path} than rank 0")
    return MpiMesh(comm, members)


def _unname_shared_memory() -> None:
    """All ranks have met, and so have MPICH's shared memory open. It would take its name away only at
    a good end, and a killed rank leave the file behind."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/dev/shm/mpich_shm_"):
            Path(path).unlink(missing_ok=True)


def refuse(rank: int, sentence: str) -> NoReturn:
    """An error of the input that all ranks have found: rank 0 says it."""
    if rank == 0:
        raise InputError(sentence)
    raise SystemExit(2)


def _wait(request: Any) -> None:
    begin = monotonic()
    while not request.Test():
        waited = monotonic() - begin
        if waited > _SPIN_SECONDS:
            sleep(_SHORT_NAP if waited < _BUSY_SECONDS else _LONG_NAP)


def _communicator(ranks: int, follower: Sequence[str]) -> Any:
    """Of the processes that a launcher has started, or of those that this one or its starter starts."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the second where there is no MPI library
        raise InputError(
            f"an engine of several ranks needs MPI ({error}): pip install 'dflash-trt[mpi]'"
        ) from error
    parent = MPI.Comm.Get_parent()
    if parent != MPI.COMM_NULL:
        return parent.Merge(high=True)
    if not follower:
        return MPI.COMM_WORLD
    _find_mpiexec()
    if os.getpgrp() != os.getpid():  # when a rank dies, mpiexec kills its own, and so this one's
        os.setpgid(0, 0)
    return MPI.COMM_SELF.Spawn(_python(), supervised(*follower), ranks - 1).Merge(high=False)


def _find_mpiexec() -> None:
    """Make sure that the MPI library, which looks on PATH, will find it: a virtual environment that
    was not activated has it beside its Python."""
    path, beside = os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)
    if shutil.which("mpiexec"):
        return
    if not shutil.which("mpiexec", path=beside):
        raise InputError(
            "an engine of several ranks needs mpiexec to start them, which is neither on PATH nor "
            "beside this Python: pip install 'dflash-trt[mpi]'"
        )
    os.environ["PATH"] = f"{path}{os.pathsep}{beside}"


def _python() -> str:
    """The Python to start ranks with. In Triton's stub, which has one built in, `sys.executable` is
    the stub."""
    if Path(sys.executable).name.startswith("python"):
        return sys.executable
    return shutil.which("python3") or sys.executable


def share_threads(threads: int, local: int) -> int | None:
    """Threads as `session_options` takes them, for one of `local` ranks on this machine: one rank has
    many sessions, which share the process's threads where there is more than one."""
    threads = threads or max(1, len(os.sched_getaffinity(0)) // local)
    if threads == 1:
        return 1
    ort.set_global_thread_pool_sizes(threads, 1)
    return None


def _connect(comm: Any, members: list[Member]) -> dict[int, socket.socket]:
    """Connections for the watch: of rank 0 to every other rank. They begin with a secret that only
    ranks of this mesh know."""
    everywhere = any(m.host != members[0].host for m in members)
    if comm.rank == 0:
        with socket.create_server(("" if everywhere else "127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_SECONDS)
            _, secret = comm.bcast((server.getsockname()[1], secrets.token_bytes(16)))
            return _accept(server, secret, comm.size - 1)
    port, secret = comm.bcast(None)
    host = members[0].host if members[0].host != members[comm.rank].host else "127.0.0.1"
    link = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    link.sendall(secret + comm.rank.to_bytes(4, "little"))
    return {0: _unbuffered(link)}


def _accept(server: socket.socket, secret: bytes, count: int) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    while len(links) < count:
        link, _ = server.accept()
        link.settimeout(_CONNECT_SECONDS)
        words = link.recv(len(secret) + 4, socket.MSG_WAITALL)
        if words[:-4] == secret:
            links[int.from_bytes(words[-4:], "little")] = _unbuffered(link)
        else:
            link.close()
    return links


def _unbuffered(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
