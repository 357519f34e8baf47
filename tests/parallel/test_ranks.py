"""Two ranks of the CPU engine in threads: the tokens of one rank, with the messages that are promised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from socket import create_connection, create_server, socketpair
from threading import Event, Thread
from time import monotonic

import numpy as np
import onnxruntime as ort
import pytest

import dflash_trt
from dflash_trt.bench.compare import compare
from dflash_trt.engines import mpi
from dflash_trt.engines.directory import read_manifest
from dflash_trt.engines.mesh import Step, decode, encode, message_size
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.engines.watch import PATIENCE, STATUS, Progress, Watch, laggard
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from dflash_trt.runtime.text import TextCodec
from tests import tiny_gpt_oss
from tests.parallel.threads import Ranks

LAYERS = 4
PROMPTS = [[1, 2, 3], list(range(5, 150))]  # the second is longer than a chunk


@pytest.fixture(scope="module")
def ranks(tiny_engines: dict[int, Path]) -> Iterator[Ranks]:
    mesh = Ranks(tiny_engines[2], 2)
    yield mesh
    mesh.close()


def answers(pair: OnnxRuntimePair, path: Path, options: GenerationOptions) -> list[Generation]:
    runtime = Runtime(pair, TextCodec(path, pair.manifest.chat_arguments))
    return runtime.generate(PROMPTS, options)


@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(40, ignore_eos=True),
        GenerationOptions(40, ignore_eos=True, draft=False),
        GenerationOptions(24, ignore_eos=True, temperature=0.8, seed=3),
    ],
    ids=["drafted", "plain", "sampled"],
)
def test_two_ranks_give_the_tokens_of_one(
    tiny_engines: dict[int, Path], ranks: Ranks, options: GenerationOptions
) -> None:
    """Both prompts in one batch; sampling reads logits that both ranks have computed."""
    one = answers(OnnxRuntimePair(tiny_engines[1], 1, verify=False), tiny_engines[1], options)
    two = answers(ranks.pair, tiny_engines[2], options)
    assert [g.tokens for g in two] == [g.tokens for g in one]
    assert all(len(g.tokens) == options.max_tokens for g in two)


def test_what_a_cycle_costs_in_messages(ranks: Ranks) -> None:
    """One message from rank 0, two sums a layer, one gathering of two numbers a row; a draft, none."""
    pair = ranks.pair
    pair.prefill(0, np.arange(5), inject=True)
    before = +pair.traffic, +pair.met()
    pair.draft([0], 7)
    assert pair.met() == before[1]
    pair.verify([0], 8)
    message = 4 * message_size(2, 128)
    sums, best = 2 * LAYERS * 8 * tiny_gpt_oss.HIDDEN * 4, 8 * 2 * 4
    wanted = {"broadcast": 1, "all_reduce": 2 * LAYERS, "all_gather": 1}
    wanted["bytes"] = message + sums + best
    assert pair.met() - before[1] == wanted
    assert pair.traffic - before[0] == {**wanted, "cycles": 1}
    pair.release(0)


def test_bench_says_what_a_cycle_costs_in_messages(ranks: Ranks, tiny_engines: dict) -> None:
    """Prefills, and the plain answers beside the drafted ones, are not part of it."""
    codec = TextCodec(tiny_engines[2], ranks.pair.manifest.chat_arguments)
    options = GenerationOptions(12, ignore_eos=True)
    report = compare(Runtime(ranks.pair, codec), PROMPTS, options, plain=True).report()
    found = report["communication_per_cycle"]
    sums, best = 2 * LAYERS * 8 * tiny_gpt_oss.HIDDEN * 4, 8 * 2 * 4
    assert found.pop("bytes") == 4 * message_size(2, 128) + sums + best
    assert found == {"broadcast": 1, "all_reduce": 2 * LAYERS, "all_gather": 1}


def test_each_rank_keeps_half_of_the_target(ranks: Ranks, tiny_engines: dict[int, Path]) -> None:
    """Caches of its heads only, no drafter but on rank 0, and weights of its own to read."""
    one = OnnxRuntimePair(tiny_engines[1], 1, verify=False)
    whole = sum(int(np.prod(s)) for s in one._cache_shapes("target").values())
    for pair in ranks.pairs:
        assert sum(int(np.prod(s)) for s in pair._cache_shapes("target").values()) == whole // 2
    assert not ranks.pairs[1]._sessions
    with pytest.raises(InputError, match=r"weights\.rank1\.bin: was changed"):
        damaged(tiny_engines[2] / "weights.rank1.bin", 1)
    damaged(tiny_engines[2] / "weights.rank1.bin", 0)  # of no concern to rank 0


def damaged(path: Path, rank: int) -> None:
    data = path.read_bytes()
    try:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        read_manifest(path.parent, rank=rank)
    finally:
        path.write_bytes(data)


def test_a_rank_that_lives_and_does_not_come_ends_all(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 speaks all the time, and stays where it is while rank 0 waits for it in a meeting. (After
    ten seconds it is silent, for a watch that does not see this.)"""
    ended = Event()
    here, there = socketpair()

    def speak() -> None:
        begin = monotonic()
        while not ended.wait(0.005) and monotonic() - begin < 10:
            there.sendall(b'{"entered": 5, "left": 5}\n')

    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("dflash_trt.engines.watch.PERIOD", 0.05)
    rank = Thread(target=speak, daemon=True)
    rank.start()
    try:
        with pytest.raises(SystemExit, match=str(STATUS)):
            Watch(0, ["rank 0", "rank 1"], {1: here}, lambda: (6, 5)).run()
    finally:
        ended.set()
    rank.join(10)
    assert "rank 1 keeps the others waiting for 2 s; all ranks end" in capfd.readouterr().err
    assert b'{"fail": "rank 1 keeps' in there.recv(1 << 20)
    here.close()
    there.close()


