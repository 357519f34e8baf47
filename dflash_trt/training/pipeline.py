"""The three steps of a training, each on its own and resumable, over one folder:

DIR/engine/          the target, compiled with the recipe's taps
DIR/answers.jsonl    generate
DIR/features/        features
DIR/checkpoint.pt, curve.csv, curve.png, recipe.toml, drafter/    fit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from dflash_trt.checkpoints import TargetCheckpoint, open_target
from dflash_trt.errors import InputError
from dflash_trt.runtime.text import TextCodec
from dflash_trt.training.engine import SlotEngine, prepare_engine
from dflash_trt.training.features import write_features
from dflash_trt.training.generate import GenerateOptions, Job, generate
from dflash_trt.training.prompts import read_prompts
from dflash_trt.training.recipe import Recipe, resolve_taps
from dflash_trt.training.store import StoreMeta

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_trt.training.drafter import DrafterShape
    from dflash_trt.training.fit import Progress

STEPS = ("generate", "features", "fit")
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainOptions:
    """Where and on what; ``samples`` answers per prompt, the first greedy, the others drawn."""

    target: Path
    prompts: Path
    output: Path
    recipe: Recipe
    taps: int = 5
    samples: int = 1
    max_tokens: int = 200
    temperature: float = 0.8
    slots: int = 32
    max_seq_len: int = 640
    threads: int = 0
    device: str = "cpu"
    resume: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError(f"samples {self.samples}: at least one answer per prompt is made")
        if self.max_tokens >= self.max_seq_len:
            raise InputError(
                f"max-tokens {self.max_tokens}: leaves no room for prompts in {self.max_seq_len}"
            )


class Training:
    """One training folder and its target."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.target: TargetCheckpoint = open_target(options.target)
        layers = self.target.config.num_layers
        recipe = resolve_taps(options.recipe, options.taps, layers)
        if not 0 <= recipe.mask_token < self.target.config.vocab_size:
            raise InputError(
                "recipe: mask_token is missing or outside the vocabulary; name a token id that "
                "answers never hold"
            )
        self.recipe = recipe
        options.output.mkdir(parents=True, exist_ok=True)

    @property
    def answers(self) -> Path:
        return self.options.output / "answers.jsonl"

    @property
    def features(self) -> Path:
        return self.options.output / "features"

    def engine(self, slots: int) -> SlotEngine:
        folder, size = self.options.output / "engine", self.options.max_seq_len
        prepare_engine(folder, self.target, self.recipe.taps, size)
        return SlotEngine(folder, slots, size, self.options.threads)

    def jobs(self) -> list[Job]:
        """Every answer to be made: greedy ones first."""
        codec, jobs = self._codec(), []
        prompts = read_prompts(self.options.prompts)
        ids = [codec.chat_ids([{"role": "user", "content": p.prompt}]) for p in prompts]
        for sample in range(self.options.samples):
            jobs += [Job(i, sample, p.domain, tuple(ids[i])) for i, p in enumerate(prompts)]
        return jobs

    def _codec(self) -> TextCodec:
        text, folder = self.target.text_format(), self.options.output
        Tokenizer.from_str(text.tokenizer_json).save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(text.chat_template)
        return TextCodec(folder, {"bos_token": text.bos_token, "eos_token": text.eos_token})

    def run_generate(self, report: Report) -> int:
        """Answers the store does not need are not made: with ``resume`` only the missing ones."""
        o = self.options
        self._refuse_old(self.answers)
        options = GenerateOptions(
            max_tokens=o.max_tokens,
            temperature=o.temperature,
            seed=self.recipe.seed,
            stop_ids=self.target.config.stop_ids,
        )
        return generate(self.engine(o.slots), self.jobs(), options, self.answers, report)

    def run_features(self, report: Report) -> int:
        if not self.answers.is_file():
            raise InputError(f"{self.answers} is missing: run the generate step first")
        self._refuse_old(self.features)
        meta = StoreMeta(
            hidden=self.target.config.hidden_size,
            taps=self.recipe.taps,
            mask_token=self.recipe.mask_token,
            target=Path(self.target.tensors.origin).name,
        )
        stops = self.target.config.stop_ids
        return write_features(self.engine(1), self.answers, self.features, meta, stops, report)

    def run_fit(self, report: Callable[[Progress], None]) -> None:
        from dflash_trt.training.card import plot_curve, write_card
        from dflash_trt.training.fit import FitOptions, Trainer, fit
        from dflash_trt.training.store import FeatureStore

        o, folder = self.options, self.options.output
        self._refuse_old(folder / "checkpoint.pt")
        store = FeatureStore(self.features)
        if store.meta.taps != self.recipe.taps or store.meta.mask_token != self.recipe.mask_token:
            raise InputError(
                f"{self.features}: holds taps {list(store.meta.taps)} and mask token "
                f"{store.meta.mask_token}, the recipe asks for others"
            )
        trainer = Trainer(self.recipe, self._shape(), store, self._tensors(), o.device)
        found = fit(trainer, FitOptions(folder, o.resume, report=report))
        write_card(folder / "drafter", trainer.drafter.shape, self.recipe, store, found)
        if (folder / "curve.csv").is_file():
            plot_curve(folder / "curve.csv", folder / "curve.png")

    def _refuse_old(self, path: Path) -> None:
        if path.exists() and not self.options.resume:
            raise InputError(f"{path} exists: pass --resume to go on, or choose another folder")

    def _shape(self) -> DrafterShape:
        from dflash_trt.training.drafter import DrafterShape

        c, r = self.target.config, self.recipe
        return DrafterShape(
            hidden=c.hidden_size, heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim,
            ffn=c.intermediate_size, layers=r.layers, block=r.block, taps=r.taps,
            mask_token=r.mask_token, vocab=c.vocab_size, target_layers=c.num_layers,
            rope_theta=c.rope.theta, eps=c.rms_norm_eps, max_positions=c.max_positions,
        )  # fmt: skip

    def _tensors(self) -> Mapping[str, Tensor]:
        """What training needs of the target: embedding, lm_head, final norm, the last layers."""
        import torch

        first = self.target.config.num_layers - self.recipe.layers
        last = tuple(f"model.layers.{n}." for n in range(first, self.target.config.num_layers))
        wanted = ("model.embed_tokens.", "model.norm.", "lm_head.", *last)
        source = self.target.tensors
        names = [n for n in sorted(source.names()) if n.startswith(wanted)]
        return {n: torch.from_numpy(source.read(n).copy()) for n in names}
