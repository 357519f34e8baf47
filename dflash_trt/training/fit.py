"""The training loop. All randomness of a step comes from (seed, step): a run that was killed and
resumed from its checkpoint takes the same steps as one that was not."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_trt.errors import InputError
from dflash_trt.training import zlab
from dflash_trt.training.acceptance import Acceptance, measure
from dflash_trt.training.blocks import Batch, anchor_range, draw_anchors, make_batch
from dflash_trt.training.drafter import Drafter, DrafterShape, block_positions, warm_start
from dflash_trt.training.objective import (
    Asked,
    Vocabulary,
    asked_slots,
    batch_tau,
    drafted_tokens,
    weighted_loss,
)
from dflash_trt.training.recipe import Recipe, dump_recipe, load_recipe
from dflash_trt.training.store import FeatureStore, Sequence
from dflash_trt.training.teacher import Teacher

CURVE_FILE = "curve.csv"
CURVE_COLUMNS = ("step", "seconds", "learning_rate", "loss", "train_tau", "domain", "held_out_tau")


@dataclass(frozen=True)
class FitOptions:
    """What does not change the result: where, how often, for how long."""

    folder: Path
    resume: bool = False
    checkpoint_seconds: float = 180.0
    measure_every: int = 250
    measure_sequences: int = 60  # per domain
    report: Callable[[Progress], None] | None = None


@dataclass(frozen=True)
class Progress:
    """What the loop tells its caller after each step."""

    step: int
    steps: int
    loss: float
    tau: float
    seconds_left: float
    held_out: Mapping[str, float] = field(default_factory=dict)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to ``final_rate`` of the peak."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(recipe.steps - recipe.warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return recipe.learning_rate * (recipe.final_rate + (1 - recipe.final_rate) * cosine)


def split(store: FeatureStore, recipe: Recipe) -> tuple[list[Sequence], list[Sequence]]:
    """(train, held out): by prompt, so that no answer to a held-out prompt is trained on; what is
    trained on stands there as often as the recipe repeats its domain."""
    usable = [s for s in store if len(anchor_range(s))]
    held = [s for s in usable if s.prompt % recipe.held_out == recipe.held_out - 1]
    train = [s for s in usable if s.prompt % recipe.held_out != recipe.held_out - 1]
    if foreign := sorted(set(recipe.repeat) - {s.domain for s in usable}):
        raise InputError(f"recipe: repeat names domains without answers: {', '.join(foreign)}")
    train = [s for s in train for _ in range(recipe.repeat.get(s.domain, 1))]
    if not train:
        raise InputError(f"{store.folder} leaves no sequence to train on")
    return train, held


def plan_epoch(train: list[Sequence], recipe: Recipe, epoch: int) -> list[list[Sequence]]:
    """Shuffled steps of one epoch; sequences of a step are of similar length, to pad little."""
    rng = np.random.default_rng([recipe.seed, 1, epoch])
    order = [train[i] for i in rng.permutation(len(train))]
    pool = recipe.sequences * 16
    steps: list[list[Sequence]] = []
    for i in range(0, len(order), pool):
        near = sorted(order[i : i + pool], key=lambda s: s.length)
        steps += [near[j : j + recipe.sequences] for j in range(0, len(near), recipe.sequences)]
    return [steps[i] for i in rng.permutation(len(steps))]


class Trainer:
    """Model, optimiser and position in the run; ``step()`` takes one step."""

    def __init__(
        self,
        recipe: Recipe,
        shape: DrafterShape,
        store: FeatureStore,
        target: Mapping[str, Tensor],
        device: str = "cpu",
    ) -> None:
        self.recipe, self.store, self.device = recipe, store, torch.device(device)
        torch.manual_seed(recipe.seed)
        self.drafter = self._first_weights(shape, target).to(self.device)
        self.embedding = target["model.embed_tokens.weight"].float().to(self.device)
        head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
        self.head = head.to(self.device, torch.bfloat16 if recipe.bf16 else torch.float32)
        teach = recipe.distill > 0
        self.teacher = Teacher(shape, target, self.device) if teach else None
        self.train, self.held_out = split(store, recipe)
        labels, size = np.asarray(store.greedy), len(self.embedding)
        self.vocabulary = Vocabulary.of(labels, size, recipe)
        drafted = drafted_tokens(labels, size, recipe.draft_vocabulary)
        self.drafted = torch.from_numpy(drafted).to(self.device)
        self.optimizers = make_optimizers(self.drafter, recipe)
        self._loss = torch.compile(weighted_loss, dynamic=True) if recipe.compile else weighted_loss
        self.done = 0
        self._epoch, self._plan = -1, list[list[Sequence]]()

    def _first_weights(self, shape: DrafterShape, target: Mapping[str, Tensor]) -> Drafter:
        if not self.recipe.start:
            drafter = Drafter(shape)
            warm_start(drafter, target)
            return drafter
        drafter = zlab.load(Path(self.recipe.start))
        if drafter.shape != shape:
            raise InputError(f"{self.recipe.start} is {drafter.shape}, the recipe asks for {shape}")
        return drafter

    def batch(self) -> Batch:
        """The batch of the coming step, a function of seed and step alone."""
        rng = np.random.default_rng([self.recipe.seed, 2, self.done])
        per_epoch = -(-len(self.train) // self.recipe.sequences)
        epoch, place = divmod(self.done, per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, plan_epoch(self.train, self.recipe, epoch)
        chosen = self._plan[place]
        block, count = self._extent()
        anchors = [draw_anchors(s, count, rng) for s in chosen]
        return make_batch(self.store, chosen, anchors, block, self.recipe.reveal, rng).to(
            self.device
        )

    def _extent(self) -> tuple[int, int]:
        """(block length, anchors per sequence) of the coming step; all steps cost the same."""
        recipe, whole = self.recipe, self.drafter.shape.block
        if not recipe.slots or self.done % recipe.whole_every == 0:
            return whole, max(recipe.anchors * (recipe.slots or whole) // whole, 1)
        return recipe.slots, recipe.anchors

    def step(self) -> tuple[float, float]:
        """One optimiser step; returns (loss, acceptance length on the batch)."""
        batch, recipe = self.batch(), self.recipe
        rng = np.random.default_rng([recipe.seed, 3, self.done])
        chosen = self.vocabulary.draw(rng).to(self.device)
        asked = asked_slots(batch, chosen, len(self.embedding), recipe.gamma)
        taps = batch.taps if recipe.bf16 else batch.taps.float()
        blocks = self.embedding[batch.tokens]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.bf16):
            loss, right = self._loss(
                self.drafter, taps, blocks, batch.anchors, asked, self.head[chosen],
                self._taught(taps, batch, asked), recipe.distill,
            )  # fmt: skip
        loss.backward()
        self._update()
        return float(loss.detach()), batch_tau(right, asked, batch.labels)

    def _taught(self, taps: Tensor, batch: Batch, asked: Asked) -> Tensor | None:
        """The target's hidden state behind the row before each asked slot, [N, H]."""
        if self.teacher is None:
            return None
        hidden = self.teacher(taps[..., -self.drafter.shape.hidden :])
        block = batch.labels.shape[-1]
        rows = block_positions(batch.anchors, block).flatten()[asked.index] - 1
        sequence = asked.index // (block * batch.anchors.shape[1])
        return hidden[sequence, rows].to(self.head.dtype)

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.recipe, self.done)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1

    def held_out_acceptance(self, per_domain: int) -> dict[str, Acceptance]:
        """Measured on the first ``per_domain`` greedy held-out answers of each domain."""
        chosen: dict[str, list[Sequence]] = {}
        for s in self.held_out:
            if s.sample == 0 and len(chosen.setdefault(s.domain, [])) < per_domain:
                chosen[s.domain].append(s)
        every = [s for some in chosen.values() for s in some]
        bf16 = self.recipe.bf16
        whole = len(self.drafted) == len(self.head)
        head = self.head if whole else self.head[self.drafted]
        return measure(self.drafter, self.embedding, head, self.drafted, self.store, every, bf16)

    def export(self, folder: Path) -> None:
        """The drafter as it is now."""
        zlab.export(self.drafter, folder, drafted=self.drafted.cpu().numpy())

    def state(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "drafter": self.drafter.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def make_optimizers(drafter: Drafter, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the norms."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim != 2]
    betas, rate, decay = (0.9, recipe.beta2), recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "muon":
        # the rate is scaled to the size of an AdamW update, so one schedule serves both
        muon = torch.optim.Muon(
            matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(vectors, lr=rate, betas=betas, weight_decay=0.0)]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=rate, betas=betas)]


