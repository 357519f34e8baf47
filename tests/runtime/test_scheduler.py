"""Requests that share slots: what they get does not depend on company, drafts or the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.errors import InputError
from dflash_trt.runtime.options import GenerationOptions
from dflash_trt.runtime.request import Delta
from dflash_trt.runtime.scheduler import QueueFullError, Scheduler
from tests.runtime.drive import Driven, check_state, run_all
from tests.runtime.toy import ToyCodec, ToyPair, as_engines

VOCAB = 24
token = st.integers(0, VOCAB - 1)
prompts = st.lists(token, min_size=1, max_size=30)


@st.composite
def options(draw: st.DrawFn) -> GenerationOptions:
    """Any combination of processing and ends."""
    most = draw(st.integers(1, 30))
    return GenerationOptions(
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)),
        ignore_eos=draw(st.booleans()),
        stop=tuple(draw(st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=2))),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2))),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-3.0, 2.0]), max_size=2)),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        adaptive=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def toy(**changes: object) -> ToyPair:
    return ToyPair(**{"vocab": VOCAB, "stop_ids": (22, 23), **changes})  # type: ignore[arg-type]


def same(a, b) -> None:
    """Everything that a client sees, metrics aside."""
    assert (a.tokens, a.text, a.finish_reason, a.stop) == (
        b.tokens,
        b.text,
        b.finish_reason,
        b.stop,
    )
    assert a.logprobs == b.logprobs


@settings(max_examples=150, deadline=None)
@given(prompts, options(), st.integers(2, 6), st.sampled_from([0.0, 0.7, 0.95]))
def test_drafting_changes_nothing(
    prompt: list[int], wish: GenerationOptions, width: int, skill: float
) -> None:
    """Any combination of penalties, bias, ends and sampling, at any block length and any skill."""
    plain = run_all(toy(), [(prompt, replace(wish, draft=False))])[0]
    drafted = run_all(toy(skill=skill), [(prompt, replace(wish, width=width))])[0]
    same(drafted, plain)
    assert len(plain.tokens) == wish.max_tokens or plain.finish_reason == "stop"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(prompts, options(), st.booleans()), min_size=2, max_size=8))
def test_company_changes_nothing(wishes: list[tuple[list[int], GenerationOptions, bool]]) -> None:
    """Requests of all kinds, drafted and not, on three slots: the answers they get alone."""
    requests = [(prompt, replace(o, draft=drafted)) for prompt, o, drafted in wishes]
    together = run_all(toy(slots=3), requests)
    for request, answer in zip(requests, together, strict=True):
        same(answer, run_all(toy(), [request])[0])


@pytest.mark.parametrize("draft", [True, False])
def test_no_end_token_before_min_tokens(draft: bool) -> None:
    """To the token, greedy with nothing else to process: the fast path begins behind them."""
    wish = GenerationOptions(30, ignore_eos=True, draft=draft)
    whole = run_all(toy(), [([1], wish)])[0].tokens
    for token in dict.fromkeys(whole[:12]):
        at = whole.index(token)
        for least in range(at + 3):
            ends = replace(wish, stop_token_ids=(token,), min_tokens=least)
            answer = run_all(toy(skill=0.9), [([1], ends)])[0]
            if least <= at:
                assert (answer.tokens, answer.stop) == (whole[:at], token)
            else:
                assert len(answer.tokens) >= least


def test_stop_texts_count_from_min_tokens_on() -> None:
    """A stop text before `min_tokens` is ordinary text; the same text behind it ends the answer."""
    whole = run_all(toy(), [([1], GenerationOptions(200, ignore_eos=True))])[0].text
    stop = next(c for c in whole if whole.count(c) > 1)
    first, second = (i for i, c in enumerate(whole) if c == stop and whole[:i].count(stop) < 2)
    early = GenerationOptions(200, ignore_eos=True, stop=(stop,))
    assert run_all(toy(), [([1], early)])[0].text == whole[:first]
    late = run_all(toy(), [([1], replace(early, min_tokens=first + 2))])[0]
    assert (late.text, late.stop) == (whole[:second], stop)


def test_greedy_cycles_leave_the_logits_in_the_engine() -> None:
    """They are read while a request that needs them is there, and for that one only."""

    class Asked(ToyPair):
        def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
            asked.append((len(slots), logits))
            super().verify(slots, width, logits)

        def prefill(self, slot: int, chunk: np.ndarray, inject: bool, logits: bool = False) -> None:
            prefilled.append(logits)
            super().prefill(slot, chunk, inject, logits)

    asked: list[tuple[int, bool]] = []
    prefilled: list[bool] = []
    scheduler = Scheduler(as_engines(engines := Asked(vocab=VOCAB, slots=2)))
    plain = GenerationOptions(60, ignore_eos=True, stop=("zz",), min_tokens=0)
    greedy = Driven(engines, [1], plain)
    sampled = Driven(engines, [2] * 12, replace(plain, max_tokens=20, temperature=0.7, seed=1))
    greedy.request.chooser.choose = None  # type: ignore[assignment,method-assign]  # never called
    for one in (greedy, sampled):
        scheduler.submit(one.request)
    while scheduler.busy:
        scheduler.step()
    assert prefilled == [False, False, True]  # of two pieces, the last row only
    together = [logits for lanes, logits in asked if lanes == 2]
    alone = [logits for lanes, logits in asked if lanes == 1]
    assert together == [True] * len(together) != []
    assert alone == [False] * len(alone) != []


def test_acceptance_of_a_request_does_not_depend_on_company() -> None:
    """An always right drafter is always accepted, at every place of a batch."""
    wish = GenerationOptions(40, ignore_eos=True)
    for answer in run_all(toy(slots=4, skill=1.0), [([i], wish) for i in range(7)]):
        assert set(answer.metrics.acceptance_per_slot) == {1.0}


def test_random_arrivals_and_cancellations_leave_nothing_behind() -> None:
    """10,000 cycles; every contract is checked after each, and no answer holds a foreign token."""
    engines = toy(slots=3, block=4, seed=2)
    scheduler = Scheduler(as_engines(engines), queue_limit=3)
    random = np.random.default_rng(0)
    alive: list[Driven] = []
    refused = 0
    for cycle in range(10_000):
        if cycle < 9_900 and random.random() < 0.15:
            one = Driven(engines, random.integers(0, VOCAB, random.integers(1, 40)), _wish(random))
            try:
                scheduler.submit(one.request)
                alive.append(one)
            except QueueFullError:
                refused += 1
        if alive and random.random() < 0.03:
            alive[random.integers(len(alive))].request.cancelled = True
        scheduler.step()
        check_state(engines, scheduler)
        for one in [a for a in alive if a.request.ended]:
            alive.remove(one)
            one.check()
            _matches_greedy(engines, one)
    assert not alive
    assert not scheduler.busy
    finished = scheduler.metrics.finished
    assert finished["cancelled"] > 100
    assert finished["length"] > 100
    assert finished["stop"] > 50
    assert refused == scheduler.metrics.refused > 10


def _wish(random: np.random.Generator) -> GenerationOptions:
    return GenerationOptions(
        int(random.integers(1, 60)),
        draft=random.random() < 0.8,
        ignore_eos=True,
        stop=("ab", "q") if random.random() < 0.3 else (),
        adaptive=random.random() < 0.3,
    )


def _matches_greedy(engines: ToyPair, one: Driven) -> None:
    tokens = one.request.prompt.tolist()
    for got in one.generation.tokens:
        assert got == engines.row(tokens).argmax()
        tokens.append(got)


# Telling while the engines run


class Watched(ToyPair):
    """Says when a verify call begins, and may be held back in it."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB)
        self.entered, self.told = Event(), Event()
        self.waiting = False

    def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
        self.entered.set()
        if self.waiting:
            assert self.told.wait(10), "a delta waits for the engines"
        super().verify(slots, width, logits)


