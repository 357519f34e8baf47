"""From what was generated to a response's tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.runtime.generate import Delta, Generation
from dflash_trt.runtime.sampling import TokenLogprobs
from dflash_trt.serving.triton.tensors import DTYPES, OUTPUTS
from dflash_trt.serving.triton.wishes import Wish

_BY_RETURN = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_figures": "figures",
}
_TYPES = {tensor.name: tensor.dtype for tensor in OUTPUTS}


def whole(generation: Generation) -> Delta:
    """An answer as one delta."""
    g = generation
    return Delta(tuple(g.tokens), g.text, tuple(g.logprobs), g.finish_reason)


def outputs(wish: Wish, delta: Delta, generation: Generation, echo: bool) -> dict[str, Any]:
    """Values by tensor name. Tokens and text are the delta's; sums are of the answer so far."""
    values: dict[str, Any] = {
        "text_output": (wish.echo if echo else "") + delta.text,
        "output_ids": list(delta.tokens),
        "sequence_length": len(delta.tokens),
    }
    cumulative = sum(entry.logprob for entry in generation.logprobs)
    if "return_log_probs" in wish.returned:
        values["cum_log_probs"] = cumulative
        values["output_log_probs"] = [entry.logprob for entry in delta.logprobs]
    wanted = {
        "finish_reason": delta.finish_reason or "",
        "cumulative_logprob": cumulative,
        "logprobs": _logprobs(delta.logprobs),
        "num_input_tokens": generation.metrics.prompt_tokens,
        "num_output_tokens": len(delta.tokens),
        "figures": _figures(generation),
    }
    return values | {
        name: wanted[name] for flag, name in _BY_RETURN.items() if flag in wish.returned
    }


def _logprobs(entries: Sequence[TokenLogprobs]) -> str:
    """For each token an object of log-probabilities by token id."""
    return json.dumps(
        [{str(e.token): e.logprob} | {str(t): value for t, value in e.top} for e in entries]
    )


def _figures(generation: Generation) -> str:
    summary = generation.metrics.summary()
    return json.dumps({"drafting": generation.drafting, "seed": generation.seed, **summary})


def arrays(values: dict[str, Any], batched: bool) -> dict[str, NDArray[Any]]:
    """Values as tensors, with a batch dimension of 1 where there is one."""
    made = {name: _array(value, _TYPES[name]) for name, value in values.items()}
    return {name: a[np.newaxis] for name, a in made.items()} if batched else made


def _array(value: Any, dtype: str) -> NDArray[Any]:
    values = value if isinstance(value, list) else [value]
    if dtype == "STRING":
        return np.array([text.encode() for text in values], np.object_)
    return np.array(values, DTYPES[dtype])
