"""The op domain `dflash`: each op is an ONNX local function, and that function is its definition.

Lowerings and kernels are tested against these functions. `library()` returns all functions that a
graph needs; ONNX Runtime runs a graph with them as it is.
"""

import onnx

from dflash_trt.ops import (
    attention,
    collectives,
    confidence_commit,
    kv_injection,
    mixture_of_experts,
    speculative_verify,
)
from dflash_trt.ops.domain import DOMAIN, OPSET_IMPORTS, OPSET_VERSION, VERSION, with_domain_import

__all__ = ["DOMAIN", "OPSET_IMPORTS", "OPSET_VERSION", "VERSION", "library"]

_ATTENTION = (
    attention.RotateHeads,
    attention.SplitHeads,
    attention.Attend,
    attention.CachedAttention,
    attention.BlockAttention,
)
_OTHERS = (
    kv_injection.InjectLayer,
    confidence_commit.ConfidenceCommit,
    speculative_verify.AcceptGreedy,
    speculative_verify.SpeculativeVerify,
    collectives.BestOfShard,
    collectives.VerifyShards,
    mixture_of_experts.DecodeMXFP4,
    mixture_of_experts.ExpertMLP,
    mixture_of_experts.MixtureOfExperts,
)


def library(draft_layers: int = 0) -> list[onnx.FunctionProto]:
    """All local functions of the domain; `KVInjection` only where there are draft layers."""
    functions = [f.to_function_proto() for f in (*_ATTENTION, *_OTHERS)]
    if draft_layers:
        functions.append(kv_injection.kv_injection(draft_layers))
    return [with_domain_import(f) for f in functions]
