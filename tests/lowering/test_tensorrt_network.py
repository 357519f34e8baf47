"""The TensorRT network, read back and run in numpy, against its source graph in ONNX Runtime."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from dflash_trt.config import DrafterConfig, Experts, Rope, TargetConfig
from dflash_trt.engines.tensorrt_build import library_folder
from dflash_trt.engines.tensorrt_weights import encode, make_parts
from dflash_trt.lowering.tensorrt.plan import Binding, PlanRequest
from dflash_trt.models import gpt_oss, registry
from dflash_trt.models.dflash import drafter_graph
from dflash_trt.models.graph import SourceGraph
from dflash_trt.models.llama import target_graph
from dflash_trt.ops.collectives import join
from dflash_trt.quantization import nvfp4
from dflash_trt.quantization.simulated import simulated

pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")

CAPACITY = 24
ROPE = Rope(10000.0)
TARGET = TargetConfig(
    "llama", 97, 64, 96, 3, 4, 2, 16, 1e-5, ROPE, 64, False, qk_norm=True, windows=(0, 5, 0)
)
DRAFTER = DrafterConfig(
    97, 64, 96, 2, 4, 2, 16, 1e-5, ROPE, 64, 4, 96, (0, 2), 3, windows=(0, 6), window_causal=True
)


def random_values(source, rng):
    """Weights of every kind for a source graph, fp32; a map chooses rising ids of the target."""
    values = {}
    for w in source.weights:
        if w.kind == "token_map":
            ids = np.sort(rng.choice(TARGET.vocab_size, w.shape[0], replace=False))
            values[w.name] = ids - np.arange(w.shape[0])
            continue
        scale = 1.0 if w.kind in ("norm", "embedding") or w.kind.startswith("rope") else 0.15
        values[w.name] = rng.normal(0, scale, w.shape).astype(np.float32)
    return values


def caches(source, rng, lengths):
    """Caches with poison behind each sequence's length."""
    found = {}
    for value in source.model.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if len(dims) == 4:
            cache = rng.normal(0, 1, (len(lengths), dims[1], CAPACITY, dims[3])).astype(np.float32)
            for b, length in enumerate(lengths):
                cache[b, :, length:] = 1e30
            found[value.name] = cache
    return found


def source_outputs(source, values, outputs):
    session = ort.InferenceSession(
        source.model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    wanted = {i.name for i in session.get_inputs()}
    feeds = {k: v for k, v in values.items() if k in wanted}
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


def network_outputs(
    tmp_path,
    source,
    values,
    outputs,
    letters,
    precision="bf16",
    seed=0,
    experts="plugin",
    ranks=1,
):
    """Outputs of the interpreted network, weights put in place as the weights file would have them."""
    (tmp_path / "graph.onnx").write_bytes(source.model.SerializeToString())
    kinds = {w.name: w.kind for w in source.weights}
    sizes = {k: (v if isinstance(v, tuple) else (v, v, v)) for k, v in letters.items()}
    plan = PlanRequest(
        "tiny", str(tmp_path / "graph.onnx"), tuple(outputs), sizes, kinds, precision,
        experts=experts,
    )  # fmt: skip
    request = {"backend": "tensorrt-rtx", "plan": plan.to_json()}
    (tmp_path / "request.json").write_text(json.dumps(request))
    np.savez(tmp_path / "in.npz", **(stored_values(values, kinds, precision)))
    root = Path(__file__).resolve().parents[2]
    with library_folder("tensorrt-rtx") as libraries:
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, "-m", "tests.lowering.network_interpreter",
             *(str(tmp_path / n) for n in ("request.json", "in.npz", "out.npz")),
             str(seed), str(ranks)],
            env=environment, cwd=root, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-800:] + done.stderr[-3000:]
    with np.load(tmp_path / "out.npz") as found:
        return {name: found[name] for name in found.files}


