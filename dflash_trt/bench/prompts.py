"""Prompt files: one JSON object per line, with `prompt`, `question` or `messages`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

from dflash_trt.errors import InputError
from dflash_trt.runtime.text import Message


def read_prompts(path: Path, limit: int | None = None) -> list[str | Sequence[Message]]:
    """The user turns or message lists of a file, at most `limit`; empty lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    prompts = [_prompt(line, f"{path}, line {n}") for n, line in numbered[:limit]]
    if not prompts:
        raise InputError(f"{path}: holds no prompt")
    return prompts


def lengthened(
    prompts: Sequence[str | Sequence[Message]], tokens: int, count: Callable[[str], int]
) -> list[str | Sequence[Message]]:
    """Each prompt behind as many words of the others as bring it to about `tokens` tokens, by
    `count`; none is shortened. Words of real text, for random ones say nothing about acceptance."""
    texts = [p for p in prompts if isinstance(p, str)]
    if len(texts) < len(prompts):
        raise InputError("isl: message lists are not lengthened; give prompts of one text")
    words = " ".join(texts).split()
    rate = (count(" ".join(words * 2)) - count(" ".join(words))) / len(words)
    made: list[str | Sequence[Message]] = []
    for text in texts:
        missing = max(0, round((tokens - count(text)) / rate))
        made.append(" ".join([*islice(cycle(words), missing), text]))
    return made


def _prompt(line: str, origin: str) -> str | Sequence[Message]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{origin}: is not JSON ({error})") from None
    if isinstance(value, dict):
        for key, kind in (("messages", list), ("prompt", str), ("question", str)):
            if isinstance(value.get(key), kind) and value[key]:
                return value[key]
    raise InputError(f"{origin}: has neither 'prompt' nor 'question' nor 'messages'")
