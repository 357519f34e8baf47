"""Sampled output has the distribution of plain sampling, and a wrong rule would be seen.

Chi-square statistics are turned into z-scores (Wilson-Hilferty); a right rule stays below 4.5
everywhere, with fixed seeds, and the planted wrong ones are far above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.errors import InputError
from dflash_trt.runtime.acceptance import commit_block
from dflash_trt.runtime.options import SMALLEST_PENALTY, SMALLEST_TEMPERATURE, GenerationOptions
from dflash_trt.runtime.sampling import (
    Chooser,
    History,
    distribution,
    draw,
    new_seed,
    nucleus,
    token_logprobs,
    top_k,
    uniform,
)
from tests.runtime.toy import ToyPair

VOCAB = 16
DRAWS = 200_000
LIMIT = 4.5
TARGET = ToyPair(vocab=VOCAB, seed=3)
OPTIONS = {
    "plain": GenerationOptions(temperature=1.0),
    "cold": GenerationOptions(temperature=0.6),
    "top-k": GenerationOptions(temperature=1.2, top_k=5),
    "top-p": GenerationOptions(temperature=1.0, top_p=0.8),
    "min-p": GenerationOptions(temperature=1.0, min_p=0.1),
    "penalties": GenerationOptions(
        temperature=0.9, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.7,
        frequency_penalty=0.5, logit_bias={2: 3.0, 7: -2.0},
    ),
}  # fmt: skip


def z_score(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How far `counts` are from `probabilities`, in standard deviations; rare cells are pooled."""
    expected = probabilities.ravel() * counts.sum()
    counts = counts.ravel()
    assert not counts[expected == 0].any(), "something impossible was drawn"
    common = expected >= 8
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(seen) - 1
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def processed(options: GenerationOptions, tokens: list[int], answer: int) -> np.ndarray:
    """p(next) over the vocabulary behind `tokens`, the last `answer` of them generated.

    Written down again, naively and without the code under test.
    """
    logits = TARGET.row(tokens).astype(np.float64)
    mine = tokens[len(tokens) - answer :]
    for token in set(tokens):
        factor = options.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(mine):
        logits[token] -= options.presence_penalty + options.frequency_penalty * mine.count(token)
    for token, bias in options.logit_bias.items():
        logits[token] += bias
    p = np.exp(logits / options.temperature)
    order = sorted(range(VOCAB), key=lambda i: (-p[i], i))
    if options.top_k:
        p[order[options.top_k :]] = 0
    p /= p.sum()
    total = 0.0
    for token in order:
        if total >= options.top_p:
            p[token] = 0
        total += p[token]
    p[p < options.min_p * p.max()] = 0
    return p / p.sum()


def joint(options: GenerationOptions, prompt: list[int]) -> np.ndarray:
    """p(x, y, z) of the three tokens behind a prompt."""
    p = np.zeros((VOCAB,) * 3)
    for x, px in enumerate(processed(options, prompt, 0)):
        for y, py in enumerate(processed(options, [*prompt, x], 1)) if px else ():
            if py:
                p[x, y] = px * py * processed(options, [*prompt, x, y], 2)
    return p


def drafts_of(kind: str, options: GenerationOptions, prompt: list[int]) -> list[int]:
    """Two drafts: the most likely tokens, the least likely ones, or one token over and over."""
    if kind == "stubborn":
        return [5, 5]
    pick = np.argmax if kind == "good" else np.argmin
    first = int(pick(processed(options, prompt, 0)))
    return [first, int(pick(processed(options, [*prompt, first], 1)))]


def plain_rule(p: np.ndarray, draft: int, u: float) -> int:
    """The rule in use: the position's draw, whatever was drafted."""
    return draw(np.arange(VOCAB), p, u)


def boosting_rule(p: np.ndarray, draft: int, u: float) -> int:
    """Wrong: a one-hot proposal judged as if it came from a flat q of 1/2."""
    accept = min(1.0, p[draft] / 0.5)
    return draft if u < accept else draw(np.arange(VOCAB), p, (u - accept) / (1 - accept))


def leaving_rule(p: np.ndarray, draft: int, u: float) -> int:
    """Wrong: after a rejection, draw from p again with the rejected draft still in it."""
    if u < p[draft]:
        return draft
    return draw(np.arange(VOCAB), p, (u - p[draft]) / (1 - p[draft]))