def test_a_stranger_is_no_rank() -> None:
    """Whoever knows not the secret of this mesh, a rank of another model perhaps, is turned away."""
    secret, rank = b"of this mesh" + b"." * 4, (1).to_bytes(4, "little")
    with create_server(("127.0.0.1", 0)) as server:
        stranger, own = (create_connection(server.getsockname(), 10) for _ in range(2))
        stranger.sendall(b"of that mesh" + b"." * 4 + rank)
        own.sendall(secret + rank)
        links = mpi._accept(server, secret, 1)
    assert list(links) == [1]
    assert stranger.recv(1) == b""
    links[1].sendall(b"word")
    assert own.recv(4) == b"word"
    for each in (stranger, own, links[1]):
        each.close()


@pytest.mark.parametrize("version", [dflash_trt.__version__, ort.__version__])
def test_ranks_of_two_versions_are_no_mesh(
    tiny_engines: dict[int, Path], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    class Comm:
        rank, size = 0, 2

        def allgather(self, own: mpi.Member) -> list[mpi.Member]:
            return [own, replace(own, rank=1, build=own.build.replace(version, "0.0"))]

    monkeypatch.setattr(mpi, "_communicator", lambda *_: Comm())
    with pytest.raises(InputError, match=r"rank 1 \(.*\) has another build of .* than rank 0"):
        mpi.join(tiny_engines[2], 2)


def test_a_step_survives_the_message() -> None:
    message = np.full(message_size(4, 128), -1, np.int32)
    tokens, lengths = np.array([[5, 201087], [7, 0]]), np.array([3, 9], np.int32)
    encode(Step((2, 0), lengths, tokens, False, True), message)
    found = decode(message)
    assert found is not None
    assert (found.lanes, found.prefill, found.logits) == ((2, 0), False, True)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_array_equal(found.lengths, lengths)
    encode(None, message)
    assert decode(message) is None


def test_the_rank_that_the_others_wait_for_is_found() -> None:
    waiting, late = Progress(entered=7, left=6, since=0), Progress(entered=6, left=6, since=0)
    assert laggard({0: waiting, 1: waiting, 2: late}, PATIENCE + 1) == 2
    assert laggard({0: waiting, 1: waiting, 2: late}, PATIENCE) is None, "not for long enough"
    assert laggard({0: late, 1: late}, PATIENCE + 1) is None, "nobody waits, there is nothing to do"