def save_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Optimiser and weights, written beside and renamed: a kill leaves the older one."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state(), folder / "checkpoint.tmp")
    (folder / "checkpoint.tmp").replace(folder / "checkpoint.pt")
    (folder / "recipe.toml").write_text(dump_recipe(trainer.recipe))


def load_checkpoint(trainer: Trainer, folder: Path) -> bool:
    """Restore where there is one; refuses a checkpoint of another recipe (but for the tokens that
    are drafted, which no step depends on)."""
    path = folder / "checkpoint.pt"
    if not path.is_file():
        return False
    made = load_recipe(folder / "recipe.toml")
    if replace(made, draft_vocabulary=trainer.recipe.draft_vocabulary) != trainer.recipe:
        raise InputError(f"{path} was made with another recipe: {made}")
    trainer.restore(torch.load(path, map_location=trainer.device, weights_only=True))
    return True


def fit(trainer: Trainer, options: FitOptions) -> dict[str, Acceptance]:
    """Run to the recipe's last step: curve.csv, checkpoints, and the drafter in ``drafter/``."""
    if options.resume:
        load_checkpoint(trainer, options.folder)
        _forget_after(options.folder / CURVE_FILE, trainer.done)
    options.folder.mkdir(parents=True, exist_ok=True)
    clock, first, saved = time.monotonic(), trainer.done, time.monotonic()
    losses: list[tuple[float, float]] = []
    while trainer.done < trainer.recipe.steps:
        losses.append(trainer.step())
        elapsed = time.monotonic() - clock
        due = trainer.done % options.measure_every == 0
        held = _measure_point(trainer, options, losses, elapsed) if due else {}
        if options.report:
            left = elapsed / (trainer.done - first) * (trainer.recipe.steps - trainer.done)
            options.report(Progress(trainer.done, trainer.recipe.steps, *losses[-1], left, held))
        losses = [] if due else losses
        if time.monotonic() - saved > options.checkpoint_seconds:
            save_checkpoint(trainer, options.folder)
            saved = time.monotonic()
    save_checkpoint(trainer, options.folder)
    trainer.export(options.folder / "drafter")
    return trainer.held_out_acceptance(options.measure_sequences)


