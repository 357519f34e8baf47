"""Plans for Blackwell, compiled here without a GPU, and what becomes of a compiler that fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from onnx import helper, save

from dflash_trt.checkpoints import open_target
from dflash_trt.cli import main
from dflash_trt.engines import tensorrt_build
from dflash_trt.engines.build import BuildOptions
from dflash_trt.engines.directory import read_manifest, write_manifest
from dflash_trt.engines.plan import Expectations, Plan, check_plan, expanded_caches
from dflash_trt.engines.tensorrt import TensorRTPair
from dflash_trt.engines.tensorrt_add_weights import add_weights
from dflash_trt.engines.tensorrt_build import _expectations, compile_plans
from dflash_trt.engines.tensorrt_directory import (
    TensorRTOptions,
    build_tensorrt,
    pair_plans,
    read_plans,
)
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import api
from dflash_trt.models.dflash import drafter_graph
from dflash_trt.models.llama import target_graph
from dflash_trt.quantization import nvfp4
from tests.tiny import tiny_target

pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")

BLACKWELL = (120, 121)
# Processor time of the compiler on two cores: 18 (bf16), 21 (fp8) and 26 s (nvfp4) when idle, 38, 48
# and 52 s beside ten other programs; the bound leaves air above that.
MOST_SECONDS, MOST_BYTES = 90, 1_000_000_000


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nvfp4"])
def test_the_smollm2_pair_is_built_for_blackwell(tmp_path, precision):
    """Within time and memory, weights and calibration included; `compile_plans` checks each plan's
    text. A process of its own: this one's memory is not the build's."""
    command = ["build", "--target", "smollm2-135m", "--block", "8", "--backend", "tensorrt-rtx"]
    command += ["--compute-capability", "12.0,12.1", "--precision", precision]
    program = "import sys; from dflash_trt.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [*command, "--max-batch", "4", "-o", str(tmp_path / "e")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)
    content = read_plans(tmp_path / "e")
    found, reports = content["plans"], content["plans"].values()
    assert set(found) == {"target.verify", "target.prefill", "drafter.draft", "drafter.inject"}
    assert sum(r.cpu_seconds for r in reports) < MOST_SECONDS
    compiler = max(r.peak_bytes for r in reports)
    assert compiler / 2 < content["peak_bytes"] < MOST_BYTES
    assert (tmp_path / "e" / "weights.safetensors").stat().st_size > 150e6
    assert all(r.capabilities == BLACKWELL for r in reports)
    assert found["target.verify"].kernels["attention"] == 30
    assert len(found["target.verify"].ours["CachedAttention"]) == 30
    assert found["drafter.draft"].kernels["plugin"] == 2
    assert sum(r.plan_bytes for r in reports) < 100e6, "a plan holds no weights"
    kernels = {"target.verify": {"best_of_tile", "accept"}, "drafter.inject": {"write_rows"}}
    kernels["drafter.draft"] = {"write_rows", "best_of_tile", "settle"}
    for name, wanted in kernels.items():
        plan = Plan.read(tmp_path / "e" / f"{name}.engine")
        assert plan.embedded == set(product(wanted, BLACKWELL))
    wide = [b for r in reports for b in r.bindings if b.direction == "output" and 49152 in b.shape]
    assert [(b.name, b.shape) for b in wide] == [
        ("logits", (-1, 8, 49152)), ("logits", (-1, 1, 49152)),
    ], "of verify and prefill; a drafter's logits never leave it"  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_checkpoints):
    """A tiny pair for two ranks; three key heads do not divide by two."""
    folder = tmp_path_factory.mktemp("two")
    uneven = tiny_target(folder / "target", num_attention_heads=6, num_key_value_heads=3)
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8)
    target = open_target(uneven)
    manifest, reports = build_tensorrt(
        target, tiny_checkpoints[1], options_for(ranks=2), own, folder / "engine"
    )
    assert manifest.tensor_parallel == 2
    return folder / "engine", target, reports


def test_ranks_meet_twice_a_layer_and_once_over_the_vocabulary(two_ranks):
    """Looked for in the plans: those of the target have them, a draft needs none."""
    folder, _, reports = two_ranks
    layers = [f"l{layer}.{part}" for layer in range(4) for part in ("attn.o", "mlp.down")]
    for report in reports:
        plan = Plan.read(folder / report.file)
        kinds = Counter(o.kind for o in plan.operations if o.kind.startswith("comm_"))
        if report.name.startswith("drafter"):
            assert not kinds
            continue
        assert kinds == {"comm_allreduce": 8, "comm_allgather": 1}
        assert plan.ranks == 2
        assert list(report.collectives) == [*layers, "best.all"]


def test_a_plan_whose_ranks_would_not_meet_is_refused(two_ranks):
    folder, _, _ = two_ranks
    plan = Plan.read(folder / "target.verify.engine")
    few = Expectations((120,), (), (), (), 76, 2, collectives=("l0.attn.o", "best.all"))
    with pytest.raises(InputError, match="meet 9 times in it, 2 were asked for"):
        check_plan(plan, few, "p")
    with pytest.raises(InputError, match="no collective is in it"):
        check_plan(Plan.read(folder / "drafter.draft.engine"), few, "p")


@pytest.mark.parametrize("other", [b"reduction_op=max", b""])
def test_a_plan_whose_ranks_do_not_add_up_is_refused(two_ranks, other):
    """The network cannot be asked how a collective reduces, the plan can."""
    folder, _, reports = two_ranks
    data = (folder / "target.verify.engine").read_bytes()
    own = next(r.collectives for r in reports if r.name == "target.verify")
    wanted = Expectations((120,), (), (), (), 76, 2, collectives=tuple(own))
    check_plan(Plan(data), wanted, "p")
    found = r"\['max'\]" if other else r"\[\]"
    with pytest.raises(InputError, match=f"all-reduces are {found}, not sums"):
        check_plan(Plan(data.replace(b"reduction_op=sum", other)), wanted, "p")


def test_each_rank_has_weights_of_its_own_and_all_have_the_rest(two_ranks):
    folder, target, reports = two_ranks
    whole = mapped(folder / "weights.safetensors")
    parts = [mapped(folder / f"weights.rank{rank}.safetensors") for rank in range(2)]
    asked = {b.name for r in reports for b in r.bindings if b.role == "weight"}
    assert asked == {*whole, *parts[0]}
    assert not set(whole) & set(parts[0])
    down = target.tensors.read("model.layers.0.mlp.down_proj.weight").T
    found = np.concatenate([p["target.l0.mlp.down.weight"] for p in parts])
    np.testing.assert_array_equal(found, down.astype(ml_dtypes.bfloat16))
    assert [int(p["lm_head.shard.start"][0]) for p in parts] == [0, 144]
    kept = sum(a.nbytes for a in parts[1].values()) / sum(a.nbytes for a in parts[0].values())
    assert kept == 1, "all ranks' shards have the same shapes"


def test_weights_added_later_are_those_of_the_build(two_ranks, tiny_checkpoints, tmp_path):
    """A file for each rank, byte for byte, from the checkpoints of the build and no others."""
    folder, target, _ = two_ranks
    engine = shutil.copytree(folder, tmp_path / "engine")
    files = [f"weights{part}.safetensors" for part in ("", ".rank0", ".rank1")]
    for name in files:
        (engine / name).unlink()
    write_manifest(engine, read_manifest(folder))
    with pytest.raises(InputError, match="is another checkpoint than"):
        add_weights(engine, open_target(_twin(tmp_path)), tiny_checkpoints[1])
    assert not any((engine / name).exists() for name in files)
    add_weights(engine, target, tiny_checkpoints[1])
    for name in files:
        assert (engine / name).read_bytes() == (folder / name).read_bytes(), name
        assert name in read_manifest(engine).files
    with pytest.raises(InputError, match="has its weights already"):
        add_weights(engine, target, tiny_checkpoints[1])


def _twin(folder):
    """A target of the same sizes with other weights."""
    return tiny_target(folder / "twin", seed=9, num_attention_heads=6, num_key_value_heads=3)


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_quantised_projections_are_not_cut(tmp_path, pair, precision):
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8)
    with pytest.raises(InputError, match=f"'{precision}': tensorrt-rtx cuts a target over ranks"):
        build_tensorrt(*pair, options_for(precision, ranks=2), own, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_running_on_several_gpus_is_refused(two_ranks):
    with pytest.raises(InputError, match="is for 2 GPUs; its plans are compiled, but"):
        TensorRTPair(two_ranks[0])


def options_for(precision="bf16", **changes):
    values = {"block": 4, "precision": precision, "max_seq_len": 64, "max_batch": 2, **changes}
    return BuildOptions("tiny", **values)


@pytest.fixture
def pair(tiny_checkpoints):
    return tiny_checkpoints


@pytest.fixture(params=["bf16", "fp8", "nvfp4"])
def engine(request, tiny_plans):
    return tiny_plans[request.param]


def test_an_engine_directory_holds_the_weights_that_its_plans_ask_for(engine):
    plans = read_plans(engine)["plans"]
    asked = {
        b.name: b for plan in plans.values() for b in plan.bindings
        if b.direction == "input" and b.role == "weight"
    }  # fmt: skip
    held = tensors_of(engine / "weights.safetensors")
    assert set(held) == set(asked)
    names = {"BF16": "BF16", "FLOAT": "F32", "FP8": "F8_E4M3", "FP4": "U8"}
    for name, (dtype, shape) in held.items():
        packed = asked[name].dtype == "FP4"
        assert shape == [*asked[name].shape[:-1], asked[name].shape[-1] // (2 if packed else 1)]
        assert dtype == names[asked[name].dtype]
    assert held["lm_head.weight"][0] == "BF16"
    assert held["drafter.fc.weight"][0] == "BF16"


def tensors_of(path):
    """dtype and shape of every tensor, from the header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}


