"""Names, types and shapes of the model's tensors: one table for config.pbtxt and for reading.

The names are those that clients of tensorrtllm_backend and vllm_backend send; all are optional.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

DTYPES: dict[str, DTypeLike] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}


@dataclass(frozen=True)
class Tensor:
    """One value, or a list of them (`many`)."""

    name: str
    dtype: str
    many: bool = False


def _tensors(dtype: str, *names: str, many: bool = False) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, dtype, many) for name in names)


INPUTS = (
    # The prompt: a question, chat messages as JSON, or token ids
    *_tensors("STRING", "text_input", "messages"),
    *_tensors("INT32", "input_ids", many=True),
    *_tensors("BOOL", "apply_chat_template"),
    # tensorrtllm_backend; its inner model has names of its own for some
    *_tensors("INT32", "input_lengths", "max_tokens", "request_output_len", "min_length"),
    *_tensors("STRING", "stop_words", "bad_words", many=True),
    *_tensors("INT32", "end_id", "pad_id", "top_k", "runtime_top_k", "beam_width"),
    *_tensors("FP32", "top_p", "runtime_top_p", "temperature", "length_penalty", "min_p"),
    *_tensors("FP32", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *_tensors("UINT64", "random_seed"),
    *_tensors("BOOL", "stream", "streaming", "return_log_probs", "exclude_input_in_output"),
    # vllm_backend
    *_tensors("STRING", "sampling_parameters"),
    *_tensors("BOOL", "return_finish_reason", "return_cumulative_logprob", "return_logprobs"),
    *_tensors("BOOL", "return_num_input_tokens", "return_num_output_tokens"),
    # Ours
    *_tensors("BOOL", "draft", "adaptive", "return_figures"),
)
OUTPUTS = (
    *_tensors("STRING", "text_output"),
    *_tensors("INT32", "output_ids", many=True),
    *_tensors("INT32", "sequence_length", "batch_index"),
    *_tensors("STRING", "finish_reason", "logprobs", "figures"),
    *_tensors("FP32", "cum_log_probs", "cumulative_logprob"),
    *_tensors("FP32", "output_log_probs", many=True),
    *_tensors("UINT32", "num_input_tokens", "num_output_tokens"),
)