def test_deltas_are_told_while_the_engines_run() -> None:
    """The first token's delta is handed out between the begin and the end of the first verify."""
    engines = Watched()
    scheduler = Scheduler(as_engines(engines))
    one = Driven(engines, [1], GenerationOptions(30, ignore_eos=True))
    keep, order = one.request.sink, []

    def sink(delta: Delta) -> None:
        if engines.waiting:
            order.append(engines.entered.wait(10))
        keep(delta)
        engines.told.set()

    one.request.sink = sink
    engines.waiting = True
    scheduler.submit(one.request)
    scheduler.step()
    engines.waiting = False
    assert order == [True]
    while scheduler.busy:
        scheduler.step()
    one.check()


def test_a_stop_text_costs_one_cycle_that_does_not_count() -> None:
    """It is found while the next cycle runs; that one's tokens are dropped, and the slot is free
    behind it for the request that waits. An end token is known before and costs nothing."""
    wish = GenerationOptions(40, draft=False, ignore_eos=True)
    whole = run_all(toy(), [([1], wish)])[0]
    at = next(i for i in range(5, 40) if whole.tokens[i] not in whole.tokens[:i])
    for ends, extra in (
        ({"stop": (whole.text[at],)}, 1),
        ({"stop_token_ids": (whole.tokens[at],)}, 0),
        ({"max_tokens": at}, -1),
    ):
        engines = toy()
        scheduler = Scheduler(as_engines(engines))
        first, second = (Driven(engines, [1], o) for o in (replace(wish, **ends), wish))
        for one in (first, second):
            scheduler.submit(one.request)
        while second.request.slot < 0:
            scheduler.step()
            check_state(engines, scheduler)
        assert engines.calls == at + extra + 1  # the last one is the second request's first
        assert first.generation.tokens == whole.tokens[: at + (extra == 1)]
        assert first.generation.metrics.cycles == at - (extra == -1)
        first.check()


