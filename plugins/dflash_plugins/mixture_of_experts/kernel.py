"""The last three launches of MixtureOfExperts: two products with packed weights, and their sum.

A program of `gate_up` and `down` handles one tile of an expert's tokens (see `routing`) and COLUMNS
rows of its matrix. It reads blocks and scales as the checkpoint stores them, 16 bytes of FP4 to a
thread and load, unpacks them in registers and multiplies. No unpacked weight reaches memory.

Bytes, for n selected experts, P = T * k pairs and sizes H and I: the minimum is
`n * 3 * H * I * 17/32` of weights and scales, `n * (2*I + H) * size` of biases, x once and y once.
Weights and scales are read once per tile: once per selected expert as long as it has at most ROWS
tokens; the tiles of an expert that has more run next to each other, and read from the L2 cache. The
excess: x is read by all programs of a tile, `P * H * size * 2*I / COLUMNS`, and so is the inner
activation, `P * I * size * H / COLUMNS`, both from L2; `P * I * size` are written and read between
the products and `P * H * 4` between `down` and `combine`. For 16 tokens of gpt-oss-120b on 51
experts: 674 MB of weights, 2.2 MB of that intermediate traffic (0.3%), and 50 MB out of L2.

Roundings: products of activations and unpacked weights are exact and summed in fp32; the inner
activation is rounded to the activations' type, and the result, once each. Against the reference in
fp32 that is 2^-8 (bf16) of the largest inner value, times the weights of `down`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from dflash_plugins.aot import KernelBuild, Signature
from dflash_plugins.mixture_of_experts import layout
from dflash_plugins.mixture_of_experts.routing import group, route


@triton.jit
def times_packed(
    x, live, blocks, scales, row, inside, K: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """x (pointers to ROWS rows of K) times rows of a packed matrix [*, K]: fp32 [ROWS, COLUMNS].

    `row` [COLUMNS] picks rows of the matrix, `live` and `inside` say which of either exist.
    """
    k = tl.arange(0, STEP)
    byte = tl.arange(0, STEP // 2)
    block = tl.arange(0, STEP // 32)
    x = x[:, None] + k[None, :]
    blocks = blocks + row[:, None] * (K // 2) + byte[None, :]
    scales = scales + row[:, None] * (K // 32) + block[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Scales are too narrow for the compiler to fetch ahead: it is done by hand, one step.
    ahead = tl.load(scales, mask=inside[:, None] & (block < K // 32)[None, :], other=0)
    for begin in range(0, K, STEP):
        scale = ahead
        rest = begin + STEP
        ahead = tl.load(
            scales + rest // 32,
            mask=inside[:, None] & (rest // 32 + block < K // 32)[None, :], other=0,
        )  # fmt: skip
        values = tl.load(x + begin, mask=live[:, None] & (begin + k < K)[None, :], other=0.0)
        packed = tl.load(
            blocks + begin // 2,
            mask=inside[:, None] & (begin // 2 + byte < K // 2)[None, :], other=0,
        )  # fmt: skip
        total = tl.dot_scaled(values, None, FORMAT, tl.trans(packed), scale, "e2m1", total)
    return total


@triton.jit
def gate_up(
    x, blocks, scales, bias, order, tile_expert, tile_first, tile_rows, tile_count, inner,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns). x [T, H]; inner [P, I], in the order of `order`."""
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        expert = tl.load(tile_expert + tile).to(tl.int64)
        first = tl.load(tile_first + tile)
        r = tl.arange(0, ROWS)
        live = r < tl.load(tile_rows + tile)
        token = tl.load(order + first + r, mask=live, other=0) // TOP_K
        row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = row < 2 * INNER
        both = times_packed(
            x + token.to(tl.int64) * HIDDEN, live, blocks + expert * (INNER * HIDDEN),
            scales + expert * (2 * INNER * (HIDDEN // 32)), row, inside,
            HIDDEN, FORMAT, ROWS, COLUMNS, STEP,
        )  # fmt: skip
        added = tl.load(bias + expert * (2 * INNER) + row, mask=inside, other=0.0)
        both += added.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(both, (ROWS, COLUMNS // 2, 2)))
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        value = gate * (1.0 / (1.0 + tl.exp(-ALPHA * gate))) * (up + 1.0)
        column = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        out = (first + r).to(tl.int64)[:, None] * INNER + column[None, :]
        mask = live[:, None] & (column < INNER)[None, :]
        tl.store(inner + out, value.to(inner.dtype.element_ty), mask=mask)


@triton.jit
def down(
    inner, blocks, scales, bias, shares, order, tile_expert, tile_first, tile_rows, tile_count,
    parts, HIDDEN: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns). parts [P, H] fp32: each pair's output times its share."""
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        expert = tl.load(tile_expert + tile).to(tl.int64)
        first = tl.load(tile_first + tile)
        r = tl.arange(0, ROWS)
        live = r < tl.load(tile_rows + tile)
        row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = row < HIDDEN
        out = times_packed(
            inner + (first + r).to(tl.int64) * INNER, live,
            blocks + expert * (HIDDEN * (INNER // 2)), scales + expert * (HIDDEN * (INNER // 32)),
            row, inside, INNER, FORMAT, ROWS, COLUMNS, STEP,
        )  # fmt: skip
        added = tl.load(bias + expert * HIDDEN + row, mask=inside, other=0.0)
        out += added.to(tl.float32)[None, :]
        pair = tl.load(order + first + r, mask=live, other=0)
        out *= tl.load(shares + pair, mask=live, other=0.0)[:, None]
        place = pair.to(tl.int64)[:, None] * HIDDEN + row[None, :]
        tl.store(parts + place, out, mask=live[:, None] & inside[None, :])


@triton.jit
def combine(parts, y, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (token, columns). The sum of a token's parts, in order of falling logits; y [T, H]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(TOP_K):
        part = parts + (token * TOP_K + i) * HIDDEN + column
        total += tl.load(part, mask=inside, other=0.0)
    tl.store(y + token * HIDDEN + column, total.to(y.dtype.element_ty), mask=inside)


FUNCTIONS = {"route": route, "group": group, "gate_up": gate_up, "down": down, "combine": combine}
# Three steps of weights are on their way while one is multiplied.
WARPS = {"route": 8, "group": 8, "gate_up": 4, "down": 4, "combine": 4}
STAGES = 4
FORMATS = {"BF16": "bf16", "HALF": "fp16"}


def constants(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Compile-time sizes of each kernel."""
    padded = triton.next_power_of_2(settings["experts"])
    sizes = {"HIDDEN": settings["hidden"], "INNER": settings["inner"]}
    product = {
        **sizes, "FORMAT": FORMATS[settings["dtype"]], "ROWS": settings["rows"],
        "COLUMNS": layout.COLUMNS, "STEP": layout.STEP,
    }  # fmt: skip
    top_k = {"TOP_K": settings["top_k"]}
    swiglu = {"ALPHA": settings["alpha"], "LIMIT": settings["limit"]}
    return {
        "route": {"EXPERTS": settings["experts"], "EXPERTS_PAD": padded, **top_k},
        "group": {"EXPERTS_PAD": padded, "ROWS": settings["rows"], "STEP": layout.PAIR_STEP},
        "gate_up": {**product, **top_k, **swiglu},
        "down": product,
        "combine": {"HIDDEN": settings["hidden"], **top_k, "COLUMNS": layout.SUM_COLUMNS},
    }


def builds(
    settings: Mapping[str, Any], signatures: Mapping[str, Signature]
) -> tuple[KernelBuild, ...]:
    """What to compile, given the types of the run-time arguments."""
    fixed = constants(settings)
    return tuple(
        KernelBuild(name, FUNCTIONS[name], signature, fixed[name], WARPS[name], STAGES)
        for name, signature in signatures.items()
    )


def launch_experts(given: Mapping[str, Any], field: Mapping[str, Any], **settings: Any) -> None:
    """Checks and launches all kernels on torch tensors.

    `given`: inputs of the op by name and `y`; `field`: the workspace as in `layout.fields`.
    """
    batch, size, hidden = given["x"].shape
    experts, rows, inner = settings["experts"], 2 * settings["inner"], settings["inner"]
    shapes = {
        "x": (batch, size, settings["hidden"]),
        "router_logits": (batch, size, experts),
        "gate_up_blocks": (experts, rows, hidden // 2),
        "gate_up_scales": (experts, rows, hidden // 32),
        "gate_up_bias": (experts, rows),
        "down_blocks": (experts, hidden, inner // 2),
        "down_scales": (experts, hidden, inner // 32),
        "down_bias": (experts, hidden),
        "y": (batch, size, hidden),
    }
    wanted = {name: shape for name, (_, shape) in layout.fields(settings, batch * size).items()}
    for name, shape in {**shapes, **wanted}.items():
        tensor = given[name] if name in given else field[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, {shape} is needed")
    fixed, grids = constants(settings), layout.grids(settings, batch * size)
    pairs = batch * size * settings["top_k"]
    for name, values in layout.arguments(given, field, pairs).items():
        FUNCTIONS[name][grids[name]](*values, **fixed[name])
