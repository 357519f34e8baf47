"""`dflash-trt weights`: plans compiled without the checkpoint get their weights later."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoints import DrafterCheckpoint, open_drafter, open_target
from dflash_trt.checkpoints.described import AbsentTensors, DescribedTarget
from dflash_trt.cli import main
from dflash_trt.engines import tensorrt_directory
from dflash_trt.engines.build import BuildOptions
from dflash_trt.engines.directory import read_manifest, write_manifest
from dflash_trt.engines.tensorrt_directory import TensorRTOptions, build_tensorrt
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Runtime
from tests import tiny, tiny_gpt_oss
from tests.engines.weights_file import check_weights_file

pytest.importorskip("tensorrt_rtx", reason="pip install 'dflash-trt[tensorrt-rtx]'")

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoints")
    target = tiny_gpt_oss.tiny_gpt_oss(folder / "target")
    return target, tiny.tiny_drafter(folder / "drafter")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Path:
    """Plans from the configurations alone."""
    config = dataclasses.replace(open_target(pair[0]).config, stop_ids=(257,))
    target = DescribedTarget(config, AbsentTensors("example/target"))
    drafter = DrafterCheckpoint(open_drafter(pair[1]).config, AbsentTensors("example/drafter"))
    options = BuildOptions("late", block=4, precision="bf16", max_seq_len=64, max_batch=2)
    own = TensorRTOptions("tensorrt-rtx", (120,), chunk=8, weights=False)
    out = tmp_path_factory.mktemp("plans") / "engine"
    build_tensorrt(target, drafter, options, own, out)
    return out


@pytest.fixture
def engine(plans: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plans, tmp_path / "engine"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def arguments(engine: Path, target: Path, drafter: Path) -> list[str]:
    return ["weights", str(engine), "--target", str(target), "--drafter", str(drafter)]


def refused(capsys: pytest.CaptureFixture[str], engine: Path, pair: Pair, sentence: str) -> None:
    """One sentence, and nothing is changed."""
    before = content(engine)
    assert main(arguments(engine, *pair)) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("dflash-trt:")]
    assert len(lines) == 1
    assert sentence in lines[0]
    assert content(engine) == before


def test_the_directory_is_as_if_built_with_the_checkpoint(engine: Path, pair: Pair) -> None:
    before = read_manifest(engine)
    with pytest.raises(InputError, match=f"dflash-trt weights {engine} --target PATH"):
        Runtime.load(engine)
    (engine / ".weights.partial").mkdir()  # left by a run that was killed
    (engine / ".weights.partial" / "weights.safetensors").write_text("half")
    assert main(arguments(engine, *pair)) == 0
    manifest, target = read_manifest(engine), open_target(pair[0])
    assert not [path for path in engine.iterdir() if path.name.startswith(".")]
    assert manifest.target.digest == target.tensors.digest()
    assert manifest.stop_ids == target.config.stop_ids == (257, 258, 259)
    assert manifest.chat_arguments["eos_token"] == "<|end|>"
    assert {"weights.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(manifest.files)
    changed = {"target", "drafter", "stop_ids", "chat_arguments", "files"}
    for field in dataclasses.fields(manifest):
        if field.name not in changed:
            assert getattr(manifest, field.name) == getattr(before, field.name), field.name
    check_weights_file(engine, *pair)


def test_another_checkpoint_is_refused(
    engine: Path, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = pair
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    other = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "experts", **changes)
    refused(capsys, engine, (other, drafter), "its experts is {'count': 4")
    stretched = {**tiny_gpt_oss.YARN, "factor": 4.0}
    other = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "yarn", rope_scaling=stretched)
    refused(capsys, engine, (other, drafter), "its rope is")
    other = tiny.tiny_drafter(tmp_path / "drafter", rope_theta=20000.0)
    refused(capsys, engine, (target, other), "its rope is")
    refused(
        capsys, engine, (tmp_path / "nothing", drafter), "neither a path nor one of the recipes"
    )
    llama = tiny.tiny_target(tmp_path / "llama")
    refused(capsys, engine, (llama, drafter), "its architecture is llama, the engine's gpt_oss")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda blocks: blocks[:, :-1].copy(), "[8, 63, 3, 16] cannot make target.l2.mlp.down"),
        (lambda blocks: blocks.astype(ml_dtypes.bfloat16), "holds float32, not uint8"),
    ],
)
def test_tensors_that_do_not_fit_the_plans_are_refused(
    engine: Path, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    change: Callable[[np.ndarray], np.ndarray], sentence: str,
) -> None:  # fmt: skip
    """By the checkpoint's headers: its configuration says nothing else than the engine's."""
    other = Path(shutil.copytree(pair[0], tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj_blocks"
    save_file({**tensors, name: change(tensors[name])}, other / "model.safetensors")
    refused(capsys, engine, (other, pair[1]), sentence)


def test_an_engine_that_needs_none_is_refused(
    engine: Path, tiny_engine: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, tiny_engine, pair, "has its weights from the build")
    assert main(arguments(engine, *pair)) == 0
    capsys.readouterr()
    refused(capsys, engine, pair, "has its weights already")


def test_the_same_sizes_are_not_the_same_checkpoint(
    engine: Path, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans that were built with the checkpoint at hand take that one only."""
    manifest, digest = read_manifest(engine), open_target(pair[0]).tensors.digest()
    known = dataclasses.replace(manifest.target, digest=digest)
    write_manifest(engine, dataclasses.replace(manifest, target=known))
    twin = tiny_gpt_oss.tiny_gpt_oss(tmp_path / "twin", seed=5)
    refused(capsys, engine, (twin, pair[1]), "is another checkpoint than")
    assert main(arguments(engine, *pair)) == 0