def test_what_is_known_at_a_cancellation_is_told() -> None:
    """Tokens of the last cycle come with the delta that says so."""
    engines = toy()
    scheduler = Scheduler(as_engines(engines))
    one = Driven(engines, [1], GenerationOptions(100, ignore_eos=True))
    scheduler.submit(one.request)
    for _ in range(3):
        scheduler.step()
    known = list(one.request.tokens)
    assert len(one.generation.tokens) < len(known)
    one.request.cancelled = True
    scheduler.step()
    assert (one.generation.tokens, one.generation.finish_reason) == (known, "cancelled")
    one.check()


def test_text_that_cannot_be_made_ends_everything_with_its_error() -> None:
    """Also a request that had its last token already."""

    class Broken(ToyCodec):
        def push(self, ids: Sequence[int]) -> str:
            raise RuntimeError("no text")

    engines = toy(slots=2)
    scheduler = Scheduler(as_engines(engines))
    both = [Driven(engines, [1], GenerationOptions(most, ignore_eos=True)) for most in (1, 50)]
    for one in both:
        one.request._stream = Broken()  # type: ignore[assignment]
        scheduler.submit(one.request)
    with pytest.raises(RuntimeError, match="no text") as caught:
        scheduler.step()
    scheduler.fail(caught.value)
    assert not scheduler.busy
    assert [str(one.deltas[-1].error) for one in both] == ["no text"] * 2
    assert scheduler.metrics.finished == {"error": 2}


# Waiting, fairness, ends from outside


def test_first_come_first_served() -> None:
    """On two slots, whatever their lengths; one that is cancelled while it waits holds up nobody."""
    engines = toy(slots=2)
    scheduler = Scheduler(as_engines(engines))
    driven = [
        Driven(engines, [1] * size, GenerationOptions(most, ignore_eos=True))
        for size, most in ((1, 90), (20, 12), (3, 40), (30, 20), (1, 15), (9, 30))
    ]
    for one in driven:
        scheduler.submit(one.request)
    driven[3].request.cancelled = True
    came: list[Driven] = []
    while scheduler.busy:
        scheduler.step()
        came += [one for one in driven if one.request.slot >= 0 and one not in came]
    assert came == [driven[i] for i in (0, 1, 2, 4, 5)]


def test_a_cancelled_request_frees_its_slot_within_one_cycle() -> None:
    engines = toy()
    scheduler = Scheduler(as_engines(engines))
    first, second = (Driven(engines, [1], GenerationOptions(100, ignore_eos=True)) for _ in "ab")
    for one in (first, second):
        scheduler.submit(one.request)
    scheduler.step()
    assert (first.request.slot, second.request.slot) == (0, -1)
    first.request.cancelled = True
    scheduler.step()
    assert first.generation.finish_reason == "cancelled"
    assert second.request.slot == 0


def test_a_waiting_request_can_be_cancelled() -> None:
    engines = toy()
    scheduler = Scheduler(as_engines(engines))
    first, second = (Driven(engines, [1], GenerationOptions(100, ignore_eos=True)) for _ in "ab")
    scheduler.submit(first.request)
    scheduler.step()
    scheduler.submit(second.request)
    second.request.cancelled = True
    scheduler.step()
    assert second.generation.finish_reason == "cancelled"
    second.check()


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits() -> None:
    engines = toy(max_seq_len=100_000)
    scheduler = Scheduler(as_engines(engines))
    both = [
        Driven(engines, [1], GenerationOptions(10_000, ignore_eos=True, deadline=seconds))
        for seconds in (0.2, 0.05)  # the one that waits is overdue first
    ]
    for one in both:
        scheduler.submit(one.request)
    while scheduler.busy:
        scheduler.step()
    assert [one.generation.finish_reason for one in both] == ["deadline", "deadline"]
    assert both[0].generation.tokens
    assert not both[1].generation.tokens


def test_a_full_queue_refuses() -> None:
    engines = toy()
    scheduler = Scheduler(as_engines(engines), queue_limit=2)
    for _ in range(2):
        scheduler.submit(Driven(engines, [1], GenerationOptions(5)).request)
    with pytest.raises(QueueFullError, match="2 requests are waiting already; try again later"):
        scheduler.submit(Driven(engines, [1], GenerationOptions(5)).request)