def _forget_after(curve: Path, step: int) -> None:
    """Drop the rows of steps that a killed run took behind its last checkpoint (they come again),
    and a row that it did not finish."""
    if not curve.is_file():
        return
    whole = [line for line in curve.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = whole[:1] + [row for row in whole[1:] if int(row.split(",", 1)[0]) <= step]
    if kept:
        curve.with_suffix(".tmp").write_text("".join(kept))
        curve.with_suffix(".tmp").replace(curve)
    else:
        curve.unlink()


def _measure_point(
    trainer: Trainer, options: FitOptions, losses: list[tuple[float, float]], elapsed: float
) -> dict[str, float]:
    """Append one row per domain to curve.csv and export what there is so far."""
    loss, tau = np.mean(losses, axis=0)
    found = trainer.held_out_acceptance(options.measure_sequences)
    held = {domain: a.tau for domain, a in found.items()}
    rate = learning_rate(trainer.recipe, trainer.done)
    path = options.folder / CURVE_FILE
    new = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.writer(file)
        if new:
            rows.writerow(CURVE_COLUMNS)
        numbers = f"{elapsed:.1f}", f"{rate:.3e}", f"{loss:.4f}", f"{tau:.4f}"
        for domain, value in [(d, f"{v:.4f}") for d, v in sorted(held.items())] or [("", "")]:
            rows.writerow((trainer.done, *numbers, domain, value))
    trainer.export(options.folder / "drafter")
    return held