def stored_values(values, kinds, precision):
    """The arrays that the weights file would hold, decoded from their bytes to fp32."""
    stored = {}
    for name, array in values.items():
        if precision == "bf16" or kinds.get(name) != "projection":
            stored[name] = array
            continue
        parts = {
            "fp8": {name: "fp8", f"{name}.scale": "scale"},
            "nvfp4": {
                name: "nvfp4",
                f"{name}.block_scale": "block_scale",
                f"{name}.scale": "scale",
            },
        }[precision]
        parts[f"{name}.inverse_input_scale"] = "inverse_input_scale"
        bindings = [
            Binding(n, "input", "BF16", (1, 1), "weight", made_of=(name, part))
            for n, part in parts.items()
        ]
        for part, made in make_parts(encode(array, precision, peak=8.0), bindings):
            codes = made.dtype == np.uint8
            stored[part] = nvfp4.VALUES[nvfp4.unpack(made)] if codes else made.astype(np.float32)
    return stored


def target_case(seed, batch, size, lengths=None):
    rng = np.random.default_rng(seed)
    source = target_graph(TARGET, DRAFTER.taps, CAPACITY)
    lengths = np.array(rng.integers(0, CAPACITY - size, batch), np.int32)
    values = {
        **random_values(source, rng), **caches(source, rng, lengths), "lengths": lengths,
        "tokens": rng.integers(0, 97, (batch, size)),
        "rows": np.tile(np.arange(size), (batch, 1)),
    }  # fmt: skip
    return source, values


TARGET_OUTPUTS = ["accepted", "anchor", "context", "features"]
TARGET_CACHES = [f"{kind}_cache.{layer}.out" for layer in range(3) for kind in "kv"]


def compare(found, wanted, lengths, size, tolerance=2e-4):
    for name, expected in wanted.items():
        actual = found[name]
        if name.endswith(".out"):
            for b, length in enumerate(lengths):
                rows = slice(0, length + size)
                np.testing.assert_allclose(
                    actual[b, :, rows], expected[b, :, rows], atol=tolerance, rtol=tolerance
                )
        elif expected.dtype.kind == "i":
            np.testing.assert_array_equal(actual, expected)
        else:
            np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dynamic", [False, True])
def test_target_network_computes_what_its_source_graph_does(tmp_path, dynamic):
    """Every sequence at a length of its own, poison behind them, windows, norms on q and k."""
    source, values = target_case(1, batch=3, size=4)
    outputs = TARGET_OUTPUTS + TARGET_CACHES
    letters = {"B": (1, 1, 3), "S": (1, 4, 6) if dynamic else 4, "W": 4, "L": CAPACITY}
    wanted = source_outputs(source, values, outputs)
    found = network_outputs(tmp_path, source, values, outputs, letters)
    compare(found, wanted, values["lengths"], 4)


def drafter_case(seed, passes, batch=2, rows=4, drafter=DRAFTER):
    rng = np.random.default_rng(seed)
    source = drafter_graph(drafter, TARGET, CAPACITY, passes)
    context = rng.integers(rows, CAPACITY - rows - DRAFTER.block, batch).astype(np.int32)
    accepted = rng.integers(1, rows + 1, batch).astype(np.int32)
    values = {
        **random_values(source, rng), **caches(source, rng, context - accepted),
        "features": rng.normal(0, 1, (batch, rows, 128)).astype(np.float32),
        "accepted": accepted, "context": context, "anchor": rng.integers(0, 96, batch),
        "masks": np.full((batch, 3), 96),
    }  # fmt: skip
    return source, values


DRAFT_CACHES = [f"{kind}_cache.{layer}.out" for layer in range(2) for kind in "kv"]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("seed", "drafter"),
    [(0, DRAFTER), (1, DRAFTER), (2, replace(DRAFTER, draft_vocab_size=31))],
    ids=["0", "1", "part of the vocabulary"],
)
def test_drafter_network_computes_what_its_source_graph_does(tmp_path, passes, seed, drafter):
    """Caches are shared and changed in place; layers run in random orders (the seed)."""
    source, values = drafter_case(seed, passes, drafter=drafter)
    letters = {"B": (1, 1, 2), "S": 4, "R": 4, "M": 3, "L": CAPACITY}
    outputs = ["tokens", "lengths"]
    wanted = source_outputs(source, values, outputs + DRAFT_CACHES)
    found = network_outputs(tmp_path, source, values, outputs + DRAFT_CACHES, letters, seed=seed)
    compare({k: found[k] for k in outputs}, {k: wanted[k] for k in outputs}, None, 0)
    for name in DRAFT_CACHES:  # the block behind the context is not kept by the op
        for b, length in enumerate(values["context"]):
            np.testing.assert_allclose(
                found[name][b, :, :length], wanted[name][b, :, :length], atol=2e-4
            )