def test_inspect_shows_what_a_plan_takes_gives_and_runs(engine, capsys):
    assert main(["inspect", str(engine)]) == 0
    text = capsys.readouterr().out
    assert "target.verify.engine: compute capability 12.0" in text
    assert "4 attention" in text
    assert "tokens [B, 4] INT64" in text
    assert "accepted [B] INT32" in text


def test_weights_are_those_of_the_checkpoint(engine, pair):
    weights = mapped(engine / "weights.safetensors")
    wanted = pair[0].tensors.read("model.layers.0.mlp.down_proj.weight").T
    name = "target.l0.mlp.down.weight"
    inverse = weights.get(f"{name}.inverse_input_scale")
    factor = 1 if inverse is None else float(inverse.astype(np.float32)[0, 0])
    if engine.name == "bf16":
        found, tolerance = weights[name].astype(np.float32), 2**-8
    elif engine.name == "fp8":
        found = weights[name].astype(np.float32) * weights[f"{name}.scale"] * factor
        tolerance = 0.04
    else:
        parts = weights[name], weights[f"{name}.block_scale"], weights[f"{name}.scale"]
        found, tolerance = nvfp4.decode(*parts) * factor, 0.15
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < tolerance


def mapped(path):
    types = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}
    types |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "I64": np.int64}
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[begin:end], types[entry["dtype"]])
        found[name] = array.reshape(entry["shape"])
    return found


