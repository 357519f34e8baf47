"""Blocks are as long as it pays, by what cycles were measured to take; nothing else depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.runtime.cycle import Lane, StepResult
from dflash_trt.runtime.drafting import DraftControl
from dflash_trt.runtime.options import GenerationOptions
from dflash_trt.runtime.scheduler import Scheduler
from tests.runtime.drive import Driven, check_state
from tests.runtime.toy import ToyPair, as_engines

ADAPTIVE = GenerationOptions(4000, ignore_eos=True, adaptive=True)
FIXED = replace(ADAPTIVE, adaptive=False)


class World:
    """Cycles whose acceptance and cost are set. accept: probability of each draft; row: seconds that
    a row more of every lane costs, by number of lanes, over a cycle of 1."""

    def __init__(self, widths: Sequence[int], accept: float, row: dict[int, float]) -> None:
        self.control = DraftControl(widths)
        self.longest, self.accept, self.row = max(widths), accept, row
        self.random = np.random.default_rng(0)

    def run(self, lanes: int, cycles: int, drafted: int | None = None) -> list[int]:
        """The widths of so many cycles."""
        widths = []
        for _ in range(cycles):
            widths.append(self.control.width(lanes, drafted or lanes, self.longest))
            blocks = [self.block(widths[-1]) for _ in range(lanes)]
            if drafted is not None:
                blocks[drafted:] = [StepResult((1,), 0)] * (lanes - drafted)
            seconds = 1 + self.row[lanes] * (widths[-1] - 1)
            self.control.observe(blocks, seconds * self.random.uniform(0.95, 1.05))
        return widths

    def block(self, width: int) -> StepResult:
        right = self.random.random(width - 1) < self.accept
        accepted = int(np.argmin([*right, False]))
        return StepResult((1,) * (accepted + 1), width - 1)


def usual(widths: list[int]) -> int:
    """The width of nearly all cycles."""
    ((width, often),) = Counter(widths).most_common(1)
    assert often / len(widths) > 0.75
    return width


ROOMY, MIDDLING, DEAR, FULL = {4: 0.05}, {4: 0.25}, {4: 0.45}, {4: 1.0}


@pytest.mark.parametrize(
    ("accept", "row", "best"),
    [(0.8, ROOMY, 8), (0.8, MIDDLING, 4), (0.6, DEAR, 2), (0.8, FULL, 1), (0.0, ROOMY, 1)],
)
def test_the_width_of_most_tokens_per_second(
    accept: float, row: dict[int, float], best: int
) -> None:
    """Long blocks where rows are cheap, shorter ones where they cost, none where that gives nothing."""
    world = World(range(1, 9), accept, row)
    assert sorted(world.run(4, 12)) == sorted([8, 4, 2, 1] * 3)
    world.run(4, 50)
    assert usual(world.run(4, 1000)) == best


def test_each_batch_size_has_its_own_width_and_keeps_it() -> None:
    world = World(range(1, 9), 0.8, {1: 0.05, 3: 0.25, 4: 0.25, 16: 1.5})
    for lanes in (1, 4, 16):
        world.run(lanes, 40)
    for lanes, best in ((16, 1), (1, 8), (4, 4), (3, 4)):
        assert usual(world.run(lanes, 320)) == best
    assert world.control.width(16, 16, 8) == 1


def test_a_drafter_that_gets_better_or_worse_is_noticed() -> None:
    world = World(range(1, 9), 0.0, ROOMY)
    assert usual(world.run(4, 500)) == 1
    world.accept = 0.9
    world.run(4, 300)
    assert usual(world.run(4, 500)) == 8
    world.accept = 0.0
    world.run(4, 60)
    assert usual(world.run(4, 500)) == 1


def test_lanes_that_are_not_drafted_count_in_what_a_block_costs() -> None:
    """One lane of four that would gain does not make the other three wait."""
    assert usual(World(range(1, 5), 0.9, DEAR).run(4, 500)) == 4
    assert usual(World(range(1, 5), 0.9, DEAR).run(4, 500, drafted=1)) == 1


def test_only_widths_that_the_engines_can_do() -> None:
    assert set(World((1, 8), 0.8, DEAR).run(4, 200)) == {1, 8}
    assert set(World((8,), 0.0, FULL).run(4, 200)) == {8}


# In the scheduler


class Costed(Scheduler):
    """A drafted cycle takes three seconds, one without drafts takes one. widths: those that ran."""

    widths: list[int]

    def run(self, driven: Sequence[Driven], after: Callable[[], None] = lambda: None) -> None:
        plain_step, self.widths = self._cycle.step, []

        def step(lanes: Sequence[Lane]) -> list[StepResult]:
            results = plain_step(lanes)
            self.widths.append(max(lane.width for lane in lanes))
            self._cycle.step_seconds = 3.0 if self.widths[-1] > 1 else 1.0
            return results

        self._cycle.step = step  # type: ignore[method-assign]
        for one in driven:
            self.submit(one.request)
        while self.busy:
            self.step()
            check_state(self._engines, self)  # type: ignore[arg-type]
            after()


def toy(**changes: object) -> ToyPair:
    return ToyPair(**{"max_seq_len": 5000, **changes})  # type: ignore[arg-type]


def test_drafting_stops_where_it_does_not_pay_and_comes_back() -> None:
    """A bad drafter is given up, tried again from time to time, and used again once it is good; the
    answer says where it stands, the metrics how many cycles had which blocks."""
    engines = toy(skill=0.0)
    scheduler = Costed(as_engines(engines))
    one = Driven(engines, [1], ADAPTIVE)
    said = []

    def improve() -> None:
        said.append(one.generation.drafting)
        if len(one.generation.tokens) > 1000:
            engines.skill = 1.0

    scheduler.run([one], improve)
    widths = np.array(scheduler.widths)
    assert widths[:3].tolist() == [6, 3, 1]
    assert 0.01 < np.mean(widths[10:600] > 1) < 0.1
    assert np.mean(widths[-300:] == 6) > 0.9
    assert said[300] == "off: slower than without"
    assert one.generation.drafting == "on"
    counts = {width: sum(h.counts) for width, h in scheduler.metrics.cycles.items()}
    assert counts == Counter(scheduler.widths)
    tokens = [1]
    for got in one.generation.tokens:
        assert got == engines.row(tokens).argmax()
        tokens.append(got)


def test_a_fixed_block_is_kept_and_shared() -> None:
    """A request that is not adaptive has its own blocks all the time, and the others of its batch
    have them too: its block is what a call costs."""
    engines = toy(slots=3, skill=0.0)
    scheduler = Costed(as_engines(engines))
    fixed = Driven(engines, [1], replace(FIXED, max_tokens=600, width=4))
    plain = Driven(engines, [2], replace(FIXED, max_tokens=300, draft=False))
    free = Driven(engines, [3], replace(ADAPTIVE, max_tokens=300))
    scheduler.run([fixed, plain, free])
    for one, drafted in ((fixed, 3), (plain, 0), (free, 3)):
        assert one.generation.metrics.drafted == drafted * one.generation.metrics.cycles
    assert set(scheduler.widths) == {4}


def test_a_request_that_wants_short_blocks_has_shorter_ones_or_none() -> None:
    """Its own width is the longest that is tried."""
    scheduler = Costed(as_engines(toy(skill=0.0)))
    one = Driven(scheduler._engines, [1], replace(ADAPTIVE, max_tokens=200, width=5))  # type: ignore[arg-type]
    scheduler.run([one])
    assert set(scheduler.widths) == {5, 2, 1}
    assert scheduler.widths.count(1) > 100


def test_a_shorter_block_says_so() -> None:
    engines = toy(skill=0.6)
    one = Driven(engines, [1], ADAPTIVE).request
    assert (one.lane(3).width, one.generation.drafting) == (3, "on: blocks of 3")
    assert (one.lane(6).width, one.generation.drafting) == (6, "on")
    assert (one.lane(1).width, one.generation.drafting) == (1, "off: slower than without")
    assert one.lane(1).injects  # so that drafting may start again
    assert Driven(engines, [1], replace(ADAPTIVE, width=2)).request.lane(6).width == 2