def test_the_injecting_network_only_writes_the_caches(tmp_path):
    source, values = drafter_case(5, 1)
    letters = {"B": (1, 1, 2), "S": 4, "R": (1, 4, 6), "M": 3, "L": CAPACITY}
    found = network_outputs(tmp_path, source, values, DRAFT_CACHES, letters)
    assert set(found) == {"written"}


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_quantised_networks_compute_what_the_simulation_does(tmp_path, precision):
    """Scales, layouts and nibbles are those of the weights file, and activations are rounded in the
    same places. (Without rounding the difference is 10% in fp8 and 27% in nvfp4.)"""
    source, values = target_case(7, batch=2, size=4)
    letters = {"B": (1, 1, 2), "S": 4, "W": 4, "L": CAPACITY}
    kinds = {w.name: w.kind for w in source.weights}
    precisions = {name: precision for name, kind in kinds.items() if kind == "projection"}
    stored = stored_values(values, kinds, precision)
    graph = simulated(source, precisions)
    for name in precisions:
        if precision == "nvfp4":
            blocks = np.repeat(stored[f"{name}.block_scale"], nvfp4.BLOCK, axis=-1)
            stored[name] = np.ascontiguousarray((stored[name] * blocks).T)
        for part in ("scale", "inverse_input_scale"):
            info = helper.make_tensor_value_info(f"{name}.{part}", TensorProto.FLOAT, None)
            graph.model.graph.input.append(info)
    wanted = source_outputs(graph, stored, ["features"])["features"]
    found = network_outputs(tmp_path, source, values, ["features"], letters, precision)["features"]
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < 0.003


GPT_OSS = TargetConfig(
    "gpt_oss", 97, 64, 64, 2, 4, 2, 16, 1e-5, ROPE, 64, False, attention_bias=True,
    windows=(5, 0), attention_sinks=True, experts=Experts(6, 2),
)  # fmt: skip


def with_sinks(cache, sinks=None):
    """A cache [B, K, L, D] as the plan takes it: a row in front, 16 columns behind."""
    wide = np.pad(cache, ((0, 0), (0, 0), (1, 0), (0, 16)))
    if sinks is not None:
        groups = sinks.reshape(cache.shape[1], -1)
        wide[:, :, 0, cache.shape[3] : cache.shape[3] + groups.shape[1]] = groups
    return wide


@pytest.mark.parametrize("experts", ["plugin", "layers"])
def test_gpt_oss_network_with_sinks_windows_and_experts(tmp_path, experts):
    """Sinks are a row of the key cache; experts come from the checkpoint's bytes, which the plugin
    takes as they are and the layers as FP4 and E8M0."""
    rng = np.random.default_rng(4)
    size, batch = 4, 3
    source = gpt_oss.target_graph(GPT_OSS, (0, 1), CAPACITY)
    lengths = np.array([0, 7, 19], np.int32)
    values = {
        **random_values(source, rng), **caches(source, rng, lengths), "lengths": lengths,
        "tokens": rng.integers(0, 97, (batch, size)),
        "rows": np.tile(np.arange(size), (batch, 1)),
    }  # fmt: skip
    stored = dict(values)
    for w in source.weights:
        if w.kind == "mxfp4_blocks":
            values[w.name] = rng.integers(0, 256, w.shape).astype(np.uint8)
            stored[w.name] = nvfp4.VALUES[nvfp4.unpack(values[w.name])]
        if w.kind == "mxfp4_scales":
            values[w.name] = rng.integers(120, 126, w.shape).astype(np.uint8)
            stored[w.name] = np.ldexp(np.float32(1), values[w.name].astype(int) - 127)
        if w.kind in ("mxfp4_blocks", "mxfp4_scales") and experts == "plugin":
            stored[w.name] = values[w.name]
    for layer in range(2):
        sinks = values[f"target.l{layer}.attn.sinks"]
        stored[f"k_cache.{layer}"] = with_sinks(values[f"k_cache.{layer}"], sinks)
        stored[f"v_cache.{layer}"] = with_sinks(values[f"v_cache.{layer}"])
    caches_out = [f"{kind}_cache.{layer}.out" for layer in range(2) for kind in "kv"]
    letters = {"B": (1, 1, 3), "S": size, "W": size, "L": CAPACITY}
    outputs = TARGET_OUTPUTS + caches_out
    wanted = source_outputs(source, values, outputs)
    found = network_outputs(tmp_path, source, stored, outputs, letters, experts=experts)
    for name in caches_out:
        assert found[name].shape[2:] == (CAPACITY + 1, 32)
        found[name] = found[name][:, :, 1:, :16]
    compare(found, wanted, lengths, size, tolerance=1e-3)