def test_plans_with_another_table_are_refused(
    engine: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a release that writes other graphs of the same configuration would find them."""
    manifest = read_manifest(engine)
    *others, last = manifest.weights
    wider = {**last, "shape": [2 * n for n in last["shape"]]}
    write_manifest(engine, dataclasses.replace(manifest, weights=(*others, wider)))
    refused(capsys, engine, pair, f"its plans take {last['name']} {wider['shape']}, this checkp")
    write_manifest(engine, dataclasses.replace(manifest, weights=tuple(others)))
    refused(capsys, engine, pair, f"its plans take {len(others)} weights, this checkpoint makes")


def test_a_tokenizer_with_more_entries_is_refused(
    engine: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plans cut the logits behind those that they were compiled for."""
    write_manifest(engine, dataclasses.replace(read_manifest(engine), vocab_size=280))
    refused(
        capsys, engine, pair, "its tokenizer has 288 entries, the engine's plans choose from 280"
    )


def test_a_tokenizer_with_fewer_entries_leaves_the_plans_logits(
    engine: Path, pair: Pair, tmp_path: Path
) -> None:
    """Buffers are as wide as what the plans write, whatever the tokenizer has."""
    other = Path(shutil.copytree(pair[0], tmp_path / "other"))
    path = other / "tokenizer.json"
    values = json.loads(path.read_text())
    values["added_tokens"] = values["added_tokens"][:-8]
    path.write_text(json.dumps(values))
    assert open_target(other).config.token_count == 280
    assert main(arguments(engine, other, pair[1])) == 0
    assert read_manifest(engine).vocab_size == 288


def test_a_run_that_fails_midway_leaves_the_plans(
    engine: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = content(engine), tensorrt_directory.write_weights

    def failing(path: Path, *rest: object) -> None:
        write(path, *rest)  # type: ignore[arg-type]
        raise OSError("no space left on device")

    monkeypatch.setattr(tensorrt_directory, "write_weights", failing)
    with pytest.raises(OSError, match="no space"):
        main(arguments(engine, *pair))
    assert content(engine) == before


KILLED = """
import os, sys, time
from dflash_trt import cli
from dflash_trt.engines import tensorrt_directory
write, number = tensorrt_directory.write_weights, int(sys.argv.pop(1))
def killed(*rest):
    write(*rest)
    os.kill(os.getpid(), number)
    time.sleep(60)
tensorrt_directory.write_weights = killed
sys.exit(cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_the_plans(
    engine: Path, pair: Pair, number: signal.Signals
) -> None:
    """Asked to end it takes away what it wrote; otherwise the next run does. It counts for nothing."""
    before = content(engine)
    command = [sys.executable, "-c", KILLED, str(int(number)), *arguments(engine, *pair)]
    assert subprocess.run(command).returncode in (-number, 128 + number)
    left = {name for name in content(engine) if name not in before}
    assert all(name.startswith(".weights.partial/") for name in left)
    assert bool(left) == (number == signal.SIGKILL)
    assert {name: data for name, data in content(engine).items() if name in before} == before
    assert main(arguments(engine, *pair)) == 0
    check_weights_file(engine, *pair)
    assert not [path for path in engine.iterdir() if path.name.startswith(".")]


def test_build_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe whose checkpoints are not here."""
    out = tmp_path / "engine"
    command = ["build", "--target", "gpt-oss-20b", "-o", str(out), "--compute-capability", "9.0"]
    assert main(command) == 2  # such a plan is not compiled; what is missing was said before
    said = " ".join(capsys.readouterr().err.split())
    assert f"dflash-trt weights {out} --target gpt-oss-20b --download" in said
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == "[]"