CRASHES = {
    "abort": ('import os; print(\'{"node": "l7.attn"}\', flush=True); os.abort()', "signal 6"),
    "exit": ('import sys; print(\'{"node": "l7.attn"}\', flush=True); sys.exit(3)', "status 3"),
}


@pytest.mark.parametrize("kind", CRASHES)
def test_a_crash_of_the_compiler_is_a_sentence_and_leaves_nothing(
    tmp_path, pair, monkeypatch, kind
):
    code, ending = CRASHES[kind]
    monkeypatch.setattr(tensorrt_build, "COMMAND", (sys.executable, "-c", code))
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8)
    with pytest.raises(InputError, match=rf"{ending} at node 'l7.attn'"):
        build_tensorrt(*pair, options_for(), own, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_fails_its_check_ends_the_build(tmp_path, pair, monkeypatch):
    def refuse(plan, wanted, name):
        assert plan.capabilities == wanted.capabilities == (120,)
        raise InputError(f"plan '{name}': is another")

    monkeypatch.setattr(tensorrt_build, "check_plan", refuse)
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8)
    with pytest.raises(InputError, match=r"plan 'target.verify': is another"):
        build_tensorrt(*pair, options_for(), own, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_an_op_without_lowering_is_named_with_its_node(tmp_path, pair):
    graph = target_graph(pair[0].config, (0, 2, 3), 80)
    drafter = drafter_graph(pair[1].config, pair[0].config, 80, 1)
    node = next(n for n in graph.model.graph.node if n.op_type == "Swish")
    node.CopyFrom(helper.make_node("Erf", node.input, node.output, name=node.name))
    save(graph.model, tmp_path / "target.onnx")
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8)
    plans = pair_plans(graph, drafter, tmp_path, options_for(), own, 3)
    with pytest.raises(InputError, match=rf"'{node.name}'.*Erf"):
        compile_plans(plans[:1], tmp_path, "tensorrt-rtx", (120,))