def committed_pairs(rule: Callable[[np.ndarray, int, float], int], kind: str) -> np.ndarray:
    """Counts [V] of the first committed token under a rule, over evenly spread random numbers."""
    options, prompt = OPTIONS["plain"], [3, 1]
    p, (draft, _) = processed(options, prompt, 0), drafts_of(kind, options, prompt)
    numbers = np.random.default_rng(8).random(20_000)
    return np.bincount([rule(p, draft, u) for u in numbers], minlength=VOCAB)


@pytest.mark.parametrize("kind", ["good", "bad", "stubborn"])
def test_a_wrong_acceptance_rule_is_caught(kind: str) -> None:
    """The planted faults: softmax-q acceptance of an arg max draft, and no removal of the draft."""
    p = processed(OPTIONS["plain"], [3, 1], 0)
    assert z_score(committed_pairs(plain_rule, kind), p) < LIMIT
    if kind == "good":
        assert z_score(committed_pairs(boosting_rule, kind), p) > 2 * LIMIT
        assert z_score(committed_pairs(leaving_rule, kind), p) > 2 * LIMIT


@pytest.mark.parametrize("name", OPTIONS)
def test_one_row_has_the_processed_distribution(name: str) -> None:
    """DRAWS draws of the chain's own distribution against the naive one."""
    options, prompt = OPTIONS[name], [2, 3, 1]  # 2 has a negative logit there
    chooser = Chooser(prompt, options, (), VOCAB)
    ids, p = distribution(chooser._processed(TARGET.row(prompt)), options)
    reached = np.cumsum(p)
    numbers = np.random.default_rng(1).random(DRAWS)
    tokens = ids[np.searchsorted(reached, numbers * reached[-1], side="right")]
    assert [draw(ids, p, u) for u in numbers[:500]] == tokens[:500].tolist()
    counts = np.bincount(tokens, minlength=VOCAB)
    assert z_score(counts, processed(options, prompt, 0)) < LIMIT


def sampled_block(options: GenerationOptions, drafts: list[int], prompt: list[int]) -> list[int]:
    """Three tokens of one seed, committed block by block as the cycle does."""
    chooser = Chooser(prompt, options, (), VOCAB)
    tokens: list[int] = []
    while len(tokens) < 3:
        before, block = list(tokens), drafts if not tokens else drafts[:1]

        def choose(j: int, before: list[int] = before, block: list[int] = block) -> int:
            return chooser.choose(TARGET.row([*prompt, *before, *block[:j]]))

        tokens += commit_block(block, choose)
    return tokens[:3]


def sampled_blocks(
    options: GenerationOptions, kind: str, prompt: list[int], seeds: range
) -> list[list[int]]:
    drafts = drafts_of(kind, options, prompt)
    return [sampled_block(replace(options, seed=seed), drafts, prompt) for seed in seeds]


@pytest.mark.parametrize("name", ["plain", "penalties"])
def test_three_tokens_of_many_seeds_have_the_joint_distribution(name: str) -> None:
    """More than 200,000 draws with the numbers that requests get, grouped by what came before."""
    options, prompt, seeds = OPTIONS[name], [3, 1], range(70_000)
    numbers = np.array([[uniform(s, 2 + i) for i in range(3)] for s in seeds])
    tokens = np.zeros((len(seeds), 3), np.int64)
    for position in range(3):
        histories, group = np.unique(tokens[:, :position], axis=0, return_inverse=True)
        for index, history in enumerate(histories.tolist()):
            members = np.flatnonzero(group == index)
            chooser = Chooser(prompt, options, (), VOCAB)
            for token in history:
                chooser.push(token)
            row = TARGET.row([*prompt, *history])
            ids, p = distribution(chooser._processed(row), options)
            reached = np.cumsum(p)
            u = numbers[members, position] * reached[-1]
            tokens[members, position] = ids[np.searchsorted(reached, u, side="right")]
    assert sampled_blocks(options, "good", prompt, seeds[:200]) == tokens[:200].tolist()
    p, counts = joint(options, prompt), np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(tokens.T), 1)
    for axes in ((1, 2), (0, 2), (2,), (0,), ()):
        assert z_score(counts.sum(axes), p.sum(axes)) < LIMIT


@pytest.mark.parametrize("kind", ["good", "bad", "stubborn"])
@pytest.mark.parametrize("name", ["plain", "penalties"])
def test_blocks_have_the_joint_distribution(name: str, kind: str) -> None:
    """One, two and three tokens together, through the real chooser and acceptance, seed by seed."""
    options, prompt = OPTIONS[name], [3, 1]
    p = joint(options, prompt)
    tokens = np.array(sampled_blocks(options, kind, prompt, range(5000)))
    counts = np.zeros_like(p)
    np.add.at(counts, tuple(tokens.T), 1)
    for axes in ((1, 2), (2,), ()):
        assert z_score(counts.sum(axes), p.sum(axes)) < LIMIT


