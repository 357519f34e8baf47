"""From prompts to a drafter folder with one command, on a random target that fits in a test."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from dflash_trt.cli import train
from dflash_trt.errors import InputError

WORDS = ["<s>", "</s>", "<user>", "<bot>", "<mask>", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<bot>"
RECIPE = """mask_token = 4
taps = [0, 2]
layers = 1
block = 4
steps = 4
sequences = 2
anchors = 4
warmup = 1
held_out = 2
negatives = 2
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A Hugging Face folder: weights, configuration, tokenizer, chat template."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer, models

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(WORDS)}, []))
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in WORDS[:5]])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


@pytest.fixture
def command(target, tmp_path):
    prompts = ["hello", "a question", "some other words", "zebra", "what", "quite long a text"]
    lines = [json.dumps({"prompt": p.replace(" ", ""), "domain": "toy"}) for p in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers(required=True))

    def run(*more: str) -> int:
        fixed = [
            "--target",
            target,
            "--prompts",
            tmp_path / "prompts.jsonl",
            "-o",
            tmp_path / "out",
        ]
        fixed += ["--recipe", tmp_path / "recipe.toml", "--max-tokens", 24, "--slots", 3]
        fixed += ["--max-seq-len", 64, "--samples", 3, "--temperature", 2.0, "--threads", 1]
        args = parser.parse_args(["train", *more, *map(str, fixed)])
        return args.run(args)

    return run


def test_all_steps_at_once_then_refused_then_resumed(command, tmp_path):
    assert command() == 0
    out = tmp_path / "out"
    made = {p.name for p in (out / "drafter").iterdir()}
    assert made == {"README.md", "acceptance.json", "config.json", "model.safetensors"}
    with pytest.raises(InputError, match=r"answers\.jsonl exists: pass --resume to go on"):
        command()
    before = (out / "drafter" / "model.safetensors").read_bytes()
    assert command("--resume") == 0
    assert (out / "drafter" / "model.safetensors").read_bytes() == before


def test_steps_one_by_one(command, tmp_path):
    with pytest.raises(InputError, match=r"answers\.jsonl is missing: run the generate step first"):
        command("features")
    for step in ("generate", "features", "fit"):
        assert command(step) == 0
    assert (tmp_path / "out" / "drafter" / "config.json").is_file()


def test_a_step_that_does_not_exist(command):
    with pytest.raises(InputError, match="step 'cook': the steps are generate, features, fit"):
        command("cook")


def test_a_mask_token_must_be_named(command, tmp_path):
    (tmp_path / "recipe.toml").write_text("steps = 4\n")
    with pytest.raises(InputError, match="mask_token is missing or outside the vocabulary"):
        command()


def test_features_of_other_taps_are_refused(command, tmp_path):
    command("generate", "features")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("[0, 2]", "[1, 2]"))
    with pytest.raises(InputError, match=r"holds taps \[0, 2\] and mask token 4"):
        command("fit")


def test_without_torch_the_extra_is_named(command, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"pip install 'dflash-trt\[train\]'"):
        command("fit")