def test_unknown_capabilities_and_precisions_are_refused(tmp_path, pair):
    for capability in (75, 100):
        with pytest.raises(InputError, match="tensorrt-rtx cannot compile for compute capability"):
            TensorRTOptions("tensorrt-rtx", (capability,))
    with pytest.raises(InputError, match="no compute capability"):
        TensorRTOptions("tensorrt-rtx", ())
    own = TensorRTOptions("tensorrt-rtx", (120,))
    for precision, capability in (("fp8", 86), ("nvfp4", 89)):
        old = TensorRTOptions("tensorrt-rtx", (capability, 120))
        with pytest.raises(InputError, match=f"precision '{precision}': GPUs of compute capab"):
            build_tensorrt(*pair, options_for(precision), old, tmp_path / "engine")
    with pytest.raises(InputError, match="precision 'int4'"):
        build_tensorrt(*pair, options_for("int4"), own, tmp_path / "engine")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(InputError, match="--backend tensorrt-rtx"):
        api.load("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(InputError, match=r"dflash-trt\[tensorrt-rtx\]"):
        api.load("tensorrt-rtx")


# -- the plan reader, on texts as a plan holds them


def plan_with(output, capabilities="sm120", extra=""):
    text = (
        f"n_accelerators accelerators={{{capabilities}}}\n"
        f'  tensor={{ name="t" type={output[0]} dims={{{output[1]}}} }}\n'
        '  tensor={ name="w" type=bf16 dims={8 8} }\n'
        '  function={ name=__myl_ReshReplReshMove input_args={ "w"} output_args={ "t"} }\n'
        f"{extra}\nregion = {{ name=r0 size=4096 alignment=1 instance=0 type=x place=accelerator"
    )
    return Plan(text.encode())


WANTED = Expectations((120,), (), (), (), capacity=2048, kv_heads=3, quantised=((576, 960),))


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (Plan(b"nothing"), {}, "no program text"),
        (plan_with(("bf16", "8 8"), "sm121"), {}, r"compiled for \[121\]"),
        (plan_with(("bf16", "_B 9 2048 64")), {}, "copies a cache"),
        (plan_with(("bf16", "576 960")), {}, "unpacks a whole weight"),
        (plan_with(("half", "960 576")), {}, "unpacks a whole weight"),
        (plan_with(("bf16", "8 8")), {"inputs": ("tokens",)}, "'tokens' is not in it"),
        (plan_with(("bf16", "8 8")), {"outputs": ("accepted",)}, "'accepted' is not in it"),
        (plan_with(("bf16", "8 8")), {"plugins": ("verify",)}, "plugin of node 'verify'"),
        (plan_with(("bf16", "8 8")), {"scratch_limit": 100}, "scratch memory"),
    ],
)
def test_a_plan_that_is_not_what_was_asked_for_is_refused(plan, changes, message):
    with pytest.raises(InputError, match=message):
        check_plan(plan, replace(WANTED, **changes), "p")


