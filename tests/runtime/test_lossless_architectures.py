"""Speculative equals autoregressive on gpt-oss, Qwen3 and a windowed drafter, drafted by an oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.runtime.cycle import Cycle, Lane
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from tests import tiny, tiny_gpt_oss
from tests.models.test_architectures import tiny_qwen3
from tests.models.test_drafter_kinds import WINDOW, YARN, biased_drafter, speculators_drafter
from tests.runtime.test_lossless import Oracle, chooser, plain_tokens, start

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}


def build(target: Path, drafter: Path, out: Path) -> Path:
    options = BuildOptions("t", block=8, max_seq_len=256)
    build_cpu(open_target(target), open_drafter(drafter), options, out)
    return out


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("architectures")
    pairs = {
        "gpt-oss": (
            tiny_gpt_oss.tiny_gpt_oss(folder / "gpt-oss"),
            biased_drafter(folder / "d1", rope_scaling=YARN, **SLIDING),
        ),
        "qwen3": (tiny_qwen3(folder / "qwen3"), speculators_drafter(folder / "d2")[0]),
    }
    return {name: build(*pair, folder / f"{name}.engine") for name, pair in pairs.items()}


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3"])
def test_an_oracle_right_up_to_a_random_slot(engines: dict[str, Path], name: str) -> None:
    """Accepted runs of every length 0 .. 7 happen, and the tokens stay the target's."""
    oracle, random, seen = Oracle(engines[name]), np.random.default_rng(0), set()
    for size in (1, 40):  # behind the window of 8 from the start, and not
        prompt = random.integers(0, 256, size).tolist()
        truth = plain_tokens(oracle, prompt, 100)
        oracle.follow(truth, size, random)
        oracle.release(0)
        cycle, lane = Cycle(oracle), Lane(0, 8, chooser(prompt))
        tokens = [start(cycle, lane, prompt)]
        while len(tokens) < 80:
            (step,) = cycle.step([lane])
            seen.add(step.accepted)
            tokens += step.committed
        assert tokens[:80] == truth[:80]
    assert seen == set(range(8))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3"])
def test_an_untrained_drafter(engines: dict[str, Path], name: str) -> None:
    runtime, random = Runtime.load(engines[name]), np.random.default_rng(1)
    for size in (1, 30):
        prompt = random.integers(0, 256, size).tolist()
        drafted = runtime.generate(prompt, GenerationOptions(50, ignore_eos=True))
        plain = runtime.generate(prompt, GenerationOptions(50, draft=False, ignore_eos=True))
        assert drafted.tokens == plain.tokens
        assert len(drafted.tokens) == 50


def test_padding_is_never_generated(tmp_path: Path) -> None:
    """32 rows of the lm_head belong to no token, and would win every time."""
    from safetensors.numpy import load_file, save_file

    target = tiny.tiny_target(tmp_path / "t", vocab_size=320)
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"][tiny.VOCAB :] *= 100
    save_file(tensors, target / "model.safetensors")
    engine = build(target, tiny.tiny_drafter(tmp_path / "d", vocab_size=320), tmp_path / "e")
    result = Runtime.load(engine).generate([1, 2, 3], GenerationOptions(40, ignore_eos=True))
    assert max(result.tokens) < tiny.VOCAB
