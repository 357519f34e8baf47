"""The drafting race: the written formula, the race that is drawn, and the race of real engines."""

from __future__ import annotations

import os
import pty
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_trt.bench.race import Course, Leg, Racer, gap, race_engines
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime

EXAMPLE = Path(__file__).parents[2] / "examples" / "drafting_race.py"
PROMPT = [5, 6, 7, 8, 9]


def test_the_gap_is_the_formula() -> None:
    assert Course().gap == pytest.approx(20 / 14)
    assert Course(drafts=16).gap == 2.0
    assert Course(drafts=16, passes=16).gap == 1.0  # a block drafter with a pass per token


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_acceptance_changes_the_length_of_the_race_and_not_the_gap(acceptance: float) -> None:
    course = Course(acceptance=acceptance)
    sequential, block = course.run(20_000)
    assert [leg.committed for leg in sequential.legs] == [leg.committed for leg in block.legs]
    assert gap(sequential, block) == pytest.approx(course.gap)
    per_cycle = block.tokens / len(block.legs)
    assert per_cycle == pytest.approx(course.acceptance_length, rel=0.03)
    assert course.acceptance_length == {0.0: 1.0, 0.5: 511 / 256, 1.0: 9.0}[acceptance]


def test_a_seed_is_a_race() -> None:
    course = Course()
    assert course.run(50, seed=1) == course.run(50, seed=1) != course.run(50, seed=2)


def test_where_a_racer_is() -> None:
    racer = Racer("sequential", 4, (Leg(4.0, 2.0, 3), Leg(4.0, 2.0, 1)))
    assert racer.at(0.0) == (0, "drafting 1/4")
    assert racer.at(3.5) == (0, "drafting 4/4")
    assert racer.at(4.5) == (0, "verifying")
    assert racer.at(6.0) == (3, "drafting 1/4")
    assert racer.at(12.0) == (4, "done")


def test_refusals() -> None:
    for values, words in (
        ({"drafts": 0}, "drafts 0: must be 1 or more"),
        ({"passes": 9}, "passes 9: more than the 8 drafted tokens"),
        ({"acceptance": 1.5}, r"acceptance 1\.5: must be 0 to 1"),
    ):
        with pytest.raises(InputError, match=words):
            Course(**values)


def test_engines_race_to_the_same_tokens(tiny_engine: Path) -> None:
    """Both ways commit what the runtime does; one is called once per cycle, the other per token."""
    engines = Runtime.load(tiny_engine).engines
    calls: list[int] = []
    original = engines.draft

    def draft(slots: tuple[int, ...], count: int) -> None:
        calls.append(count)
        original(slots, count)

    engines.draft = draft  # type: ignore[method-assign]
    sequential, block, tokens = race_engines(engines, PROMPT, 24)
    expected = Runtime.load(tiny_engine).generate(PROMPT, GenerationOptions(24))
    assert tokens[: len(expected.tokens)] == expected.tokens
    assert [leg.committed for leg in sequential.legs] == [leg.committed for leg in block.legs]
    assert (sequential.calls, block.calls) == (7, 1)
    timed = len(block.legs)
    assert calls[-timed:] == [7] * timed
    assert calls[-9 * timed : -timed] == [1, 1, 1, 1, 1, 1, 1, 7] * timed
    assert sum(leg.draft for leg in sequential.legs) > sum(leg.draft for leg in block.legs)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return int(end.value.code or 0)


def test_without_a_terminal_there_is_only_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--drafts", 16) == 0
    shown = capsys.readouterr().out
    assert "(16 + 12) / (2 + 12) = 2.00x" in shown
    assert "expected tokens per cycle (1 - a^(K+1)) / (1 - a) = 4.89" in " ".join(shown.split())
    assert "\x1b" not in shown
    slow, fast = (rows(shown)[name] for name in ("sequential", "block"))
    assert (slow[:3], fast[:3]) == ([16, 16, 12], [2, 2, 12])  # calls, draft, verify
    for calls, draft, verify, cycles, tokens, each, whole, ratio in (slow, fast):
        assert whole == cycles * (draft + verify)
        assert each == pytest.approx(tokens / cycles, abs=0.01)
        assert ratio == (2 if calls == 16 else 1)


def rows(shown: str) -> dict[str, list[float]]:
    """Numbers of the table of results, by drafter."""
    cells = [line.split() for line in shown.splitlines()]
    return {
        c[0]: [float(number.rstrip("x")) for number in c[1:]]
        for c in cells
        if c and c[0] in ("sequential", "block") and len(c) == 9
    }


def test_the_measured_race_is_told_in_milliseconds(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tiny_engine, "--tokens", 16) == 0
    shown = capsys.readouterr().out
    assert "MEASURED" in shown
    slow, fast = (rows(shown)[name] for name in ("sequential", "block"))
    for _, draft, verify, cycles, _, _, whole, _ in (slow, fast):
        assert whole == pytest.approx(cycles * (draft + verify), abs=0.5 + 0.01 * cycles)
    numbers = re.findall(r"[\d.]+(?= ms|x)", shown[shown.index("a call for one") :])
    token, block, verify, *_, expected, ratio = map(float, numbers)
    assert token == pytest.approx(slow[1] / 7, abs=0.01)
    assert (block, verify) == pytest.approx((fast[1], (slow[2] + fast[2]) / 2), abs=0.011)
    assert expected == pytest.approx((7 * token + verify) / (block + verify), rel=0.15)
    assert ratio == pytest.approx(slow[7], abs=0.011)


def test_bad_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--acceptance", 2) == 2
    assert capsys.readouterr() == ("", "drafting_race: acceptance 2: must be 0 to 1\n")


def test_a_terminal_shows_the_race_and_survives_an_interrupt() -> None:
    """The tracks differ without colour, and the cursor is back when the race is broken off."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, EXAMPLE, "--seconds", "60"],
        stdout=theirs, stderr=theirs, env=os.environ | {"NO_COLOR": "1", "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in the background
    )  # fmt: skip
    os.close(theirs)
    seen, end = b"", time.monotonic() + 120
    while b"verifying" not in seen or b"#" not in seen:
        assert time.monotonic() < end
        seen += os.read(mine, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(mine, 4096):
            seen += chunk
    except OSError:  # the other side is closed
        pass
    assert process.wait(60) == 130
    assert b"= " in seen or b"=." in seen
    assert b"\x1b[?25h" in seen.rpartition(b"\x1b[?25l")[2]
    assert b"drafting_race: interrupted" in seen
    assert b"Traceback" not in seen
    os.close(mine)
