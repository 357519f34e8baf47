"""Prompts to train on: code to complete, taken from Python sources, and short written tasks.

A prompts file is JSON lines ``{"prompt": the user's turn, "domain": "code"}``; ``question`` is read
as ``prompt``, and a missing domain as ``general``.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from dflash_trt.errors import InputError

DOC_CHARACTERS = range(40, 600)


@dataclass(frozen=True)
class Prompt:
    """One user turn and the domain it is measured under."""

    prompt: str
    domain: str = "general"


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, in order: the line number is the prompt's name everywhere else."""
    out = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        raw = json.loads(line)
        text = raw.get("prompt", raw.get("question"))
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}:{number} has neither 'prompt' nor 'question'")
        out.append(Prompt(text, raw.get("domain", "general")))
    return out


def write_prompts(prompts: Iterable[Prompt], path: Path) -> None:
    """Write what :func:`read_prompts` reads."""
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in prompts))


def functions_of(source: str) -> Iterator[str]:
    """Header and docstring of every documented function in a source text, body left out."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            doc = ast.get_docstring(node)
            if doc and len(doc) in DOC_CHARACTERS and not _is_method(node):
                yield _header(node, doc)


def _is_method(node: ast.FunctionDef) -> bool:
    first = node.args.posonlyargs + node.args.args
    return bool(first) and first[0].arg in ("self", "cls")


def _header(node: ast.FunctionDef, doc: str) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    indented = "\n".join(f"    {line}".rstrip() for line in doc.splitlines()).lstrip()
    text = f'def {node.name}({ast.unparse(node.args)}){returns}:\n    """ {indented}\n    """\n'
    typed = [name for name in ("List", "Dict", "Tuple", "Optional", "Any") if f"{name}[" in text]
    return f"from typing import {', '.join(typed)}\n\n\n{text}" if typed else text


def code_prompts(folders: Iterable[Path], count: int, seed: int) -> list[Prompt]:
    """``count`` different functions to complete, drawn from all .py files under ``folders``."""
    found = {
        text
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for text in functions_of(path.read_text(errors="ignore"))
    }
    rng = random.Random(seed)
    chosen = rng.sample(sorted(found), min(count, len(found)))
    return [Prompt(text, "code") for text in chosen]


_KINDS = {
    "numbers": ("List[int]", "a list of integers", "[3, 1, 4, 1, 5]"),
    "values": ("List[float]", "a list of floats", "[0.5, 2.0, -1.5]"),
    "words": ("List[str]", "a list of strings", "['pear', 'fig', 'apple']"),
    "text": ("str", "a string", "'hello world'"),
    "pairs": ("List[Tuple[int, int]]", "a list of pairs of integers", "[(1, 2), (3, 4)]"),
    "table": ("Dict[str, int]", "a dictionary from names to counts", "{'a': 1, 'b': 2}"),
}
_TASKS = (
    ("count_distinct", "int", "Return how many different elements {0} has."),
    ("reverse_order", None, "Return {0} in reverse order."),
    (
        "remove_duplicates",
        None,
        "Remove all duplicates from {0}, keeping the order of first occurrence.",
    ),
    ("most_common", "Any", "Find the element that occurs most often in {0}."),
    ("is_palindrome", "bool", "Check whether {0} reads the same forwards and backwards."),
    ("rotate_left", None, "Rotate {0} by k places to the left."),
    ("every_second", None, "Return every second element of {0}, starting with the first."),
    ("longest_run", "int", "Return the length of the longest run of equal neighbours in {0}."),
    (
        "split_in_half",
        "Tuple",
        "Split {0} into two halves; the first is longer when the length is odd.",
    ),
    ("largest_gap", "Any", "Find the two neighbours in {0} that differ the most and return them."),
    ("sort_by_length", None, "Sort {0} by the length of its elements written as text."),
    (
        "interleave",
        None,
        "Given {0} and another one of the same kind, take elements from each in turn.",
    ),
    (
        "has_close_pair",
        "bool",
        "Check if in {0} any two elements are closer to each other than a threshold.",
    ),
    ("filter_by", None, "Keep only those elements of {0} for which the given test is true."),
    ("running_maximum", None, "For {0}, return the largest element seen so far at each place."),
    (
        "sum_and_product",
        "Tuple",
        "Return the sum and the product of what is in {0}. Empty gives 0 and 1.",
    ),
    ("positions_of", "List[int]", "Return all positions at which a given element occurs in {0}."),
    ("is_sorted", "bool", "Check whether {0} is sorted in ascending order."),
    ("group_by_first", "Dict", "Group the elements of {0} by their first character or item."),
    ("smallest_missing", "int", "Return the smallest positive integer that does not occur in {0}."),
)
_ASKS = (
    "{0}",
    "Complete the following Python function.\n\n{0}",
    "Write a Python function `{1}` that takes {2}. {3}",
)


def task_prompts() -> list[Prompt]:
    """Every written task, over every kind of argument, asked in every way."""
    out = []
    for (name, returns, what), (argument, kind), ask in product(_TASKS, _KINDS.items(), _ASKS):
        annotation, described, example = kind
        sentence = what.format(described)
        header = f"def {name}({argument}: {annotation}) -> {returns or annotation}:"
        body = f'{header}\n    """ {sentence}\n    >>> {name}({example})\n    """\n'
        code = f"from typing import List, Tuple, Dict, Any\n\n\n{body}"
        out.append(Prompt(ask.format(code, name, described, sentence), "code"))
    return out


_ABOUT = (
    "the water cycle", "photosynthesis", "a good night's sleep", "learning to cook", "the Moon",
    "electric cars", "a rainy day", "how bread rises", "keeping a diary", "the Roman Empire",
    "compound interest", "gravity", "a small garden", "the history of chess", "volcanoes",
    "public libraries", "recycling", "learning a language", "honey bees", "time zones",
    "a job interview", "the human heart", "making friends", "wind energy", "saving money",
)  # fmt: skip
_DO = (
    "Explain {0} in simple terms.",
    "Give me five tips about {0}.",
    "Write a short paragraph about {0}.",
    "What are the most important facts about {0}?",
    "Write a short story that has to do with {0}.",
    "List the advantages and disadvantages of {0}.",
    "Write an email to a friend about {0}.",
    "Why does {0} matter?",
)


def instruction_prompts() -> list[Prompt]:
    """General instructions: every request about every subject."""
    return [Prompt(do.format(about), "general") for do, about in product(_DO, _ABOUT)]