def test_everything_that_was_asked_for_is_looked_for_in_the_plan(tiny_plans, pair, tmp_path):
    """What `compile_plans` has each plan checked for: target with layers of 2 key heads of 16, with
    64 positions and the 8 of a chunk; MLP columns 96."""
    reports = read_plans(tiny_plans["nvfp4"])["plans"]
    graph = target_graph(pair[0].config, (0, 2, 3), 72)
    drafter = drafter_graph(pair[1].config, pair[0].config, 72, 1)
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8)
    verify, _, draft, _ = pair_plans(graph, drafter, tmp_path, options_for("nvfp4"), own, 3)
    wanted = _expectations(verify, reports["target.verify"], (120, 121))
    caches = {f"{kind}_cache.{layer}" for kind in "kv" for layer in range(4)}
    assert wanted.capabilities == (120, 121)
    assert {"tokens", "lengths", "rows", *caches} < set(wanted.inputs)
    assert {n for n in wanted.inputs if ".l2.mlp.down" in n} == {
        f"target.l2.mlp.down.weight{part}"
        for part in ("", ".block_scale", ".scale", ".inverse_input_scale")
    }
    states = {"accepted", "anchor", "context", "features", "logits"}
    assert set(wanted.outputs) == {*states, *(f"{name}.out" for name in caches)}
    assert wanted.plugins == ("verify",)
    assert (wanted.capacity, wanted.kv_heads) == (72, 2)
    assert set(wanted.quantised) == {(128, 64), (64, 64), (192, 64), (64, 96)}
    assert wanted.collectives == ()
    assert 64e6 < wanted.scratch_limit < 68e6
    drafting = _expectations(draft, reports["drafter.draft"], (120,))
    assert set(drafting.plugins) == {"inject", "p0.commit"}
    assert {"tokens", "lengths"} < set(drafting.outputs)


def test_a_plan_without_a_kernel_for_one_gpu_is_refused():
    plugin = '  custom_layer={ name="verify" input={} output={} }\n'
    kernels = '[{"name": "best", "symbol": "x", "capability": 120, "num_warps": 4}'
    more = ', {"name": "accept", "symbol": "y", "capability": 120}'
    wanted = replace(WANTED, capabilities=(120, 121), plugins=("verify",))
    other = f"{kernels}{more}{kernels[1:].replace('120', '121')}"
    for held, message in ((other, "'accept' is not in it for 121"), ("", "no kernel of its plug")):
        plan = plan_with(("bf16", "8 8"), "sm120 sm121", plugin + held)
        with pytest.raises(InputError, match=message):
            check_plan(plan, wanted, "p")
    whole = plan_with(("bf16", "8 8"), "sm120 sm121", plugin + other + more.replace("120", "121"))
    check_plan(whole, wanted, "p")


def test_a_cache_of_its_own_size_is_no_expanded_one():
    check_plan(plan_with(("bf16", "_B 3 2048 64")), WANTED, "p")
    assert expanded_caches(plan_with(("bf16", "_B 9 2048 64")), 2048, 3)


def test_a_weight_that_is_rearranged_as_it_is_stored_is_not_unpacked():
    check_plan(plan_with(("fp8_e4m3", "576 960")), WANTED, "p")


def test_scratch_is_the_device_memory_of_the_largest_program():
    """Memory of the host and constants are none."""
    others = "".join(
        f"\nregion = {{ name={name} size=99999 alignment=1 instance=0 type=x place={place}"
        for name, place in (("r1", "host"), ("const0", "accelerator"))
    )
    programs = plan_with(("bf16", "8 8"), extra=others), plan_with(("bf16", "8 8"))
    small = programs[1].data.replace(b"size=4096", b"size=512")
    assert Plan(programs[0].data + small).scratch_bytes == 4096
    assert Plan(small + programs[0].data).scratch_bytes == 4096
