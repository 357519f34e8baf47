"""The loop: it learns, it resumes without a trace, and it notices a shift."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import toy

from dflash_trt.checkpoints import open_drafter
from dflash_trt.errors import InputError
from dflash_trt.training import fit as fit_module
from dflash_trt.training.acceptance import Acceptance
from dflash_trt.training.card import plot_curve, write_card
from dflash_trt.training.fit import (
    FitOptions,
    Trainer,
    fit,
    learning_rate,
    load_checkpoint,
    save_checkpoint,
    split,
)
from dflash_trt.training.objective import (
    Vocabulary,
    asked_slots,
    drafted_tokens,
    slot_weights,
)
from dflash_trt.training.zlab import load


def trainer(folder, shift=0, **changes) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(
        toy.recipe(**changes), toy.shape(), toy.store(folder, shift=shift), toy.weights()
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_repeating_pattern_is_learnt_to_nearly_the_whole_block(tmp_path, optimizer):
    rate = {"adamw": 3e-3, "muon": 2e-2}[optimizer]
    one = trainer(tmp_path / "store", optimizer=optimizer, learning_rate=rate)
    before = one.held_out_acceptance(10)["cycle"].tau
    out = tmp_path / "run"
    found = fit(one, FitOptions(out, measure_every=50, measure_sequences=10))
    assert before < 1.5
    assert found["cycle"].tau >= 3.6  # block 4; the last cycle of an answer is cut short
    write_card(out / "drafter", one.drafter.shape, one.recipe, one.store, found)
    plot_curve(out / "curve.csv", out / "curve.png")
    assert "| cycle |" in (out / "drafter" / "README.md").read_text()
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert load(out / "drafter").shape == one.drafter.shape


def test_choices_one_row_off_collapse_acceptance(tmp_path):
    """The silent fault: labels shifted by one. The pattern is then never accepted past a token."""
    one = trainer(tmp_path / "bad", shift=1, steps=60)
    for _ in range(60):
        one.step()
    good = trainer(tmp_path / "good", steps=60)
    good.drafter.load_state_dict(one.drafter.state_dict())
    assert good.held_out_acceptance(10)["cycle"].tau < 1.2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_equals_no_interruption(tmp_path, optimizer):
    whole = trainer(tmp_path / "a", optimizer=optimizer)
    losses = [whole.step()[0] for _ in range(14)]
    first = trainer(tmp_path / "b", optimizer=optimizer)
    resumed = [first.step()[0] for _ in range(6)]
    save_checkpoint(first, tmp_path / "run")
    second = trainer(tmp_path / "c", optimizer=optimizer)
    assert load_checkpoint(second, tmp_path / "run")
    resumed += [second.step()[0] for _ in range(8)]
    assert resumed == losses
    for a, b in zip(whole.drafter.parameters(), second.drafter.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_curve_of_a_resumed_run_is_that_of_a_whole_one(tmp_path):
    """Killed behind its checkpoint: what it measured there is measured again, not twice."""
    options = FitOptions(tmp_path / "run", measure_every=2, measure_sequences=2)
    one = trainer(tmp_path / "a", steps=4)
    fit(one, options)
    one.done = 5
    fit_module._measure_point(one, options, [(1.0, 1.0)], 0.0)
    with (options.folder / "curve.csv").open("a") as file:
        file.write("4")  # killed in a row
    again = trainer(tmp_path / "b", steps=4)
    fit(again, replace(options, resume=True))
    steps = [line.split(",")[0] for line in (options.folder / "curve.csv").open()]
    assert steps == ["step", "2", "4"]


def test_other_tokens_may_be_drafted_when_a_run_is_resumed(tmp_path):
    """Half of the pattern's twenty tokens: nothing else is drafted, and the weights stay."""
    options = FitOptions(tmp_path / "run", measure_every=100)
    one = trainer(tmp_path / "a")
    whole = fit(one, options)["cycle"].tau
    one.drafted = torch.arange(10, 20)
    assert 1.2 < one.held_out_acceptance(10)["cycle"].tau < whole - 1
    weights = (options.folder / "drafter" / "model.safetensors").read_bytes()
    other = trainer(tmp_path / "b", draft_vocabulary=10)
    part = fit(other, replace(options, resume=True))["cycle"].tau
    assert 1.2 < part < whole - 1
    assert (options.folder / "drafter" / "model.safetensors").read_bytes() == weights
    drafter = open_drafter(options.folder / "drafter")
    assert drafter.config.draft_vocab_size == 10
    ids = drafter.tensors.read("d2t") + np.arange(10)
    labels = np.bincount(one.store.greedy[one.store.greedy >= 0], minlength=toy.VOCAB)
    assert labels[ids].min() >= np.delete(labels, ids).max()
    fit(trainer(tmp_path / "c"), replace(options, resume=True))
    assert not open_drafter(options.folder / "drafter").config.token_map


def test_the_drafted_tokens_are_the_most_frequent_labels_then_the_lowest_ids():
    labels = np.array([-1, 7, 7, 4, 4, 4, 2], np.int32)
    assert drafted_tokens(labels, 9, 2).tolist() == [4, 7]
    assert drafted_tokens(labels, 9, 5).tolist() == [0, 1, 2, 4, 7]
    assert drafted_tokens(labels, 9, 0).tolist() == list(range(9))
    with pytest.raises(InputError, match="draft_vocabulary 10 exceeds the vocabulary of 9"):
        drafted_tokens(labels, 9, 10)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    save_checkpoint(trainer(tmp_path / "a"), tmp_path / "run")
    other = trainer(tmp_path / "b", seed=5)
    with pytest.raises(InputError, match="was made with another recipe"):
        load_checkpoint(other, tmp_path / "run")


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(tmp_path):
    a, b, c = (trainer(tmp_path / n, seed=s) for n, s in (("a", 0), ("b", 0), ("c", 1)))
    assert a.step() == b.step()
    assert a.step() != c.step()


