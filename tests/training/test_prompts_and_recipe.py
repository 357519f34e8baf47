from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_trt.errors import InputError
from dflash_trt.training.prompts import (
    Prompt,
    code_prompts,
    functions_of,
    instruction_prompts,
    read_prompts,
    task_prompts,
    write_prompts,
)
from dflash_trt.training.recipe import Recipe, dump_recipe, load_recipe, resolve_taps

SOURCE = '''
def area(width: float, height: float = 1.0) -> float:
    """Return the area of a rectangle of the given width and height."""
    return width * height

def _private(x):
    """Return something that nobody outside of this module should want."""

class Box:
    def method(self):
        """Return something that only makes sense with the object at hand."""
'''


def test_functions_lose_their_bodies_and_keep_header_and_docstring():
    (text,) = functions_of(SOURCE)
    assert text.startswith('def area(width: float, height: float=1.0) -> float:\n    """ Return')
    assert "width * height" not in text
    assert list(functions_of("def broken(")) == []


def test_code_prompts_are_drawn_by_seed(tmp_path):
    for n in range(6):
        (tmp_path / f"m{n}.py").write_text(SOURCE.replace("area", f"area{n}"))
    some = code_prompts([tmp_path], 3, seed=1)
    assert len({p.prompt for p in some}) == 3
    assert some == code_prompts([tmp_path], 3, seed=1)
    assert {p.domain for p in some} == {"code"}


def test_written_prompts_are_all_different():
    prompts = [*task_prompts(), *instruction_prompts()]
    assert len({p.prompt for p in prompts}) == len(prompts) > 500


def test_prompts_files(tmp_path):
    path = tmp_path / "p.jsonl"
    write_prompts([Prompt("a\nb", "code")], path)
    assert read_prompts(path) == [Prompt("a\nb", "code")]
    path.write_text('{"question": "why?"}\n{"answer": "so"}\n')
    with pytest.raises(InputError, match=r"p\.jsonl:2 has neither 'prompt' nor 'question'"):
        read_prompts(path)


def test_a_recipe_survives_its_file(tmp_path):
    recipe = Recipe(taps=(1, 2), mask_token=4, optimizer="muon", start='a "b"', repeat={"a b": 2})
    path = tmp_path / "r.toml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour = 1", "unknown keys: colour"),
        ("steps = 0", "steps must be positive, got 0"),
        ("optimizer = 'sgd'", "optimizer 'sgd' is none of"),
        ("block = 1", "block must be at least 2, got 1"),
        ("reveal = 2.0", "reveal must lie in 0..1, got 2.0"),
        ("held_out = 1", "held_out must be at least 2, got 1"),
        ("repeat = {code = -1}", "repeat of 'code' must be 0 or more, got -1"),
        ("steps =", "is not TOML"),
    ],
)
def test_faults_in_a_recipe_are_named(tmp_path, text, said):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        load_recipe(path)


def test_taps_are_spread_up_to_the_last_layer_but_one():
    assert resolve_taps(Recipe(), 5, 30).taps == (1, 8, 14, 21, 28)
    assert resolve_taps(Recipe(), 1, 30).taps == (28,)
    given = replace(Recipe(), taps=(3, 4))
    assert resolve_taps(given, 5, 30) is given
