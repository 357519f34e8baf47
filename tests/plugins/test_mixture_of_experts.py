"""The five kernels of MixtureOfExperts in the interpreter against the op's reference function."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.reference import run_op

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install 'dflash-trt[tensorrt-rtx]'")

from dflash_plugins.mixture_of_experts import layout  # noqa: E402
from dflash_plugins.mixture_of_experts.kernel import constants, launch_experts  # noqa: E402
from dflash_plugins.mixture_of_experts.plugin import INPUTS  # noqa: E402
from dflash_plugins.mixture_of_experts.routing import group, route  # noqa: E402

ALPHA, LIMIT = 1.702, 7.0
TYPES = {
    "BF16": torch.bfloat16,
    "HALF": torch.float16,
    "FLOAT": torch.float32,
    "INT32": torch.int32,
}
# Of the largest result: it is rounded once and the inner activation is, and the interpreter rounds
# towards zero (measured: 0.0095 and 0.0006).
TOLERANCE = {"BF16": 3 * 2**-8, "HALF": 2**-10}
POISON = 1e30


def case(seed, batch, size, hidden, inner, experts, router=None):
    """Inputs of the op by name; `router` [B, S, E] stands for random logits."""
    rng = np.random.default_rng(seed)
    given = {
        "x": rng.normal(0, 2, (batch, size, hidden)),
        "router_logits": rng.normal(0, 1, (batch, size, experts)) if router is None else router,
    }
    for name, rows, width in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        given[f"{name}_blocks"] = rng.integers(0, 256, (experts, rows, width // 2), np.uint8)
        given[f"{name}_scales"] = rng.integers(120, 126, (experts, rows, width // 32), np.uint8)
        given[f"{name}_bias"] = rng.normal(0, 1, (experts, rows))
    return given


def tensors(given, dtype):
    """(as torch tensors of `dtype`, the same values for the reference): bytes stay bytes."""
    made, plain = {}, {}
    for name, array in given.items():
        if array.dtype == np.uint8:
            made[name], plain[name] = torch.from_numpy(array.copy()), array
        else:
            made[name] = torch.from_numpy(array.astype(np.float32)).to(TYPES[dtype])
            plain[name] = made[name].float().numpy().copy()
    return made, plain


def workspace(own, tokens):
    """Every field, filled with what must never be read before it is written."""
    return {
        name: torch.full(shape, -(2**30) if dtype == "INT32" else POISON).to(TYPES[dtype])
        for name, (dtype, shape) in layout.fields(own, tokens).items()
    }


def check(given, dtype, top_k, rows):
    """Run all launches over poisoned buffers and compare; returns the workspace."""
    made, plain = tensors(given, dtype)
    batch, size, hidden = plain["x"].shape
    own = {
        "dtype": dtype, "hidden": hidden, "inner": plain["gate_up_bias"].shape[1] // 2,
        "experts": plain["router_logits"].shape[-1], "top_k": top_k, "alpha": ALPHA,
        "limit": LIMIT, "rows": rows,
    }  # fmt: skip
    (wanted,) = run_op(
        "MixtureOfExperts", plain, {"y": np.float32}, top_k=top_k, alpha=ALPHA, limit=LIMIT
    )
    made["y"] = torch.full((batch, size, hidden), float("nan"), dtype=TYPES[dtype])
    field = workspace(own, batch * size)
    launch_experts(made, field, **own)
    bound = TOLERANCE[dtype] * np.abs(wanted).max()
    np.testing.assert_allclose(made["y"].float().numpy(), wanted, atol=bound, rtol=0)
    return field


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6), batch=st.integers(1, 3), size=st.integers(1, 9),
    hidden=st.sampled_from([32, 96, 160]), inner=st.sampled_from([32, 64, 224]),
    experts=st.sampled_from([3, 8, 13]), top_k=st.integers(1, 3),
    dtype=st.sampled_from(["BF16", "HALF"]), rows=st.sampled_from([16, 32]),
)  # fmt: skip
def test_random_shapes(seed, batch, size, hidden, inner, experts, top_k, dtype, rows):
    """Sizes that are no multiple of a program's columns, more experts than tokens and fewer."""
    check(case(seed, batch, size, hidden, inner, experts), dtype, top_k, rows)


