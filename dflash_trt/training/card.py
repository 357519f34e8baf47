"""What a trained drafter says about itself: README.md, acceptance.json, the curve as a picture."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from dflash_trt.training.acceptance import Acceptance
from dflash_trt.training.drafter import DrafterShape
from dflash_trt.training.recipe import Recipe, dump_recipe
from dflash_trt.training.store import FeatureStore

MEASURED_ON = (
    "Measured on held-out prompts by replaying draft and verify cycles over the target's stored "
    "greedy answers, argmax over the tokens that are drafted."
)


def acceptance_table(found: Mapping[str, Acceptance]) -> str:
    """Markdown: acceptance length, and the share of blocks right up to each slot, per domain."""
    if not found:
        return "Nothing was held out, so nothing was measured."
    slots = next(iter(found.values())).block - 1
    head = ["domain", "cycles", "acceptance length", *(f"slot {j + 1}" for j in range(slots))]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for domain, a in sorted(found.items()):
        cells = [domain, str(a.cycles), f"{a.tau:.2f}", *(f"{r:.2f}" for r in a.slot_rates())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def data_table(store: FeatureStore) -> str:
    """Markdown: answers and answer tokens per domain."""
    answers: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for s in store:
        answers[s.domain] += 1
        tokens[s.domain] += s.length - s.prompt_length
    rows = [f"| {d} | {answers[d]} | {tokens[d]} |" for d in sorted(answers)]
    return "\n".join(["| domain | answers | answer tokens |", "|---|---|---|", *rows])


def card(
    shape: DrafterShape, recipe: Recipe, store: FeatureStore, found: Mapping[str, Acceptance]
) -> str:
    """The text of README.md."""
    taps = ", ".join(map(str, shape.taps))
    drafted = recipe.draft_vocabulary or shape.vocab
    return f"""# DFlash drafter for {store.meta.target}

{shape.layers} layers at the target's width ({shape.hidden}), block {shape.block}, taps {taps}
(outputs of 0-based layers, before the final norm), mask token {shape.mask_token}. Embedding and
lm_head are the target's; {drafted} of its {shape.vocab} tokens are drafted.

## Acceptance

{MEASURED_ON}

{acceptance_table(found)}

## Data

The target's own answers; loops are left out.

{data_table(store)}

## Recipe

```toml
{dump_recipe(recipe).strip()}
```
"""


def write_card(
    folder: Path,
    shape: DrafterShape,
    recipe: Recipe,
    store: FeatureStore,
    found: Mapping[str, Acceptance],
) -> None:
    """README.md and acceptance.json beside the weights."""
    (folder / "README.md").write_text(card(shape, recipe, store, found))
    numbers = {
        d: {"cycles": a.cycles, "acceptance_length": a.tau, "slots": a.slot_rates()}
        for d, a in sorted(found.items())
    }
    (folder / "acceptance.json").write_text(json.dumps(numbers, indent=1) + "\n")


def plot_curve(curve: Path, picture: Path) -> None:
    """Loss and held-out acceptance length over steps, from curve.csv."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loss: dict[int, float] = {}
    held: dict[str, dict[int, float]] = defaultdict(dict)
    with curve.open(newline="") as file:
        for row in csv.DictReader(file):
            loss[int(row["step"])] = float(row["loss"])
            if row["domain"]:
                held[row["domain"]][int(row["step"])] = float(row["held_out_tau"])
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(list(loss), list(loss.values()))
    left.set(xlabel="step", ylabel="loss")
    for domain, points in sorted(held.items()):
        right.plot(list(points), list(points.values()), label=domain)
    right.set(xlabel="step", ylabel="acceptance length, held out")
    if held:
        right.legend()
    figure.savefig(picture, dpi=120)
