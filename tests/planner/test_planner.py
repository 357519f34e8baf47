"""The planner against published measurements, and what a roofline must obey."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.errors import InputError
from dflash_trt.planner.acceptance import acceptance_length, from_length
from dflash_trt.planner.calibration import (
    GRAPHS,
    SGLANG,
    fit_error,
    modelled_rate,
    modelled_speedup,
)
from dflash_trt.planner.fit import fits, ranks_that_fit
from dflash_trt.planner.hardware import GPUS, find_gpu
from dflash_trt.planner.interactivity import CurvePoint, curves, throughput_at
from dflash_trt.planner.published import POINTS, RATIOS, Point, Ratio
from dflash_trt.planner.roofline import Setting, best, cycle, memory_needed
from dflash_trt.planner.shapes import PLANS, find_plan


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
    assert both.throughput_ratio(0.97 * both.plain_end) > 40
    assert both.throughput_ratio(both.plain_end * 1.1) == float("inf")


def test_experts_touched() -> None:
    target = find_plan("gpt-oss-120b").target
    assert target.touched_experts(1) == pytest.approx(4)
    assert target.touched_experts(10_000) == pytest.approx(128)
    billions = (target.active_weights + target.head_weights) / 1e9
    assert billions == pytest.approx(5.7, abs=0.6)  # 5.1 active without the embedding


def test_what_a_pass_reads_and_computes() -> None:
    """Qwen3-8B in bf16: 7.57e9 weights but the embedding, 147,456 bytes of cache per token."""
    s = setting("qwen3-8b", batch=4, block=8)
    step, verify = cycle(s, 4.0).step, cycle(s, 4.0).verify
    assert step.weight_bytes == verify.weight_bytes == pytest.approx(2 * 7.57e9, rel=0.01)
    assert step.cache_bytes == verify.cache_bytes == 4 * 2048 * 147_456
    attention = 4 * 2048 * 4096 * 36  # operations per token
    assert step.operations == pytest.approx(4 * (2 * 7.57e9 + attention), rel=0.01)
    assert verify.operations == pytest.approx(8 * step.operations)
    draft = cycle(s, 4.0).draft  # five layers, the projection of five taps, the lm_head
    assert draft.weight_bytes == pytest.approx(2 * (0.965e9 + 0.084e9 + 0.622e9), rel=0.01)
    assert draft.cache_bytes == 4 * 2048 * 20_480
    for one in (step, verify, draft):
        bandwidth = SGLANG.e_bw * s.gpu.bandwidth
        assert one.memory == pytest.approx((one.weight_bytes + one.cache_bytes) / bandwidth)
        assert one.compute == pytest.approx(one.operations / (SGLANG.e_ops * s.gpu.bf16))
    assert verify.launches == pytest.approx(36 * SGLANG.layer + SGLANG.pass_)
    moe = cycle(setting("gpt-oss-120b", "b300", batch=2, block=10, ranks=8), 4.0)
    assert moe.verify.experts == pytest.approx(128 * (1 - (124 / 128) ** 20))
    summed = 20 * 2880 * 2  # bytes, of bf16
    each = SGLANG.reduce + 2 * summed / find_gpu("b300").link
    assert moe.verify.collectives == pytest.approx(2 * 36 * each)
    assert moe.draft.collectives == 0


def test_acceptance_over_the_block() -> None:
    """The card of the gpt-oss-120b drafter gives acceptance lengths at blocks of 4, 6 and 10: from
    the last, the others follow."""
    for at_10, *others in ((5.3, 3.3, 4.3), (4.4, 3.1, 3.8), (3.7, 2.7, 3.3)):
        shares = from_length(at_10, 10)
        assert acceptance_length(shares, 10) == pytest.approx(at_10)
        for block, published in zip((4, 6), others, strict=True):
            assert acceptance_length(shares, block) == pytest.approx(published, rel=0.06)
    assert acceptance_length([0.5, 0.25, 0.1], 3) == 1.75
    with pytest.raises(InputError, match="block 5: acceptance was measured for 3 drafted slots"):
        acceptance_length([0.5, 0.25, 0.1], 5)
    with pytest.raises(InputError, match="tau 9: a block of 8 commits 1 to 8 tokens"):
        from_length(9, 8)


def test_the_fastest_block_and_precision() -> None:
    """It is the best of all that can be chosen; shorter where batches are large, none where nothing
    is accepted, and nothing that does not fit."""
    shares = from_length(4.4, 16)
    found = best(setting(batch=128), shares)
    rates = [
        cycle(setting(batch=128, block=b, precision=p), acceptance_length(shares, b)).dflash_rate
        for b in range(2, 17)
        for p in ("bf16", "fp8", "nvfp4")
    ]
    alone = best(setting(batch=1), shares)
    assert found
    assert alone
    assert found.rate == max(rates)
    assert 1 < found.block < alone.block
    nothing = best(setting(batch=8), from_length(1.0, 16))
    assert nothing
    assert (nothing.block, nothing.tau) == (1, 1.0)
    small = best(replace(setting(), gpu=replace(find_gpu("gb10"), memory=12e9)), shares)
    assert small
    assert small.precision == "nvfp4"
    assert best(replace(setting(), gpu=replace(find_gpu("gb10"), memory=1e9)), shares) is None
    older = best(replace(setting(), gpu=find_gpu("h200")), shares)
    assert older
    assert older.precision == "fp8"
    experts = best(replace(setting(), plan=find_plan("gpt-oss-120b")), shares)
    assert experts
    assert experts.precision == "mxfp4"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("target", PLANS)
def test_every_target_can_be_planned_on_every_gpu(
    target: str, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where large batches, or the target itself, do not fit."""
    assert main(["plan", "--target", target, "--gpu", gpu, "--tau", "3"]) == 0
    assert "MODELLED: fastest block and precision" in capsys.readouterr().out


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
    for ranks, use in ((16, 8), (5, 4)):
        with pytest.raises(InputError, match=f"tp {ranks}: .* 8 key/value heads, .* use {use}"):
            setting(ranks=ranks)
    with pytest.raises(InputError, match="ranks are at least 1"):
        setting(ranks=0)
    with pytest.raises(InputError, match="precision 'int3'"):
        setting(precision="int3")


