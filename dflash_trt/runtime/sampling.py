"""From the target's logits to its token: the processing chain and the randomness of a position.

The chain, in order: repetition penalty, presence and frequency penalties, bias, ban of stop tokens
before `min_tokens`, temperature, top-k, top-p, min-p. It runs in float64. Equal logits: the lower
token id wins. V is the vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.runtime.options import GenerationOptions

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the request's seed and the token's position alone.

    Philox is a counter-based generator: nothing is drawn in sequence, so rejected drafts, the block
    length and other requests cannot shift anything.
    """
    bits = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def new_seed() -> int:
    return secrets.randbits(64)


class History:
    """Tokens of one request: which ones the prompt has, and how often the answer has each."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self._seen = np.zeros(vocab_size, bool)
        self._counts = np.zeros(vocab_size, np.int32)
        self._seen[np.asarray(prompt, np.int64)] = True

    def push(self, token: int) -> None:
        self._seen[token] = True
        self._counts[token] += 1

    def penalise(self, logits: Floats, options: GenerationOptions) -> None:
        """Apply the three penalties to logits [V] in place."""
        if options.repetition_penalty != 1:
            ids = np.flatnonzero(self._seen)
            values = logits[ids]
            factor = options.repetition_penalty
            logits[ids] = np.where(values > 0, values / factor, values * factor)
        if options.presence_penalty or options.frequency_penalty:
            ids = np.flatnonzero(self._counts)
            logits[ids] -= options.presence_penalty + options.frequency_penalty * self._counts[ids]


def top_k(logits: Floats, k: int) -> Ids:
    """Ids of the `k` largest logits, ascending; 0 keeps all."""
    if not 0 < k < len(logits):
        return np.arange(len(logits))
    least = np.partition(logits, len(logits) - k)[len(logits) - k]
    above = np.flatnonzero(logits > least)
    equal = np.flatnonzero(logits == least)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def nucleus(probabilities: Floats, top_p: float) -> Ids:
    """Indices, ascending, of the fewest most likely entries whose sum reaches `top_p`.

    Entries below (1 - top_p) / V sum to less than 1 - top_p, so the nucleus lies within the others
    and only those are sorted.
    """
    if top_p >= 1:
        return np.arange(len(probabilities))
    likely = np.flatnonzero(probabilities >= (1 - top_p) / len(probabilities))
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    reached = np.cumsum(probabilities[order])
    count = int(np.searchsorted(reached, top_p * (1 - 1e-12))) + 1
    return np.sort(order[:count])


def distribution(logits: Floats, options: GenerationOptions) -> tuple[Ids, Floats]:
    """Ids that may be drawn, ascending, and their probabilities, at a temperature above 0."""
    ids = top_k(logits, options.top_k)
    weights = _picked(logits, ids) - logits.max()
    weights /= options.temperature
    np.exp(weights, out=weights)
    weights /= weights.sum()
    kept = nucleus(weights, options.top_p)
    ids, weights = _picked(ids, kept), _picked(weights, kept)
    kept = np.flatnonzero((weights >= options.min_p * weights.max()) & (weights > 0))
    ids, weights = _picked(ids, kept), _picked(weights, kept)
    return ids, weights / weights.sum()


def _picked(values: Any, indices: Ids) -> Any:
    """values[indices] for ascending indices, without a copy where all are taken."""
    return values if len(indices) == len(values) else values[indices]


def draw(ids: Ids, probabilities: Floats, number: float) -> int:
    """The token at `number` in [0, 1) of the cumulative distribution over `ids`."""
    reached = np.cumsum(probabilities)
    index = int(np.searchsorted(reached, number * reached[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of raw probabilities: of the chosen token, and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Floats, token: int, count: int) -> TokenLogprobs:
    shifted = logits - logits.max()
    normed = shifted - np.log(np.exp(shifted).sum())
    best = top_k(logits, count) if count else np.empty(0, np.int64)
    best = best[np.argsort(-normed[best], kind="stable")]
    return TokenLogprobs(
        token, float(normed[token]), tuple((int(i), float(normed[i])) for i in best)
    )


class Chooser:
    """One request's choice of tokens, called for one position after the other.

    Every token it returns is committed, so its history always holds exactly the tokens before the
    row it looks at, drafted ones included.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        stop_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self.seed = new_seed() if options.seed is None else options.seed
        self.logprobs: list[TokenLogprobs] = []
        self._options = options
        self._stop_ids = np.asarray(sorted(stop_ids), np.int64)
        self._history = History(prompt, vocab_size) if options.penalised else None
        self._bias_ids = np.asarray(list(options.logit_bias), np.int64)
        self._bias = np.asarray(list(options.logit_bias.values()), np.float64)
        self._prompt_tokens, self._generated = len(prompt), 0

    @property
    def needs_logits(self) -> bool:
        """False where the arg max in the graph is the answer: greedy, nothing to process."""
        o = self._options
        unbanned = self._generated >= o.min_tokens or not len(self._stop_ids)
        plain = o.greedy and not (o.penalised or o.logit_bias) and o.logprobs is None
        return not (plain and unbanned)

    def choose(self, row: NDArray[np.float32]) -> int:
        """The next token from the logits [V] behind all tokens so far."""
        logits = self._processed(row)
        if self._options.greedy:
            token = int(logits.argmax())
        else:
            number = uniform(self.seed, self._prompt_tokens + self._generated)
            token = draw(*distribution(logits, self._options), number)
        if self._options.logprobs is not None:
            raw = row.astype(np.float64)
            self.logprobs.append(token_logprobs(raw, token, self._options.logprobs))
        self.push(token)
        return token

    def push(self, token: int) -> None:
        """Count a token that was chosen, here or by the engine."""
        self._generated += 1
        if self._history is not None:
            self._history.push(token)

    def _processed(self, row: NDArray[np.float32]) -> Floats:
        logits = row.astype(np.float64)
        if self._history is not None:
            self._history.penalise(logits, self._options)
        logits[self._bias_ids] += self._bias
        if self._generated < self._options.min_tokens:
            logits[self._stop_ids] = -np.inf
        return logits
