"""The planner against published measurements, and what a roofline must obey."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_trt.cli import main
from dflash_trt.errors import InputError
from dflash_trt.planner.calibration import (
    GRAPHS,
    SGLANG,
    fit_error,
    modelled_rate,
    modelled_speedup,
)
from dflash_trt.planner.fit import fits, ranks_that_fit
from dflash_trt.planner.hardware import find_gpu
from dflash_trt.planner.interactivity import CurvePoint, curves, throughput_at
from dflash_trt.planner.published import POINTS, RATIOS, Point, Ratio
from dflash_trt.planner.roofline import Setting, cycle, memory_needed
from dflash_trt.planner.shapes import find_plan


def setting(plan: str = "qwen3-8b", gpu: str = "b200", **changes: object) -> Setting:
    p = find_plan(plan)
    return replace(
        Setting(p, find_gpu(gpu), SGLANG, p.precision, batch=1, context=2048, block=p.block),
        **changes,
    )


def test_at_least_half_of_the_points_are_kept_out() -> None:
    for published in (POINTS, RATIOS):
        assert sum(p.fit for p in published) * 2 <= len(published)


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.label)
def test_published_rates(point: Point) -> None:
    tolerance = 0.03 if point.fit else 0.15
    assert modelled_rate(point, SGLANG) == pytest.approx(point.rate, rel=tolerance)


def test_the_constants_are_the_fit() -> None:
    """Moving any constant by a tenth makes the fit worse."""
    fitted = [p for p in POINTS if p.fit]
    best = fit_error(fitted, SGLANG)
    for name in ("e_ops", "layer", "host"):
        for factor in (0.9, 1.1):
            moved = replace(SGLANG, **{name: getattr(SGLANG, name) * factor})
            assert fit_error(fitted, moved) > best


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda r: r.label)
def test_published_speedups_of_a_moe(ratio: Ratio) -> None:
    tolerance = 0.01 if ratio.fit else 0.15
    assert modelled_speedup(ratio, SGLANG) == pytest.approx(ratio.speedup, rel=tolerance)


def test_experts_cost_a_dense_model_nothing() -> None:
    slow = replace(SGLANG, e_moe=SGLANG.e_moe / 2)
    dense, moe = setting(batch=8), setting("gpt-oss-120b", "h200", batch=8)
    assert cycle(replace(dense, software=slow), 4.0) == cycle(dense, 4.0)
    assert cycle(replace(moe, software=slow), 4.0).cost > 1.1 * cycle(moe, 4.0).cost


def test_equal_concurrency_and_equal_interactivity() -> None:
    """NVIDIA, gpt-oss-120b on eight B300: 2.3x at equal concurrency, over 15x at 500 to 600
    tokens/s/user. One set of constants gives both: the second ratio grows without bound towards the
    interactivity where plain decoding ends."""
    s = setting("gpt-oss-120b", "b300", ranks=8, software=GRAPHS)
    both = curves(s, 4.4, range(1, 257))
    at_32 = next(c for c in both.cycles if c.batch == 32)
    assert at_32.speedup == pytest.approx(2.3, rel=0.15)
    assert both.plain_end == pytest.approx(650, rel=0.05)
    assert both.throughput_ratio(0.7 * both.plain_end) < 8
    assert 10 < both.throughput_ratio(570) < 20
    assert both.throughput_ratio(0.97 * both.plain_end) > 30
    assert both.throughput_ratio(both.plain_end * 1.1) == float("inf")


def test_experts_touched() -> None:
    target = find_plan("gpt-oss-120b").target
    assert target.touched_experts(1) == pytest.approx(4)
    assert target.touched_experts(10_000) == pytest.approx(128)
    billions = (target.active_weights + target.head_weights) / 1e9
    assert billions == pytest.approx(5.7, abs=0.6)  # 5.1 active without the embedding


def test_more_of_anything_takes_longer() -> None:
    base = cycle(setting(), 4.0)
    for change in ({"batch": 8}, {"context": 8192}, {"gpu": find_gpu("gb10")}):
        more = cycle(replace(setting(), **change), 4.0)
        assert more.seconds > base.seconds
        assert more.step.seconds > base.step.seconds
    assert memory_needed(setting(batch=8)) > memory_needed(setting())


def test_curves_are_read_between_their_points() -> None:
    curve = [CurvePoint(1, 100.0, 100.0), CurvePoint(4, 50.0, 200.0)]
    assert throughput_at(curve, 75.0) == pytest.approx(150.0)
    assert throughput_at(curve, 10.0) == 200.0
    assert throughput_at(curve, 101.0) == 0.0


def test_refusals() -> None:
    for name, find in (("a100", find_gpu), ("gpt-2", find_plan)):
        with pytest.raises(InputError, match=f"'{name}': the planner knows"):
            find(name)
    with pytest.raises(InputError, match="gb10: has no link for 2 ranks"):
        setting(gpu="gb10", ranks=2)
    with pytest.raises(InputError, match="tp 16: qwen3-8b has 8 key/value heads"):
        setting(ranks=16)
    with pytest.raises(InputError, match="precision 'int3'"):
        setting(precision="int3")


def test_the_command_marks_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--target", "gpt-oss-120b", "--gpu", "b200", "--tau", "4.4"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "MODELLED: gpt-oss-120b" in out
    assert "per GPU: fits" in out
    assert "ranks meet" not in out


def test_the_command_says_what_several_gpus_hold_and_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gpt-oss-120b, by hand: 1.94 GB of attention and router, 60.9 GB of experts in MXFP4, 1.16 GB of
    lm_head are cut; an embedding and an lm_head, 2.32 GB, 1.57 GB of drafter layers and 34 MB of its
    caches are on every GPU."""
    arguments = ["plan", "--target", "gpt-oss-120b", "--gpu", "h200", "--tau", "4.4", "--tp", "8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "per GPU: fits: 11.9 GB of 141 GB" in out
    assert (
        "--tp on h200: 1 fits (66.9 GB per GPU); 2 fits (36.0 GB per GPU); "
        "4 fits (20.0 GB per GPU); 8 fits (11.9 GB per GPU)" in out
    )
    assert "ranks meet 73 times in a cycle: 72 sums of 57.6 kB, a gathering of 80 bytes" in out


def test_which_numbers_of_gpus_fit() -> None:
    sizes = {1: 200e9, 2: 110e9, 4: 60e9}

    def needed(ranks: int) -> float:
        if ranks not in sizes:
            raise InputError("not so many heads")
        return sizes[ranks]

    assert ranks_that_fit(needed, find_gpu("b200")) == (
        "--tp on b200: 1 does NOT fit (200.0 GB per GPU); 2 fits (110.0 GB per GPU); "
        "4 fits (60.0 GB per GPU); 8 cannot be"
    )
    assert not fits(170e9, find_gpu("b200")), "a tenth is kept free"
