"""A TensorRT engine's quantisation on the CPU: what is simulated, and what is reported of it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from dflash_trt.bench.simulate import Measurement, Reading, measure, report
from dflash_trt.checkpoints import open_drafter
from dflash_trt.cli import main, simulate
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.engines.directory import read_manifest
from dflash_trt.engines.simulation import build_simulation
from dflash_trt.engines.tensorrt_directory import TensorRTOptions, build_tensorrt
from dflash_trt.engines.tensorrt_weights import read_weights
from dflash_trt.quantization import fp8, nvfp4
from dflash_trt.runtime.generate import Generation, GenerationOptions, Runtime
from dflash_trt.runtime.metrics import GenerationMetrics
from tests.models.test_drafter_kinds import zlab_drafter_of_a_part

TEXT = "Quantised weights and activations are rounded; a text shows what that costs. " * 2


@pytest.fixture(scope="module")
def simulations(tiny_plans, tmp_path_factory):
    """CPU engines by precision."""
    folder = tmp_path_factory.mktemp("simulated")
    for precision, engine in tiny_plans.items():
        build_simulation(engine, folder / precision)
    return folder


def test_a_drafter_of_a_part_of_the_vocabulary(tiny_checkpoints, tmp_path):
    """Its map stays integers, and the engine that is simulated drafts what the CPU's does."""
    target, _ = tiny_checkpoints
    zlab_drafter_of_a_part(tmp_path / "drafter")
    pair, options = (target, open_drafter(tmp_path / "drafter")), BuildOptions("t", 4, "bf16")
    options = dataclasses.replace(options, max_seq_len=64)
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8)
    build_tensorrt(*pair, options, own, tmp_path / "plans")
    build_simulation(tmp_path / "plans", tmp_path / "simulated")
    build_cpu(*pair, dataclasses.replace(options, precision="fp32"), tmp_path / "cpu")
    asked = GenerationOptions(max_tokens=24, ignore_eos=True)
    simulated, cpu = (
        Runtime.load(tmp_path / name).generate([5, 6, 7], asked) for name in ("simulated", "cpu")
    )
    assert simulated.tokens == cpu.tokens


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_products_are_those_of_the_weights_file_in_numpy(tiny_plans, simulations, precision):
    """The first product of the compiled engine, its activations rounded by the quantisation code.

    The other rows of the table say how far off an engine is that leaves a rounding out."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (1, 6, 64)).astype(np.float32)
    weights = read_weights(tiny_plans[precision] / "weights.safetensors")
    name = "target.l0.attn.qkv.weight"
    scale = 1 / weights[f"{name}.inverse_input_scale"].astype(np.float32)
    if precision == "fp8":
        weight, module = weights[name].astype(np.float32), fp8
    else:
        whole = np.ones((1, 1), np.float32)
        weight, module = nvfp4.decode(weights[name], weights[f"{name}.block_scale"], whole), nvfp4
    factor = weights[f"{name}.scale"]
    wanted = (module.simulate(x, float(scale[0, 0])) / scale) @ weight * factor
    unrounded = (x / scale) @ weight * factor
    found = product(simulations / precision / "target.onnx", "l0.attn.qkv", x)
    assert np.abs(unrounded - wanted).max() > 0.02
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


def product(path, node, x):
    """The output of the compiled model's `node`, whose scaled input is made of `x` instead."""
    model = onnx.load(path)
    (first,) = (n for n in model.graph.node if n.output[0] == f"{node}.scaled")
    feed = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)
    first.input[0] = "x"
    del model.graph.input[:], model.graph.output[:], model.graph.value_info[:]
    model.graph.input.append(feed)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(node))
    keep(model.graph, node)
    onnx.save(model, path.parent / "part.onnx")
    return ort.InferenceSession(path.parent / "part.onnx").run([node], {"x": x})[0]


def keep(graph, output):
    """Only what `output` depends on."""
    wanted, kept = {output}, []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    initializers = [i for i in graph.initializer if i.name in wanted]
    del graph.initializer[:]
    graph.initializer.extend(initializers)


@pytest.mark.parametrize(("precision", "count"), [("bf16", 0), ("fp8", 1), ("nvfp4", 1)])
@pytest.mark.parametrize(("model", "projections"), [("target", 4 * 4), ("drafter", 2 * 4 + 1)])
def test_every_projection_is_rounded_once(simulations, model, projections, precision, count):
    """In the compiled model; either format goes through E4M3 (17), values or block scales."""
    graph = onnx.load(simulations / precision / f"{model}.onnx", load_external_data=False).graph
    casts = [a.i for n in graph.node if n.op_type == "Cast" for a in n.attribute if a.name == "to"]
    assert casts.count(17) == projections * count