def test_anchors_are_drawn_anew_in_every_epoch(tmp_path, monkeypatch):
    one = trainer(tmp_path, anchors=2, sequences=4)
    same = [one.train[i : i + 4] for i in range(0, len(one.train), 4)]
    monkeypatch.setattr(fit_module, "plan_epoch", lambda *_: same)
    first = one.batch().anchors
    one.done += len(same)
    assert not torch.equal(one.batch().anchors, first)


def test_held_out_prompts_are_never_trained_on(tmp_path):
    store = toy.store(tmp_path)
    train, held = split(store, toy.recipe())
    assert {s.prompt for s in held} == {4, 9, 14, 19}
    assert not {s.prompt for s in train} & {s.prompt for s in held}


def test_domains_are_repeated_as_the_recipe_says(tmp_path):
    store = toy.store(tmp_path)
    once, held = split(store, toy.recipe())
    thrice, held_too = split(store, toy.recipe(repeat={"cycle": 3}))
    assert [s.prompt for s in thrice] == [s.prompt for s in once for _ in range(3)]
    assert held_too == held
    with pytest.raises(InputError, match="domains without answers: poetry"):
        split(store, toy.recipe(repeat={"poetry": 2}))


def test_going_on_from_a_drafter_of_another_shape_is_refused(tmp_path):
    out = tmp_path / "run"
    fit(trainer(tmp_path / "a", steps=1), FitOptions(out))
    start = str(out / "drafter")
    again = trainer(tmp_path / "b", start=start)
    assert torch.equal(again.drafter.fc.weight, load(out / "drafter").fc.weight)
    with pytest.raises(InputError, match="the recipe asks for"):
        Trainer(replace(again.recipe, block=3), toy.shape(block=3), again.store, toy.weights())


def test_learning_rate_warms_up_then_falls_along_a_cosine():
    recipe = toy.recipe(warmup=10, steps=110, learning_rate=1.0, final_rate=0.1)
    rates = [learning_rate(recipe, s) for s in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)


def test_slot_weights_are_the_published_ones():
    expected = [0.0, 1.0, np.exp(-1 / 4), np.exp(-2 / 4)]
    assert slot_weights(4, 4.0).tolist() == pytest.approx(expected)


def test_the_softmax_holds_all_seen_tokens_and_some_unseen():
    recipe = toy.recipe(negatives=3)
    vocabulary = Vocabulary.of(np.array([-1, 4, 2], np.int32), 10, recipe)
    drawn = vocabulary.draw(np.random.default_rng(0)).tolist()
    assert drawn[:2] == [2, 4]
    assert len(set(drawn)) == 5
    full = Vocabulary.of(np.array([1], np.int32), 10, toy.recipe(full_vocabulary=True))
    assert full.draw(np.random.default_rng(0)).tolist() == list(range(10))


def replayed(hits: list[list[int]], block: int = 3) -> Acceptance:
    found = Acceptance(block)
    found.replay(np.asarray(hits, bool), first=0)
    return found


def test_replay_walks_the_cycles():
    """Rejected at once, all accepted, and cut short by the end of the answer."""
    found = replayed([[0, 1], [1, 1], [0, 0], [0, 0], [1, 0]])
    # anchor 0: nothing accepted, 1 token; anchor 1: two accepted, 3 tokens; anchor 4: last token
    assert (found.cycles, found.tokens) == (3, 5)
    assert found.tau == pytest.approx(5 / 3)
    assert found.asked.tolist() == [0, 3, 2]
    assert found.right.tolist() == [0, 2, 1]


def test_steps_on_the_first_slots_alternate_with_whole_blocks(tmp_path):
    one = trainer(tmp_path, slots=2, whole_every=3, anchors=8)
    shapes = []
    for _ in range(6):
        shapes.append(tuple(one.batch().labels.shape[1:]))
        one.done += 1
    assert shapes == [(4, 4), (8, 2), (8, 2)] * 2


def test_the_teacher_is_asked_for_the_row_before_each_slot(tmp_path):
    """A shift would teach the token beside the right one."""
    one = trainer(tmp_path, steps=1)
    one.teacher = lambda last_tap: teaching(one, last_tap)
    batch = one.batch()
    chosen = torch.arange(toy.VOCAB)
    asked = asked_slots(batch, chosen, toy.VOCAB, 4.0)
    taught = one._taught(batch.taps.float(), batch, asked)
    assert torch.equal((taught @ one.head.T).argmax(-1), asked.labels)


def teaching(one: Trainer, last_tap: torch.Tensor) -> torch.Tensor:
    """Hidden states whose argmax is the token that follows: found by the tap of each token."""
    taps, tokens = np.asarray(one.store.taps)[:, -toy.HIDDEN :], np.asarray(one.store.tokens)
    known = torch.from_numpy(taps.view(np.int16).copy()).view(torch.bfloat16).float()
    distance = torch.cdist(last_tap, known[None])
    following = (torch.from_numpy(tokens.astype(np.int64)) + 1) % toy.PERIOD
    return one.head[following[distance.argmin(-1)]] * 10


def test_distilling_needs_a_tap_near_the_end(tmp_path):
    with pytest.raises(InputError, match=r"distill needs the layers \[2\] behind the last tap"):
        trainer(tmp_path, distill=0.5)
