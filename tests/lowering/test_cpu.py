"""The CPU lowering against the source graph it was made from, run unlowered."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines.build import BuildOptions, Sources, source_graphs
from dflash_trt.engines.directory import multiplies_bytes
from dflash_trt.lowering.cpu import lower
from dflash_trt.models.graph import SourceGraph
from dflash_trt.quantization.integers import BLOCKS4, BLOCKS8, COLUMNS8, IntegerForm
from tests import tiny

Pair = tuple[TargetCheckpoint, DrafterCheckpoint]
OPTIONS = BuildOptions("tiny", block=8, max_seq_len=48)
CAPACITY = 56


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """All outputs; weights are given as inputs where the model has them as inputs."""
    wired = onnx.ModelProto()
    wired.CopyFrom(model)
    inputs = {i.name for i in model.graph.input}
    used = {name for node in model.graph.node for name in node.input}
    for name in (used & weights.keys()) - inputs:
        wired.graph.initializer.append(onnx.numpy_helper.from_array(weights[name], name))
    s = session(wired)
    wanted = {i.name for i in s.get_inputs()}
    names = [o.name for o in s.get_outputs()]
    fed = {k: v for k, v in {**weights, **feeds}.items() if k in wanted}
    return dict(zip(names, s.run(names, fed), strict=True))


def caches(graph: SourceGraph, seed: int, filled: int) -> dict[str, np.ndarray]:
    """Random caches, NaN behind the `filled` rows."""
    random = np.random.default_rng(seed)
    found = {}
    for value in graph.model.graph.input:
        if "_cache." in value.name:
            shape = (1, tiny.KV_HEADS, CAPACITY, tiny.HEAD_DIM)
            found[value.name] = random.standard_normal(shape).astype(np.float32)
            found[value.name][:, :, filled:] = np.nan
    return found


def loaded(sources: Sources) -> dict[str, np.ndarray]:
    return {name: sources.loader.load(w) for name, w in sources.weights.items()}


def target_feeds(graph: SourceGraph, rows: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(rows).integers(0, tiny.VOCAB, (1, rows))
    return {
        "tokens": tokens,
        "lengths": np.array([length], np.int32),
        "rows": np.arange(rows)[None],
        **caches(graph, 0, length),
    }


def drafter_feeds(graph: SourceGraph, slots: int, context: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(slots)
    features = random.standard_normal((1, 8, len(tiny.TAPS) * tiny.HIDDEN)).astype(np.float32)
    accepted = 3
    return {
        "features": features,
        "accepted": np.array([accepted], np.int32),
        "context": np.array([context], np.int32),
        "anchor": np.array([7]),
        "masks": np.full((1, slots), tiny.MASK_ID),
        **caches(graph, 1, context - accepted),
    }


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], filled: int) -> None:
    """Equal outputs; caches are compared where they are specified."""
    assert a.keys() == b.keys()
    for name, mine in a.items():
        theirs = b[name]
        if name.endswith(".out"):
            mine, theirs = mine[:, :, :filled], theirs[:, :, :filled]
        if mine.dtype == np.float32:
            np.testing.assert_allclose(mine, theirs, atol=2e-4, err_msg=name)
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("length", [0, 1, 33])
def test_target(tiny_checkpoints: Pair, rows: int, length: int) -> None:
    sources = source_graphs(*tiny_checkpoints, OPTIONS)
    lowered, fired = lower(sources.target, {})
    weights = loaded(sources)
    feeds = target_feeds(sources.target, rows, length)
    source = run(sources.target.model, feeds, weights)
    assert_same(run(lowered, feeds, weights), source, length + rows)
    layers = tiny.LAYERS
    assert fired == {"RMSNormalization": 2 * layers + 1, "CachedAttention": layers, "Swish": layers}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("slots", [0, 1, 4, 7])
@pytest.mark.parametrize("context", [3, 30])
def test_drafter(tiny_checkpoints: Pair, passes: int, slots: int, context: int) -> None:
    if passes == 2 and slots < 2:
        passes = 1  # nothing to settle in a first pass
    options = BuildOptions("tiny", block=8, max_seq_len=48, passes=passes)
    sources = source_graphs(*tiny_checkpoints, options)
    lowered, fired = lower(sources.drafter, {})
    weights = loaded(sources)
    feeds = drafter_feeds(sources.drafter, slots, context)
    source = run(sources.drafter.model, feeds, weights)
    assert_same(run(lowered, feeds, weights), source, context)
    assert fired["KVInjection"] == 1
    assert fired["BlockAttention"] == 2 * passes
    assert fired["ConfidenceCommit"] == 1


def test_windowed_drafter_layers_keep_their_reference(tiny_checkpoints: Pair, tmp_path) -> None:
    from dflash_trt.checkpoints import open_drafter

    folder = tiny.tiny_drafter(
        tmp_path / "windowed",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
    )
    sources = source_graphs(tiny_checkpoints[0], open_drafter(folder), OPTIONS)
    lowered, fired = lower(sources.drafter, {})
    weights = loaded(sources)
    feeds = drafter_feeds(sources.drafter, 7, 30)
    assert_same(run(lowered, feeds, weights), run(sources.drafter.model, feeds, weights), 30)
    assert fired["BlockAttention"] == 1


@pytest.mark.parametrize(("form", "agreement"), [(BLOCKS8, 0.05), (BLOCKS4, 0.6), (COLUMNS8, 0.05)])
def test_integers_stay_near_fp32(
    tiny_checkpoints: Pair, form: IntegerForm, agreement: float
) -> None:
    """Logits with integer weights differ from fp32 by rounding, not by a wrong layout."""
    if form is COLUMNS8 and not multiplies_bytes():
        pytest.skip("this CPU adds products of bytes in 16 bits")
    sources = source_graphs(*tiny_checkpoints, OPTIONS)
    weights = loaded(sources)
    lowered, fired = lower(sources.target, {"projection": form, "lm_head": form})
    assert fired["MatMul"] == 4 * tiny.LAYERS + 1
    stored = {
        label: array
        for name, w in sources.weights.items()
        if w.kind in ("projection", "lm_head")
        for label, array in form.arrays(name, weights[name]).items()
    }
    feeds = target_feeds(sources.target, 8, 20)
    exact = run(sources.target.model, feeds, weights)["logits"]
    rounded = run(lowered, feeds, {**weights, **stored})["logits"]
    assert np.abs(exact - rounded).mean() / exact.std() < agreement
