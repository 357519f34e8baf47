"""Running requests on a scheduler in the test's own thread, with every contract checked."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.runtime.options import GenerationOptions
from dflash_trt.runtime.request import Delta, Generation, Request
from dflash_trt.runtime.scheduler import Scheduler
from tests.runtime.toy import ToyCodec, ToyPair, as_engines


class Driven:
    """A request and the deltas that it got."""

    def __init__(self, toy: ToyPair, prompt: Sequence[int], options: GenerationOptions) -> None:
        self.deltas: list[Delta] = []
        self.request = Request(prompt, options, as_engines(toy), ToyCodec(), self.deltas.append)  # type: ignore[arg-type]

    @property
    def generation(self) -> Generation:
        return self.request.generation

    def check(self) -> None:
        """Deltas add up to the answer, only the last one ends it, and the counts agree."""
        g = self.generation
        assert [t for d in self.deltas for t in d.tokens] == g.tokens
        assert "".join(d.text for d in self.deltas) == g.text
        assert [e for d in self.deltas for e in d.logprobs] == g.logprobs
        assert [d.finish_reason is not None for d in self.deltas] == [False] * (
            len(self.deltas) - 1
        ) + [True]
        assert g.usage["completion_tokens"] == g.metrics.tokens == len(g.tokens)


def run_all(
    toy: ToyPair, requests: Sequence[tuple[Sequence[int], GenerationOptions]]
) -> list[Generation]:
    """All requests, submitted together and run to their ends."""
    scheduler = Scheduler(as_engines(toy))
    driven = [Driven(toy, prompt, options) for prompt, options in requests]
    for one in driven:
        scheduler.submit(one.request)
    while scheduler.busy:
        scheduler.step()
        check_state(toy, scheduler)
    for one in driven:
        one.check()
    return [one.generation for one in driven]


def check_state(toy: ToyPair, scheduler: Scheduler) -> None:
    """Slots are owned once; contexts are the tokens so far less the anchor; the rest is empty."""
    owned = [*scheduler._prefilling, *scheduler._decoding]
    slots = [request.slot for request in owned]
    assert sorted([*slots, *scheduler._free]) == list(range(toy.manifest.max_batch))
    m = scheduler.metrics
    assert (m.slots_used, m.tokens_cached) == (len(owned), toy.context.sum())
    for request in scheduler._decoding:
        tokens = [*request.prompt.tolist(), *request.tokens]
        assert toy.context[request.slot] == len(tokens) - 1
        assert toy.cached[request.slot][: len(tokens) - 1] == tokens[:-1]
        assert toy.anchor[request.slot] == tokens[-1]
        if request.lane().injects:
            assert toy.injected[request.slot] + toy.rows[request.slot] == len(tokens) - 1
    assert all(toy.context[slot] == 0 for slot in scheduler._free)
