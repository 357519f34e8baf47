"""Every kernel in the interpreter against the reference function of its op."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.reference import run_op

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install 'dflash-trt[tensorrt-rtx]'")

from dflash_plugins.confidence_commit.kernel import launch_settle  # noqa: E402
from dflash_plugins.kv_injection.kernel import (  # noqa: E402
    block_constants,
    launch_injection,
    write_rows,
)
from dflash_plugins.speculative_verify.kernel import launch_accept  # noqa: E402
from dflash_plugins.vocabulary.kernel import launch_best_of_tile, tiles  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
POISON = 1e30
FEW = settings(max_examples=25, deadline=None)


def rounded(array: np.ndarray, dtype) -> tuple:
    """(torch tensor of `dtype`, the same values as fp32 numpy)."""
    tensor = torch.from_numpy(array.astype(np.float32)).to(dtype)
    return tensor, tensor.float().numpy().copy()


def tile_results(logits):
    """The three fields of the first launch for logits [rows, V], poisoned before."""
    shape = (logits.shape[0], tiles(logits.shape[1]))
    best, total = (torch.full(shape, POISON) for _ in range(2))
    index = torch.full(shape, -7, dtype=torch.int32)
    launch_best_of_tile(logits, best, index, total)
    return best, index, total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 97, 4096, 4097, 9001])
def test_tiles_put_together_give_argmax_and_log_sum_exp(dtype, vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits, plain = rounded(rng.normal(0, 4, (3, vocabulary)), dtype)
    best, index, total = tile_results(logits)
    rows = best.argmax(dim=1)
    assert (index[torch.arange(3), rows].numpy() == plain.argmax(1)).all()
    top = best.max(dim=1, keepdim=True).values
    summed = (total * torch.exp(best - top)).sum(1)
    wanted = np.exp(plain - plain.max(1, keepdims=True)).sum(1, dtype=np.float64)
    np.testing.assert_allclose(summed.numpy(), wanted, rtol=1e-5)


def test_a_tile_of_minus_infinity_is_no_nan():
    logits = torch.full((1, 4097), -float("inf"))
    logits[0, 4096] = 1.0
    best, index, total = tile_results(logits)
    assert not torch.isnan(total).any()
    assert index[0, 1] == 4096
    assert best[0, 0] == -float("inf")


@FEW
@given(
    seed=st.integers(0, 10**6), batch=st.integers(1, 4), width=st.integers(1, 9),
    extra=st.integers(0, 3), vocabulary=st.sampled_from([5, 33, 4100]),
    agree=st.integers(0, 9), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_speculative_verify(seed, batch, width, extra, vocabulary, agree, dtype):
    rng = np.random.default_rng(seed)
    # Few values, so that equal logits are common and the lower id has to win.
    logits, plain = rounded(rng.integers(0, 6, (batch, width, vocabulary)), dtype)
    size = width + extra
    tokens = rng.integers(0, vocabulary, (batch, size))
    first = rng.integers(0, extra + 1, batch)
    rows = first[:, None] + np.arange(width)[None]
    greedy = plain.argmax(-1)
    for b in range(batch):
        for j in range(min(agree, width - 1)):
            tokens[b, rows[b, j + 1]] = greedy[b, j]
    lengths = rng.integers(0, 50, batch).astype(np.int32)
    wanted = run_op(
        "SpeculativeVerify",
        {"logits": plain, "tokens": tokens, "rows": rows, "lengths": lengths},
        {"accepted": np.int32, "anchor": np.int64, "context": np.int32},
    )
    best, index, _ = tile_results(logits.reshape(batch * width, vocabulary))
    accepted, context = (torch.full((batch,), -9, dtype=torch.int32) for _ in range(2))
    anchor = torch.full((batch,), -9)
    launch_accept(
        best, index, torch.from_numpy(tokens), torch.from_numpy(rows), torch.from_numpy(lengths),
        accepted, anchor, context,
    )  # fmt: skip
    for found, expected in zip((accepted, anchor, context), wanted, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)


@FEW
@given(
    seed=st.integers(0, 10**6), batch=st.integers(1, 3), slots=st.integers(1, 9),
    vocabulary=st.sampled_from([7, 40, 4100]), share=st.integers(0, 9), final=st.booleans(),
    settled=st.floats(0, 1), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_confidence_commit(seed, batch, slots, vocabulary, share, final, settled, dtype):
    rng = np.random.default_rng(seed)
    logits, plain = rounded(rng.normal(0, 3, (batch, slots, vocabulary)), dtype)
    drafts = rng.integers(0, vocabulary, (batch, slots))
    committed = rng.random((batch, slots)) < settled
    count = np.array([min(share, slots)], np.int64)
    wanted = run_op(
        "ConfidenceCommit",
        {"logits": plain, "drafts": drafts, "committed": committed, "share": count},
        {"new_drafts": np.int64, "new_committed": np.bool_},
        final=int(final),
    )
    best, index, total = tile_results(logits.reshape(batch * slots, vocabulary))
    new_drafts = torch.full((batch, slots), -9)
    new_committed = torch.full((batch, slots), 9, dtype=torch.int8)
    launch_settle(
        best, index, total, torch.from_numpy(drafts), torch.from_numpy(committed).to(torch.int8),
        torch.from_numpy(count), new_drafts, new_committed, final,
    )  # fmt: skip
    np.testing.assert_array_equal(new_committed.numpy() != 0, wanted[1])
    np.testing.assert_array_equal(new_drafts.numpy(), wanted[0])


def test_equal_confidences_settle_the_lower_slots():
    logits = torch.zeros(1, 4, 16)
    logits[..., 3] = 2.0
    new_drafts = torch.zeros(1, 4, dtype=torch.int64)
    flags = torch.zeros(1, 4, dtype=torch.int8)
    launch_settle(
        *tile_results(logits[0]), torch.full((1, 4), 9), torch.zeros(1, 4, dtype=torch.int8),
        torch.tensor([2]), new_drafts, flags, False,
    )  # fmt: skip
    assert flags.tolist() == [[1, 1, 0, 0]]
    assert new_drafts.tolist() == [[3, 3, 9, 9]]


def injection_case(rng, dtype, batch, rows, layers, heads, dim, capacity):
    """(numpy inputs of the op, torch inputs, caches before as torch) with values of `dtype`."""
    sizes = {
        "kv": (batch, rows, layers * 2 * heads * dim), "k_norm": (layers, dim),
        "cos": (capacity, dim // 2), "sin": (capacity, dim // 2),
    }  # fmt: skip
    pairs = {name: rounded(rng.normal(0, 1, shape), dtype) for name, shape in sizes.items()}
    lengths = rng.integers(0, capacity - rows + 1, batch).astype(np.int32)
    caches = {
        f"{kind}_cache.{i}": rounded(rng.normal(0, 1, (batch, heads, capacity, dim)), dtype)
        for i in range(layers)
        for kind in "kv"
    }
    plain = {name: pair[1] for name, pair in pairs.items()}
    op_inputs = {
        "kv": plain["kv"], "k_norm": plain["k_norm"], "lengths": lengths, "cos": plain["cos"],
        "sin": plain["sin"], **{name: pair[1] for name, pair in caches.items()},
    }  # fmt: skip
    tensors = {name: pair[0] for name, pair in {**pairs, **caches}.items()}
    return op_inputs, {**tensors, "lengths": torch.from_numpy(lengths)}


@FEW
@given(
    seed=st.integers(0, 10**6), batch=st.integers(1, 3), rows=st.integers(1, 5),
    layers=st.integers(1, 3), heads=st.integers(1, 4), dim=st.sampled_from([4, 12, 64]),
    spare=st.integers(0, 20), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_kv_injection(seed, batch, rows, layers, heads, dim, spare, dtype):
    """Caches equal the op's, and what lies outside the new rows is bit for bit what it was."""
    rng = np.random.default_rng(seed)
    capacity = rows + spare
    inputs, tensors = injection_case(rng, dtype, batch, rows, layers, heads, dim, capacity)
    names = [name for name in inputs if "_cache" in name]
    wanted = run_op(
        "KVInjection", inputs, {f"{name}.out": np.float32 for name in names},
        kv_heads=heads, epsilon=1e-5,
    )  # fmt: skip
    done = torch.full((batch,), 77, dtype=torch.int32)
    launch_injection(
        tensors["kv"], tensors["k_norm"], tensors["lengths"], tensors["cos"], tensors["sin"],
        [tensors[n] for n in names[0::2]], [tensors[n] for n in names[1::2]], done, 1e-5,
    )  # fmt: skip
    assert done.tolist() == [0] * batch
    # bf16: the kernel rounds after the norm, after its weight and after the rotation; 2^-8 each.
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.05}
    )
    for name, expected in zip(names, wanted, strict=True):
        found = tensors[name].float().numpy()
        np.testing.assert_allclose(found, expected, **tolerance)
        for b, start in enumerate(inputs["lengths"]):
            outside = np.delete(np.arange(capacity), np.arange(start, start + rows))
            np.testing.assert_array_equal(found[b][:, outside], inputs[name][b][:, outside])


