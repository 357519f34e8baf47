"""ConfidenceCommit: one refinement pass of the drafter decides which slots are settled.

    logits [B, M, V]        drafted slots only; the anchor's slot is not among them
    drafts [B, M] int64     tokens so far, the mask id where a slot is open
    committed [B, M] bool   slots settled by earlier passes
    share [1] int64         how many slots to settle in this pass

Returns (drafts, committed). The confidence of a slot is the probability of its most likely token;
the `share` most confident open slots take their most likely token, the lower slot first among
equals. `final=1` marks the last pass, where `share` is M: every open slot takes its most likely
token and confidence plays no part.
"""

from onnxscript import script

from dflash_trt.ops.domain import DFLASH, OPSET

op = OPSET


@script(DFLASH, default_opset=OPSET)
def ConfidenceCommit(logits, drafts, committed, share, final: int):
    best = op.ArgMax(logits, axis=-1, keepdims=0)
    log_confidence = op.ReduceMax(logits, [-1], keepdims=0) - op.ReduceLogSumExp(
        logits, [-1], keepdims=0
    )
    settled = op.CastLike(op.Constant(value_float=float("-inf")), log_confidence)
    ranked = op.Where(committed, settled, log_confidence)
    _, chosen = op.TopK(
        ranked, share, axis=-1, largest=1, sorted=1
    )  # equal values: lower index first
    flags = op.ScatterElements(
        op.Cast(committed, to=6), chosen, op.Expand(op.Cast([1], to=6), op.Shape(chosen)), axis=1
    )
    taken = op.And(op.Cast(flags, to=9), op.Not(committed))
    every = op.Constant(value_int=final) == op.Constant(value_int=1)
    taken = op.Or(taken, op.And(every, op.Not(committed)))
    return op.Where(taken, best, drafts), op.Or(committed, taken)
