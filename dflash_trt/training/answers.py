"""Answer files: one JSON line per answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dflash_trt.errors import InputError


@dataclass(frozen=True)
class Answer:
    """One answer of the target: ``prompt`` is the line number in the prompts file; no ``ids`` where
    what it said is not worth learning."""

    prompt: int
    sample: int
    domain: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


def read_answers(path: Path) -> Iterator[Answer]:
    """Whole lines of an answers file; a torn last line (killed writer) is not an answer."""
    known = {f.name for f in fields(Answer)}
    with path.open() as file:
        for number, line in enumerate(file):
            if not line.endswith("\n"):
                return
            raw = json.loads(line)
            if set(raw) != known:
                wrong = ", ".join(sorted(set(raw) ^ known))
                raise InputError(f"{path}:{number + 1} has missing or unknown keys: {wrong}")
            raw["prompt_ids"], raw["ids"] = tuple(raw["prompt_ids"]), tuple(raw["ids"])
            yield Answer(**raw)


def answer_line(answer: Answer) -> str:
    """The line that :func:`read_answers` reads back."""
    return json.dumps(asdict(answer), separators=(",", ":")) + "\n"