def test_rows_beyond_the_capacity_are_not_written():
    """A padded chunk at the end of a cache must not reach the next head or sequence."""
    rng = np.random.default_rng(3)
    inputs, tensors = injection_case(rng, torch.float32, 2, 4, 1, 2, 8, 6)
    tensors["lengths"][:] = 5
    done = torch.zeros(2, dtype=torch.int32)
    launch_injection(
        tensors["kv"], tensors["k_norm"], tensors["lengths"], tensors["cos"], tensors["sin"],
        [tensors["k_cache.0"]], [tensors["v_cache.0"]], done, 1e-5,
    )  # fmt: skip
    for name in ("k_cache.0", "v_cache.0"):
        np.testing.assert_array_equal(tensors[name][:, :, :5].numpy(), inputs[name][:, :, :5])
        assert (tensors[name][:, :, 5].numpy() != inputs[name][:, :, 5]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_write_rotates_and_places_one_layer(dtype):
    """The plugin BlockWrite is the same kernel without the norm; reference: RotateHeads."""
    rng = np.random.default_rng(0)
    batch, rows, heads, dim, capacity = 2, 5, 3, 8, 11
    k, k_plain = rounded(rng.normal(0, 1, (batch, rows, heads * dim)), dtype)
    v, v_plain = rounded(rng.normal(0, 1, (batch, rows, heads * dim)), dtype)
    cos, cos_plain = rounded(rng.normal(0, 1, (capacity, dim // 2)), dtype)
    sin, sin_plain = rounded(rng.normal(0, 1, (capacity, dim // 2)), dtype)
    lengths = np.array([0, 6], np.int32)
    (rotated,) = run_op(
        "RotateHeads", {"x": k_plain, "lengths": lengths, "cos": cos_plain, "sin": sin_plain},
        {"out": np.float32}, heads=heads,
    )  # fmt: skip
    caches = [torch.full((batch, heads, capacity, dim), 7.0, dtype=dtype) for _ in range(2)]
    done = torch.ones(batch, dtype=torch.int32)
    write_rows[(batch * rows, 1)](
        k, v, k, torch.from_numpy(lengths), cos, sin, (caches[0],), (caches[1],), done, rows,
        **block_constants(heads, dim, capacity, dim),
    )  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    values = v_plain.reshape(batch, rows, heads, dim).transpose(0, 2, 1, 3)
    for b, start in enumerate(lengths):
        place = slice(start, start + rows)
        found = caches[0][b, :, place].float().numpy()
        np.testing.assert_allclose(found, rotated[b], atol=tolerance * 4, rtol=tolerance)
        np.testing.assert_array_equal(caches[1][b, :, place].float().numpy(), values[b])


@pytest.mark.parametrize(
    ("launch", "arguments", "what"),
    [
        (launch_best_of_tile, lambda: (torch.zeros(2, 9), *[torch.zeros(2, 2)] * 3), "best"),
        (
            launch_accept,
            lambda: (*[torch.zeros(3, 1)] * 2, torch.zeros(2, 4), torch.zeros(2, 4), *[torch.zeros(2)] * 4),
            "rows of tiles",
        ),
        (
            launch_injection,
            lambda: (torch.zeros(1, 2, 8), None, torch.zeros(1), torch.zeros(9, 2), None,
                     [torch.zeros(1, 2, 4, 4)], [None], None, 1e-5),
            "columns",
        ),
    ],
)  # fmt: skip
def test_launchers_name_what_does_not_fit(launch, arguments, what):
    with pytest.raises(ValueError, match=what):
        launch(*arguments())
