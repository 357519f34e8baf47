"""The page about the runtime: its example runs, and its table has every option."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path

import pytest

from dflash_trt.runtime.options import GenerationOptions

PAGE = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text()


def test_the_example_runs(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(code.replace("engines/small", str(tiny_engine)), names)
    assert len(names["answer"].tokens) == 64
    assert [len(a.tokens) > 0 for a in names["answers"]] == [True, True]
    assert names["answer"].text in capsys.readouterr().out
    asyncio.run(names["show"]())
    assert capsys.readouterr().out
    assert names["runtime"].metrics.finished.total() == 5


def test_every_option_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert told == {field.name for field in fields(GenerationOptions)}
