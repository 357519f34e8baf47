"""The prompts of the shipped SmolLM2-135M drafter: GSM8K questions, code to complete, instructions.

    python make_prompts.py gsm8k_train_5000.jsonl prompts.jsonl

The functions to complete are drawn from the standard library and from those of the packages below
that are installed, so another environment draws others; everything else is the same everywhere.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from pathlib import Path

from dflash_trt.training.prompts import (
    Prompt,
    code_prompts,
    instruction_prompts,
    read_prompts,
    task_prompts,
    write_prompts,
)

PACKAGES = ("numpy", "transformers", "networkx", "sympy", "matplotlib", "torch")
FUNCTIONS = 1500


def shuffled(prompts: list[Prompt], seed: int) -> list[Prompt]:
    random.Random(seed).shuffle(prompts)
    return prompts


def main(questions: Path, out: Path) -> None:
    paths = sysconfig.get_paths()
    packages = [Path(paths["purelib"]) / name for name in PACKAGES]
    folders = [Path(paths["stdlib"]), *(p for p in packages if p.exists())]
    math = [Prompt(p.prompt, "math") for p in read_prompts(questions)]
    code = shuffled(task_prompts(), 2) + code_prompts(folders, FUNCTIONS, seed=1)
    write_prompts([*math, *code, *shuffled(instruction_prompts(), 3)], out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