def test_all_tokens_on_one_expert():
    """Forty tokens make three tiles of one expert; weights of the others are NaN and not read."""
    router = np.full((2, 20, 5), -1.0)
    router[..., 3] = 2.0
    given = case(1, 2, 20, 64, 32, 5, router)
    for name in ("gate_up_scales", "down_scales"):
        given[name][[0, 1, 2, 4]] = 255
    field = check(given, "BF16", top_k=1, rows=16)
    assert field["tile_count"].tolist() == [3]
    assert field["tile_rows"][:3].tolist() == [16, 16, 8]
    assert field["order"].tolist() == list(range(40))


def test_experts_without_tokens_have_no_tile():
    """One token, four experts of a hundred: four programs with work, whatever the grid."""
    given = case(2, 1, 1, 32, 32, 100)
    field = check(given, "HALF", top_k=4, rows=16)
    assert field["tile_count"].tolist() == [4]
    best = np.argsort(-given["router_logits"].astype(np.float16), kind="stable")[0, 0, :4]
    assert field["chosen"].tolist() == best.tolist()
    assert field["tile_expert"][:4].tolist() == sorted(best.tolist())
    assert layout.most_tiles(4, 100, 16) == 4


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6), tokens=st.integers(1, 150), experts=st.integers(2, 40),
    top_k=st.integers(1, 4), spread=st.sampled_from([0, 1, 30]), rows=st.sampled_from([16, 32]),
)  # fmt: skip
def test_grouping(seed, tokens, experts, top_k, spread, rows):
    """Every pair once, sorted by expert and then by token, in tiles that fit in the grid. Few values
    (spread 1: many equal logits, 0: only those) and one expert that nearly all tokens want."""
    top_k = min(top_k, experts)
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, spread + 1, (tokens, experts)).astype(np.float32)
    logits[:, seed % experts] += rng.random(tokens) < 0.8
    own = {
        "dtype": "BF16", "hidden": 32, "inner": 32, "experts": experts, "top_k": top_k,
        "alpha": ALPHA, "limit": LIMIT, "rows": rows,
    }  # fmt: skip
    field, fixed, grids = workspace(own, tokens), constants(own), layout.grids(own, tokens)
    given = dict.fromkeys((*INPUTS, "y")) | {"router_logits": torch.from_numpy(logits)}
    taken = layout.arguments(given, field, tokens * top_k)
    route[grids["route"]](*taken["route"], **fixed["route"])
    group[grids["group"]](*taken["group"], **fixed["group"])
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(field["chosen"].numpy().reshape(tokens, top_k), chosen)
    powers = np.exp(np.take_along_axis(logits, chosen, 1) - logits.max(1, keepdims=True))
    shares = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(field["shares"].numpy().reshape(tokens, top_k), shares, rtol=1e-6)
    order = np.argsort(chosen.reshape(-1), kind="stable")
    np.testing.assert_array_equal(field["order"].numpy(), order)
    count = int(field["tile_count"])
    assert count <= grids["gate_up"][0]
    covered = []
    for i in range(count):
        first, size = int(field["tile_first"][i]), int(field["tile_rows"][i])
        assert 0 < size <= rows
        covered += range(first, first + size)
        assert (
            chosen.reshape(-1)[order[first : first + size]] == int(field["tile_expert"][i])
        ).all()
    assert covered == list(range(tokens * top_k))


def test_tiles_are_as_high_as_an_expert_has_tokens():
    """gpt-oss-120b: blocks of 16 for up to 32 sequences; more tokens take higher tiles."""
    assert layout.tile_rows(16, 4, 128) == 16
    assert layout.tile_rows(512, 4, 128) == 16
    assert layout.tile_rows(1024, 4, 128) == 32


def test_the_launcher_names_what_does_not_fit():
    given, _ = tensors(case(0, 1, 2, 32, 32, 4), "BF16")
    given["y"] = torch.zeros(1, 2, 32)
    own = {
        "dtype": "BF16", "hidden": 32, "inner": 64, "experts": 4, "top_k": 2, "alpha": ALPHA,
        "limit": LIMIT, "rows": 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"gate_up_blocks is \(4, 64, 16\), \(4, 128, 16\)"):
        launch_experts(given, workspace(own, 2), **own)