def test_the_command_marks_its_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["plan", "--target", "gpt-oss-120b", "--gpu", "b200"]
    assert main([*arguments, "--tau", "4.4"]) == 0
    out = capsys.readouterr().out
    assert "MODELLED: gpt-oss-120b" in out
    assert out.count("MODELLED") == 4
    for part in ("per GPU: fits", "experts", "are floor: launches of the draft", "data sheet"):
        assert part in out
    assert "\u2026" not in out  # nothing is cut off at 80 columns
    measured = tmp_path / "figures.json"
    measured.write_text('{"acceptance_per_slot": [0.8, 0.5]}')
    assert main([*arguments, "--acceptance", str(measured), "--block", "3"]) == 0
    assert "block 3, acceptance length 2.3" in capsys.readouterr().out
    measured.write_text("[]")
    assert main([*arguments, "--acceptance", str(measured)]) == 2
    assert "figures.json: holds no acceptance_per_slot" in capsys.readouterr().err


def test_the_command_shows_the_models_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Every column of the first table and of both passes, and what the floor is made of."""
    s = setting("gpt-oss-120b", "b200", ranks=8)
    arguments = ["plan", "--target", "gpt-oss-120b", "--gpu", "b200", "--tau", "4.4", "--tp", "8"]
    assert main(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    both = curves(s, 4.4, (1, 64))
    for c, plain, dflash in zip(both.cycles, both.plain, both.dflash, strict=True):
        cells = [f"{c.batch}", f"{c.step.seconds * 1e3:.2f}", f"{c.seconds * 1e3:.2f}"]
        cells += [f"{c.cost:.2f}", f"{c.speedup:.2f}"]
        cells += [f"{p.interactivity:.0f}" for p in (plain, dflash)]
        cells += [f"{p.throughput:.0f}" for p in (plain, dflash)]
        assert " ".join(cells) + f" {c.verify.bound}" in out
        for p in (c.verify, c.draft):
            cells = [f"{c.batch}", f"{p.weight_bytes / 1e9:.2f}", f"{p.cache_bytes / 1e9:.2f}"]
            cells += [f"{p.experts:.1f}" if p.experts else "-", f"{p.operations / 1e12:.2f}"]
            times = (p.memory, p.compute, p.launches, p.collectives, p.seconds)
            assert " ".join([*cells, *(f"{1e3 * time:.2f}" for time in times)]) in out
    one = both.cycles[0]
    parts = one.draft.launches, one.verify.launches, one.verify.collectives, one.host
    draft, verify, sums, host = (f"{1e3 * part:.2f}" for part in parts)
    assert (
        f"{1e3 * sum(parts):.2f} ms are floor: launches of the draft {draft}, launches of the "
        f"verify {verify}, all-reduces {sums}, host {host}" in out
    )


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


def test_the_page_shows_what_is_modelled() -> None:
    """Every row of the table against published points, and both statements about ratios."""
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    rates = [(p, p.rate, modelled_rate(p, SGLANG), "") for p in POINTS]
    ratios = [(r, r.speedup, modelled_speedup(r, SGLANG), "x") for r in RATIOS]
    for point, published, modelled, unit in (*rates, *ratios):
        digits = 2 if unit else 1 if published < 100 else 0
        error = 100 * (modelled / published - 1)
        fitted = "fitted" if point.fit else "kept out"
        row = f"{published}{unit} | {modelled:.{digits}f}{unit} | {error:+.0f}% | {fitted} |"
        assert f"| {point.label} | {row}" in page
    both = curves(setting("gpt-oss-120b", "b300", ranks=8, software=GRAPHS), 4.4, range(1, 257))
    shares = ((0.7, "5.8x"), (0.8, "9.8x"), (0.85, "13x"), (0.9, "19x"), (0.95, "33x"))
    for share, shown in shares:
        ratio = both.throughput_ratio(share * both.plain_end)
        assert shown == (f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x")
        assert f"| {shown} |" in page
    assert all(2.3 <= round(c.speedup, 1) <= 2.4 for c in both.cycles if 4 <= c.batch <= 32)
    hopeful = replace(SGLANG, e_moe=SGLANG.e_ops)
    errors = [round(100 * (modelled_speedup(r, hopeful) / r.speedup - 1)) for r in RATIOS[2:]]
    assert errors == [39, 80]
    assert "too hopeful by 39% at batch 16\nand 80% at batch 32" in page