# Nothing of it divides by two: three key heads, 97 tokens, 99 columns or three blocks of experts.
UNEVEN = TargetConfig(
    "llama", 97, 64, 99, 2, 6, 3, 16, 1e-5, ROPE, 64, False, qk_norm=True, windows=(0, 5)
)
UNEVEN_EXPERTS = TargetConfig(
    "gpt_oss", 97, 64, 96, 2, 6, 3, 16, 1e-5, ROPE, 64, False, attention_bias=True,
    windows=(5, 0), attention_sinks=True, experts=Experts(6, 2),
)  # fmt: skip


@pytest.mark.parametrize("config", [UNEVEN, UNEVEN_EXPERTS], ids=["llama", "gpt-oss"])
def test_the_networks_of_two_ranks_compute_what_their_mesh_does(tmp_path, config):
    """One network for both ranks; they meet in its collectives and come to one verdict."""
    rng, ranks, size, lengths = np.random.default_rng(9), 2, 4, np.array([0, 7, 19], np.int32)
    source = registry.target_graph(config, (0, 1), CAPACITY, ranks)
    values, stored = {}, {}
    whole = {w.name for w in source.weights if not w.shard}  # the same on every rank
    for name, array in {**random_values(source, rng), **caches(source, rng, lengths)}.items():
        for rank in range(ranks):
            values[f"{name}@{rank}"] = array + np.float32(0 if name in whole else 0.01) * rank
    for w in source.weights:
        for name in (f"{w.name}@{rank}" for rank in range(ranks)):
            if w.kind == "shard_start":
                values[name] = np.array([w.shard.span(0, int(name[-1]))[0]])
            if w.kind == "mxfp4_blocks":
                values[name] = rng.integers(0, 256, w.shape).astype(np.uint8)
                stored[name] = nvfp4.VALUES[nvfp4.unpack(values[name])]
            if w.kind == "mxfp4_scales":
                values[name] = rng.integers(120, 126, w.shape).astype(np.uint8)
                stored[name] = np.ldexp(np.float32(1), values[name].astype(int) - 127)
    if config.attention_sinks:
        for layer, rank in itertools.product(range(2), range(ranks)):
            sinks = values[f"target.l{layer}.attn.sinks@{rank}"]
            for kind, row in (("k", sinks), ("v", None)):
                name = f"{kind}_cache.{layer}@{rank}"
                stored[name] = with_sinks(values[name], row)
    common = {
        "lengths": lengths, "tokens": rng.integers(0, 97, (3, size)),
        "rows": np.tile(np.arange(size), (3, 1)),
    }  # fmt: skip
    own = {n for n in (i.name for i in source.model.graph.input) if n not in common}
    mesh = SourceGraph(join(source.model, ranks, own), source.weights)
    names = [f"{n}@{rank}" for n in TARGET_OUTPUTS for rank in range(ranks)]
    wanted = source_outputs(mesh, {**values, **common}, names)
    letters = {"B": (1, 1, 3), "S": size, "W": size, "L": CAPACITY}
    found = network_outputs(
        tmp_path,
        source,
        {**values, **stored, **common},
        TARGET_OUTPUTS,
        letters,
        experts="layers",
        ranks=ranks,
    )
    assert set(found) == {*names, *(n for n in found if ".out" in n or ".q@" in n)}
    compare({n: found[n] for n in names}, wanted, lengths, size, tolerance=1e-3)
    for output in TARGET_OUTPUTS:
        np.testing.assert_array_equal(found[f"{output}@0"], found[f"{output}@1"])