def test_a_long_prompt_does_not_stall_others() -> None:
    """While 50 pieces of a prompt run, the other slot commits in every step; a short prompt that
    comes later starts within two steps."""
    engines = toy(slots=3)
    scheduler = Scheduler(as_engines(engines))
    wish = GenerationOptions(500, ignore_eos=True)
    running = Driven(engines, [1], wish)
    scheduler.submit(running.request)
    scheduler.step()
    scheduler.submit(Driven(engines, [2] * 400, wish).request)
    for _ in range(10):
        before = len(running.generation.tokens)
        scheduler.step()
        assert len(running.generation.tokens) > before
    late = Driven(engines, [3], wish)
    scheduler.submit(late.request)
    scheduler.step()
    scheduler.step()
    assert late.generation.tokens


def test_beyond_the_drafters_positions_generation_goes_on() -> None:
    """Drafting stops where the drafter's positions end, and the answer says so."""
    wish = GenerationOptions(100, ignore_eos=True)
    short = toy(drafter_positions=40, skill=1.0)
    answer = run_all(short, [([1] * 10, wish)])[0]
    assert answer.drafting == "off: the drafter ends at 40 positions"
    assert len(answer.tokens) == 100
    assert answer.tokens == run_all(toy(), [([1] * 10, wish)])[0].tokens
    assert 10 + answer.metrics.committed - answer.metrics.cycles < 40 + short.manifest.block


@pytest.mark.parametrize("positions", range(36, 42))
def test_no_block_reaches_beyond_the_drafters_positions(positions: int) -> None:
    class Reaching(ToyPair):
        def draft(self, slots: Sequence[int], count: int) -> None:
            reached.append(int(self.context[slots[0]]) + 1 + count)
            super().draft(slots, count)

    reached: list[int] = []
    engines = Reaching(skill=1.0, drafter_positions=positions)
    run_all(engines, [([1] * 10, GenerationOptions(60, ignore_eos=True))])
    assert positions - 6 < max(reached) <= positions


@pytest.mark.parametrize("positions", range(36, 42))
def test_an_engine_without_single_tokens_ends_where_its_drafter_does(positions: int) -> None:
    """The request beside it goes on; a prompt with no room for a block is refused."""

    class Blocks(ToyPair):
        def verify(self, slots: Sequence[int], width: int, logits: bool = False) -> None:
            assert width in self.widths
            super().verify(slots, width, logits)

    engines = Blocks(slots=2, drafter_positions=positions)
    engines.widths = range(6, 7)
    long, short = GenerationOptions(60, ignore_eos=True), GenerationOptions(12, ignore_eos=True)
    ended, beside = run_all(engines, [([1] * 20, long), ([2] * 5, short)])
    assert (ended.finish_reason, len(beside.tokens)) == ("length", 12)
    whole = run_all(toy(stop_ids=()), [([1] * 20, long)])[0].tokens
    assert ended.tokens == whole[: len(ended.tokens)]
    assert positions - 6 < 20 + len(ended.tokens) - 1 <= positions
    Driven(engines, [1] * (positions - 6), long)
    with pytest.raises(InputError, match=f"drafter ends at {positions} with a block of 6"):
        Driven(engines, [1] * (positions - 5), long)


def test_a_failing_engine_ends_every_request_with_its_error() -> None:
    engines = toy(slots=2)
    scheduler = Scheduler(as_engines(engines))
    wish = GenerationOptions(50, ignore_eos=True)
    driven = [Driven(engines, [1], wish) for _ in range(3)]
    for one in driven:
        scheduler.submit(one.request)
    scheduler.step()
    scheduler.fail(RuntimeError("out of memory"))
    assert not scheduler.busy
    assert [str(one.deltas[-1].error) for one in driven] == ["out of memory"] * 3
    assert sorted(scheduler._free) == [0, 1]


def test_a_broken_client_loses_only_its_own_request() -> None:
    engines = toy(slots=2)
    scheduler = Scheduler(as_engines(engines))
    wish = GenerationOptions(50, ignore_eos=True)
    broken, sound = (Driven(engines, [i], wish) for i in (1, 2))

    def closed(delta: object) -> None:
        raise ConnectionError

    broken.request.sink = closed
    for one in (broken, sound):
        scheduler.submit(one.request)
    while scheduler.busy:
        scheduler.step()
    assert broken.generation.finish_reason == "cancelled"
    assert len(sound.generation.tokens) == 50
    sound.check()