@pytest.mark.parametrize("name", ["plain", "penalties", "top-p"])
def test_the_drafter_changes_nothing(name: str) -> None:
    """Same seed, same tokens, whatever was drafted."""
    runs = [
        sampled_blocks(OPTIONS[name], k, [3, 1], range(300)) for k in ("good", "bad", "stubborn")
    ]
    assert runs[0] == runs[1] == runs[2]


# The chain, piece by piece


def test_top_k_keeps_exactly_k_and_the_lower_id_of_equals() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0])
    assert top_k(logits, 3).tolist() == [1, 2, 3]
    assert top_k(logits, 0).tolist() == top_k(logits, 9).tolist() == [0, 1, 2, 3, 4]


def test_nucleus_is_the_smallest_set_that_reaches_p() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        p = random.dirichlet(np.full(50, 0.3))
        limit = float(random.uniform(0.01, 0.999))
        order = np.argsort(-p, kind="stable")
        count = int((np.cumsum(p[order]) < limit).sum()) + 1
        assert nucleus(p, limit).tolist() == sorted(order[:count].tolist())


def test_penalties_by_hand() -> None:
    """Prompt 0 and 1, answer 2, 2, 3: repetition counts both, the others the answer, per token."""
    options = GenerationOptions(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    history = History([0, 1], 5)
    for token in (2, 2, 3):
        history.push(token)
    logits = np.array([4.0, -4.0, 4.0, -4.0, 4.0])
    history.penalise(logits, options)
    assert logits.tolist() == [2.0, -8.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 4.0]


def test_min_tokens_bans_stop_tokens_only_so_long() -> None:
    row = np.array([0.0, 9.0, 5.0], np.float32)
    chooser = Chooser([0], GenerationOptions(min_tokens=2), {1}, 3)
    assert chooser.needs_logits
    assert [chooser.choose(row), chooser.choose(row)] == [2, 2]
    assert not chooser.needs_logits
    assert chooser.choose(row) == 1


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = np.array([0.0, 1.0, 2.0, 0.5], np.float32)
    chooser = Chooser([0], GenerationOptions(logprobs=2, logit_bias={0: 50.0}), (), 4)
    assert chooser.choose(row) == 0
    (entry,) = chooser.logprobs
    expected = np.log(np.exp(row) / np.exp(row).sum())
    assert entry.logprob == pytest.approx(expected[0], abs=1e-6)
    assert [t for t, _ in entry.top] == [2, 1]
    assert entry == token_logprobs(row.astype(np.float64), 0, 2)


def test_divisors_that_vanish() -> None:
    """A temperature near 0 is greedy; what is allowed keeps logits finite; the rest is refused."""
    row = np.array([-9e4, 8e4, 9e4, 1.0], np.float32)
    tiny = Chooser([0], GenerationOptions(temperature=1e-300), (), 4)
    assert not tiny.needs_logits
    assert tiny.choose(row) == 2
    least = GenerationOptions(temperature=SMALLEST_TEMPERATURE, repetition_penalty=SMALLEST_PENALTY)
    assert not least.greedy
    chooser = Chooser([0, 1], least, (), 4)
    ids, p = distribution(chooser._processed(row), least)
    assert dict(zip(ids.tolist(), p.tolist(), strict=True))[1] == pytest.approx(1.0)
    for value in (0.0, 1e-300, 101.0):
        with pytest.raises(InputError, match=rf"repetition-penalty {value}: must be 0.01 to 100"):
            GenerationOptions(repetition_penalty=value)


# Randomness


def test_numbers_depend_on_seed_and_position_alone() -> None:
    forward = [uniform(5, i) for i in range(50)]
    assert forward == [uniform(5, i) for i in reversed(range(50))][::-1]
    assert len({uniform(s, i) for s in range(50) for i in range(50)}) == 2500
    assert all(0 <= u < 1 for u in forward)


def test_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    for numbers in (
        [uniform(seed, 17) for seed in range(20_000)],
        [uniform(17, position) for position in range(20_000)],
    ):
        counts = np.histogram(numbers, 64, (0, 1))[0]
        assert z_score(counts, np.full(64, 1 / 64)) < LIMIT


def test_unseeded_requests_differ() -> None:
    assert len({new_seed() for _ in range(100)}) == 100
    choosers = [Chooser([1], OPTIONS["plain"], (), VOCAB) for _ in range(2)]
    assert choosers[0].seed != choosers[1].seed
