"""What a request may ask for, checked when it is written down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_trt.errors import InputError

# Smaller divisors would make logits overflow.
SMALLEST_TEMPERATURE = 1e-4
SMALLEST_PENALTY = 0.01


@dataclass(frozen=True)
class GenerationOptions:
    """One request's wishes; every default means "not asked for".

    max_tokens: at most so many new tokens; min_tokens: no stop before so many; draft: False decodes
    one token at a time; adaptive: shorter blocks, or none, where they are measured to be faster;
    width: tokens per verify call, 2 to the engine's block (None: the block); ignore_eos: the model's
    own end tokens do not stop; stop: texts that end the answer and are not part of it;
    stop_token_ids: further end tokens.

    temperature 0 takes the most likely token, and so does one below SMALLEST_TEMPERATURE, which
    leaves no other. top_k 0, top_p 1, min_p 0 keep every token. repetition_penalty divides positive
    and multiplies negative logits of tokens in prompt or answer, SMALLEST_PENALTY at least;
    presence_penalty and frequency_penalty are subtracted once, and once per occurrence, for tokens
    of the answer; logit_bias is added, by token id. seed: 0 to 2**64 - 1, None draws one.
    logprobs: None for none, else also the so many most likely tokens of each position, from the
    logits as the model gave them. deadline: seconds from submission after which the request ends.
    """

    max_tokens: int = 256
    draft: bool = True
    width: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    deadline: float | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max-tokens {self.max_tokens}: at least one token is generated")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError(
                f"min-tokens {self.min_tokens}: must lie between 0 and max-tokens {self.max_tokens}"
            )
        if any(not text for text in self.stop):
            raise InputError("stop: an empty text would stop everything")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                bound = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} or more"
                raise InputError(f"{name.replace('_', '-')} {value}: must be {bound}")
        if not self.top_p > 0:
            raise InputError("top-p must be above 0")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise InputError(f"logit-bias {bias} of token {token}: must be finite")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, and nothing drawn."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change later logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


_INF = math.inf
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 100),
    ("top_k", 0, _INF),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", SMALLEST_PENALTY, 100),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, 1000),
    ("deadline", 0, _INF),
)
