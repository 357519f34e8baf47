"""SpeculativeVerify: how much of a block the target agrees with, and its own next token (greedy).

    logits [B, W, V]     the target's logits after the tokens in `rows`
    tokens [B, S] int64  the block as it was run: committed tokens first, drafts behind
    rows [B, W] int64    consecutive positions in the block; the tokens up to and including rows[b, 0]
                         are committed already (decode: 0, 1 .. S-1; prefill: the last position only)
    lengths [B] int32    cached tokens before this call

Returns
    accepted [B] int32   rows of the block that are committed now, rows[b, 0] + 1 .. rows[b, W-1] + 1
    anchor [B] int64     the target's own token behind the last accepted row (bonus token)
    context [B] int32    cached tokens after this call, lengths + accepted

A draft at rows[b, j] is accepted when it is the arg max of the row before it and all drafts before
it are accepted. Equal logits: the lower token id wins.
"""

from onnxscript import script

from dflash_trt.ops.domain import DFLASH, OPSET

op = OPSET


@script(DFLASH, default_opset=OPSET)
def AcceptGreedy(greedy, tokens, rows, lengths):
    """SpeculativeVerify behind the arg max: greedy [B, W] int64 is the target's token of each row."""
    one = op.Constant(value_ints=[1])
    width = op.Shape(rows, start=1, end=2)
    drafted = op.Slice(op.GatherElements(tokens, rows, axis=1), one, width, one)
    predicted = op.Slice(greedy, [0], width - one, one)
    misses = op.CumSum(
        op.Cast(op.Not(op.Equal(drafted, predicted)), to=7), op.Constant(value_int=1)
    )
    agreed = op.ReduceSum(op.Cast(op.Equal(misses, [0]), to=7), one, keepdims=1)  # [B, 1]
    anchor = op.Squeeze(op.GatherElements(greedy, agreed, axis=1), one)
    first = op.Slice(rows, [0], one, one)
    accepted = op.Cast(op.Squeeze(first + one + agreed, one), to=6)
    return accepted, anchor, lengths + accepted


@script(DFLASH, default_opset=OPSET)
def SpeculativeVerify(logits, tokens, rows, lengths):
    greedy = op.ArgMax(logits, axis=-1, keepdims=0)
    accepted, anchor, context = DFLASH.AcceptGreedy(greedy, tokens, rows, lengths)
    return accepted, anchor, context
