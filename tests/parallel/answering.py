"""Run as a program, by itself or under mpirun: `answering.py ENGINE` answers prompts with an engine.

Each rank prints one JSON object: `rank`; `memory`, bytes that its weights and caches take: private
memory and pages of the engine's files that loading and answering made resident (pages that processes
share count in parts, the tokenizer and libraries do not), and all rows of the caches, resident or not;
rank 0 also the `tokens` of each answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from dflash_trt.engines.directory import read_manifest
from dflash_trt.engines.mpi import join
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.engines.onnxruntime_ranks import RankPair
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.text import TextCodec

PROMPTS = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Explain what a prime number is.",
    "Write a Python function that adds two numbers.",
)


def resident(engine: Path) -> int:
    """Bytes of this process that are its own, or of files in `engine`."""
    maps = psutil.Process().memory_maps(grouped=False)
    return sum(m.pss for m in maps if not m.path.startswith("/") or str(engine) in m.path)


def load(engine: Path, ranks: int) -> OnnxRuntimePair:
    if ranks == 1:
        return OnnxRuntimePair(engine, threads=1)
    return RankPair(engine, join(engine, ranks), threads=1)


def main(engine: Path) -> None:
    manifest = read_manifest(engine, verify=False)
    codec = TextCodec(engine, manifest.chat_arguments)
    prompts = [codec.chat_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    before = resident(engine)
    pair = load(engine, manifest.tensor_parallel)
    rank = pair.mesh.rank if isinstance(pair, RankPair) else 0
    report: dict[str, object] = {"rank": rank}
    if rank and isinstance(pair, RankPair):
        pair.follow()
    else:
        runtime = Runtime(pair, codec)
        answers = [runtime.generate(prompt, GenerationOptions(32)) for prompt in prompts]
        report["tokens"] = [answer.tokens for answer in answers]
    report["memory"] = resident(engine) - before + pair.cache_bytes
    if isinstance(pair, RankPair):
        if rank == 0:
            pair.stop()
        pair.mesh.watch.close()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
