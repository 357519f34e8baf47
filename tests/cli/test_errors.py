"""Bad input: one sentence that names the culprit, exit status 2, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.cli import main
from tests import tiny


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Target folder, drafter folder, and an output folder that does not exist."""
    target = tiny.tiny_target(tmp_path / "in" / "target")
    drafter = tiny.tiny_drafter(tmp_path / "in" / "drafter")
    return target, drafter, tmp_path / "out" / "engine"


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path: Path, edit: Callable[[dict], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[object], sentence: str) -> None:
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("dflash-trt:")]
    assert len(lines) == 1, captured.err
    assert sentence in lines[0]
    assert "Traceback" not in captured.err


def build_refused(
    capsys: pytest.CaptureFixture[str],
    places: tuple[Path, Path, Path],
    sentence: str,
    *more: object,
) -> None:
    target, drafter, out = places
    arguments = ["build", "--target", target, "--drafter", drafter, "-o", out, *more]
    refused(capsys, arguments, sentence)
    left = list(out.parent.iterdir()) if out.parent.exists() else []
    assert left == []


Places = tuple[Path, Path, Path]
Capture = pytest.CaptureFixture[str]


def test_unknown_target(capsys: Capture, tmp_path: Path) -> None:
    arguments = ["build", "--target", "gpt-17", "-o", tmp_path / "e"]
    refused(capsys, arguments, "the target 'gpt-17' is neither a path nor one of the recipes:")


def test_missing_tensor(capsys: Capture, places: Places) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(places[0] / "model.safetensors", lambda t: t.pop(name))
    build_refused(capsys, places, f"the tensor '{name}' is missing")


def test_wrong_shape(capsys: Capture, places: Places) -> None:
    name = "layers.0.self_attn.q_norm.weight"

    def shorten(tensors: dict) -> None:
        tensors[name] = tensors[name][:-1].copy()

    edit_tensors(places[1] / "model.safetensors", shorten)
    build_refused(
        capsys, places, f"'{name}' [15] cannot make drafter.d0.attn.q_norm.weight of shape [16]"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 32}, "its hidden_size is 32 and the target's 64"),
        ({"vocab_size": 300}, "its vocab_size is 300 and the target's 288"),
        ({"num_target_layers": 7}, "its num_target_layers is 7 and the target's 4"),
        (
            {"dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": 260}},
            "target_layer_ids [4] lie outside the target's 4 layers",
        ),
        ({"dflash_config": {"target_layer_ids": [0]}}, "the key 'mask_token_id' is missing"),
        ({"dflash_config": {"mask_token_id": 260}}, "'target_layer_ids' is missing"),
        (
            {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 288}},
            "mask_token_id 288 is outside the vocabulary of 288",
        ),
        ({"block_size": None}, "the key 'block_size' is missing"),
        ({"architectures": ["MedusaModel"]}, "'MedusaModel' is not a DFlash drafter"),
        ({"architectures": ["EagleModel"]}, "EAGLE-3 drafter"),
        ({"num_attention_heads": "four"}, "'num_attention_heads' is 'four', not an integer"),
    ],
)
def test_drafter_for_another_target(
    capsys: Capture, places: Places, changes: dict, sentence: str
) -> None:
    edit_json(places[1] / "config.json", **changes)
    build_refused(capsys, places, sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--block", 1], "block 1: a block has at least 2 tokens"),
        (["--passes", 3], "passes 3: 1 or 2 refinement passes"),
        (["--max-seq-len", 4], "max-seq-len 4: too short"),
        (["--max-seq-len", 5000], "max-seq-len 5000: the target ends at 1024 positions"),
        (["--precision", "fp7"], "precision 'fp7': the CPU engine offers fp32, int8, int4"),
    ],
)
def test_options(capsys: Capture, places: Places, arguments: list, sentence: str) -> None:
    build_refused(capsys, places, sentence, *arguments)


def test_truncated_safetensors(capsys: Capture, places: Places) -> None:
    path = places[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    build_refused(capsys, places, "model.safetensors: cannot be read as safetensors")


def test_not_a_model(capsys: Capture, places: Places, tmp_path: Path) -> None:
    _, drafter, out = places
    for name, sentence in (
        ("notes.txt", "is neither a Hugging Face folder nor a GGUF file"),
        ("notes.gguf", "cannot be read as GGUF"),
    ):
        (tmp_path / name).write_text("hello")
        refused(
            capsys,
            ["build", "--target", tmp_path / name, "--drafter", drafter, "-o", out],
            sentence,
        )
    (tmp_path / "empty").mkdir()
    refused(
        capsys,
        ["build", "--target", tmp_path / "empty", "--drafter", drafter, "-o", out],
        "config.json: there is no such file",
    )
    assert not out.parent.exists()


def test_prompts(capsys: Capture, tiny_engine: Path) -> None:
    refused(capsys, ["run", tiny_engine, ""], "the prompt is empty")
    refused(capsys, ["run", tiny_engine, "x" * 600], "the engine holds 512 with the answer")
    refused(capsys, ["run", tiny_engine.parent, "hi"], "is not an engine directory")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no prompt"),
        ("{", "line 1: is not JSON"),
        (
            '{"prompt": "a"}\n{"other": 1}',
            "line 2: has neither 'prompt' nor 'question' nor 'messages'",
        ),
    ],
)
def test_prompt_files(
    capsys: Capture, tiny_engine: Path, tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    refused(capsys, ["bench", tiny_engine, "--prompts", path], sentence)


@pytest.mark.parametrize(
    ("flag", "name", "sentence"),
    [
        ("--report", "figures.pdf", "the picture is a PNG, so name it FILE.png"),
        ("--report", "nowhere/figures.png", "figures.png: there is no directory"),
        ("--json", "nowhere/figures.json", "figures.json: there is no directory"),
    ],
)
def test_bench_output_that_cannot_be_written(
    capsys: Capture, tmp_path: Path, flag: str, name: str, sentence: str
) -> None:
    """Refused before the engine is looked at: measuring takes minutes."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / name
    refused(capsys, ["bench", tmp_path / "none", "--prompts", prompts, flag, out], sentence)