def test_figures_get_worse_with_fewer_bits(simulations):
    prompts = ["What is 12 plus 30?", "Name two planets."]
    reference = measure(simulations / "bf16", prompts, TEXT, 16)
    answers = [g.tokens for g in reference.generations]
    figures = {
        name: report(measure(simulations / name, prompts, TEXT, 16, answers), reference)
        for name in ("bf16", "fp8", "nvfp4")
    }
    same, eight, four = figures.values()
    assert same["top1_agreement"] == {"text": 1.0, "answers": 1.0}
    assert same["answers_that_differ"] == 0
    assert same["perplexity"]["engine"] == same["perplexity"]["reference"]
    assert same["positions"] == {"text": len(TEXT.encode()) - 3, "answers": 32}
    assert 1 > eight["top1_agreement"]["text"] > four["top1_agreement"]["text"] > 0.3
    assert eight["perplexity"]["engine"] != four["perplexity"]["engine"]
    assert all(f["acceptance_length"]["engine"] >= 1 for f in figures.values())


def test_what_is_read_is_what_was_said(simulations):
    """Given its own answers, an engine finds each token the most likely one, as likely as it was."""
    prompts = ["What is 12 plus 30?", "Name two planets."]
    runtime = Runtime.load(simulations / "bf16")
    said = [runtime.generate(p, GenerationOptions(16, logprobs=0)) for p in prompts]
    found = measure(simulations / "bf16", prompts, TEXT, 16)
    assert [g.tokens for g in found.generations] == [g.tokens for g in said]
    assert found.answers.best.tolist() == [t for g in said for t in g.tokens]
    wanted = [entry.logprob for g in said for entry in g.logprobs]
    np.testing.assert_allclose(found.answers.logprobs, wanted, atol=1e-4)


def measured(best, probabilities, accepted):
    """Two positions of a text, one of an answer, from two cycles with two drafts each."""
    metrics = GenerationMetrics(
        cycles=2, drafted=4, accepted_by_slot=accepted, drafted_by_slot=[2, 2]
    )
    answer = Generation(tokens=[best[0]], metrics=metrics)
    text = Reading(np.array(best), np.log(probabilities))
    return Measurement([answer], text, Reading(np.array([5]), np.log([0.1])))


def test_the_report_names_what_is_whose():
    figures = report(measured([3, 4], [0.5, 0.125], [2, 1]), measured([3, 6], [0.5, 0.5], [1, 0]))
    assert figures == {
        "prompts": 1,
        "answers_that_differ": 0,
        "top1_agreement": {"text": 0.5, "answers": 1.0},
        "positions": {"text": 2, "answers": 1},
        "perplexity": {"engine": 4.0, "reference": 2.0},
        "acceptance_length": {"engine": 2.5, "reference": 1.5},
    }


def test_the_command_prints_the_report_and_leaves_nothing_behind(
    tiny_plans, tmp_path, capsys, monkeypatch
):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "Name two planets."}\n')
    (tmp_path / "t.txt").write_text(TEXT)
    arguments = [
        "simulate", tiny_plans["nvfp4"], "--against", tiny_plans["bf16"], "--max-tokens", 8,
        "--prompts", tmp_path / "p.jsonl", "--text", tmp_path / "t.txt",
        "--json", tmp_path / "f.json",
    ]  # fmt: skip
    calls = []

    def noted(*arguments):
        calls.append((arguments[4], measure(*arguments)))
        return calls[-1][1]

    monkeypatch.setattr(simulate, "measure", noted)
    assert main([str(a) for a in arguments]) == 0
    (own, reference), (given, _) = calls
    assert own is None
    assert given == [g.tokens for g in reference.generations], "both read the reference's answers"
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["prompts"] == 1
    assert f"engine {figures['perplexity']['engine']}" in capsys.readouterr().out
    assert figures["top1_agreement"]["text"] < 1, (
        "the engine's own quantisation is what is simulated"
    )
    assert figures["perplexity"]["engine"] != figures["perplexity"]["reference"]
    assert not any((tmp_path / "scratch").iterdir())


def test_what_cannot_be_simulated_is_refused(
    tiny_plans, tiny_engine, simulations, tmp_path, capsys
):
    def sentence(engine, against, text="t.txt"):
        (tmp_path / "p.jsonl").write_text('{"prompt": "One."}\n')
        (tmp_path / "t.txt").write_text("a")
        arguments = [
            "simulate", engine, "--against", against, "--prompts", tmp_path / "p.jsonl",
            "--text", tmp_path / text, "--max-tokens", 2,
        ]  # fmt: skip
        assert main([str(a) for a in arguments]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    plans = tiny_plans["fp8"]
    assert "is an engine for the CPU" in sentence(tiny_engine, tiny_engine)
    assert "t.missing: cannot be read" in sentence(plans, plans, "t.missing")
    assert "fewer than two tokens" in sentence(plans, plans)
    manifest = json.loads((plans / "engine.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    files = {k: v for k, v in manifest["files"].items() if k == "plans.json"}
    (other / "plans.json").write_bytes((plans / "plans.json").read_bytes())
    (other / "engine.json").write_text(json.dumps({**manifest, "files": files}))
    assert "holds plans only" in sentence(other, other)
    manifest["target"]["config"]["num_layers"] = 5
    (other / "engine.json").write_text(json.dumps({**manifest, "files": files}))
    assert "different models: their targets differ" in sentence(plans, other)


def test_the_simulated_engine_is_an_engine_of_the_cpu(simulations):
    manifest = read_manifest(simulations / "nvfp4")
    assert (manifest.backend, manifest.precision, manifest.max_batch) == ("cpu", "nvfp4", 1)
