"""A target cut over ranks is the target: its whole mesh in one graph against the graph of one rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest

from dflash_trt.checkpoints import TargetCheckpoint, open_target
from dflash_trt.checkpoints.weights import WeightLoader
from dflash_trt.errors import InputError
from dflash_trt.models.graph import SourceGraph
from dflash_trt.models.registry import target_graph
from dflash_trt.models.shards import share_of
from dflash_trt.ops.collectives import join
from dflash_trt.recipes import find_recipe
from tests import tiny, tiny_gpt_oss
from tests.models.test_architectures import tiny_qwen3
from tests.ops.run import run_op

CAPACITY, TAPS = 48, (0, 2, 3)
# Three key heads, 29 columns and 287 tokens: nothing of it divides by two.
UNEVEN = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 29,
    "vocab_size": 287,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TargetCheckpoint]:
    folder = tmp_path_factory.mktemp("targets")
    made = {
        "llama": tiny.tiny_target(folder / "llama", **UNEVEN),
        "qwen3": tiny_qwen3(folder / "qwen3"),
        "gpt-oss": tiny_gpt_oss.tiny_gpt_oss(folder / "gpt-oss", num_key_value_heads=4),
    }
    (made["llama"] / "tokenizer.json").unlink()  # it has more entries than this vocabulary
    return {name: open_target(path) for name, path in made.items()}


def loader_of(target: TargetCheckpoint) -> WeightLoader:
    return WeightLoader({"target": target.tensors}, {"target": target.config})


def run_whole(graph: SourceGraph, loader: WeightLoader, feeds: dict) -> dict[str, np.ndarray]:
    return run(graph.model, {**feeds, **{w.name: loader.load(w) for w in graph.weights}})


def run_mesh(
    graph: SourceGraph, loader: WeightLoader, feeds: dict, ranks: int
) -> dict[str, np.ndarray]:
    cut = [w for w in graph.weights if w.shard]
    own = {w.name for w in cut} | {n for n in inputs_of(graph) if "_cache." in n}
    whole = {w.name: loader.load(w) for w in graph.weights if not w.shard}
    parts = {f"{w.name}@{r}": loader.load(w, r) for w in cut for r in range(ranks)}
    return run(join(graph.model, ranks, own), {**feeds, **whole, **parts})


def run(model, feeds: dict) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    data = model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def inputs_of(graph: SourceGraph) -> dict[str, list]:
    return {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in graph.model.graph.input
    }


def caches(graph: SourceGraph, batch: int, suffixes: list[str]) -> dict[str, np.ndarray]:
    """Poisoned: a row that is read before it is written shows."""
    return {
        name + suffix: np.full((batch, dims[1], CAPACITY, dims[3]), np.nan, np.float32)
        for name, dims in inputs_of(graph).items()
        if "_cache." in name
        for suffix in suffixes
    }


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama", 2), ("llama", 3), ("qwen3", 2), ("gpt-oss", 2)]
)
def test_a_mesh_computes_what_one_rank_does(
    targets: dict[str, TargetCheckpoint], name: str, ranks: int
) -> None:
    """A chunk and a block behind it, two sequences; every rank has the same features and verdict."""
    target = targets[name]
    loader, rng = loader_of(target), np.random.default_rng(ranks)
    whole = target_graph(target.config, TAPS, CAPACITY)
    cut = target_graph(target.config, TAPS, CAPACITY, ranks)
    loader.check(cut.weights)
    suffixes = [f"@{r}" for r in range(ranks)]
    state = caches(whole, 2, [""]), caches(cut, 2, suffixes)
    lengths = np.zeros(2, np.int32)
    for size, first in ((20, 19), (6, 0)):
        feeds = {
            "tokens": rng.integers(0, 256, (2, size)),
            "lengths": lengths,
            "rows": np.tile(np.arange(first, size), (2, 1)),
        }
        one = run_whole(whole, loader, {**feeds, **state[0]})
        many = run_mesh(cut, loader, {**feeds, **state[1]}, ranks)
        for suffix in suffixes:
            np.testing.assert_allclose(many["features" + suffix], one["features"], atol=1e-4)
            for output in ("accepted", "anchor", "context"):
                np.testing.assert_array_equal(many[output + suffix], one[output])
        lengths = one["context"]
        state = tuple(
            {k.replace(".out", ""): v for k, v in d.items() if ".out" in k} for d in (one, many)
        )


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_the_parts_of_all_ranks_are_the_checkpoint(
    targets: dict[str, TargetCheckpoint], name: str
) -> None:
    """Bit for bit, padding zero; read in parts what the checkpoint holds as one."""
    target, ranks = targets[name], 2
    loader = loader_of(target)
    graph = target_graph(target.config, TAPS, CAPACITY, ranks)
    for weight in (w for w in graph.weights if w.shard and w.sources):
        shard = weight.shard
        for index, source in enumerate(weight.sources):
            stored = target.tensors.read(source)
            spans = [shard.span(index, r) for r in range(ranks)]
            filled = [span for span in spans if span[0] < span[1]]
            parts = [target.tensors.read_part(source, shard.axis, *span) for span in filled]
            for part, span in zip(parts, filled, strict=True):
                np.testing.assert_array_equal(part, stored.take(range(*span), shard.axis))
            covered = {place for span in spans for place in range(*span)}
            assert covered == set(range(shard.whole[index])), weight.name
            assert shard.overlap or sum(b - a for a, b in spans) == len(covered), weight.name
        assert [loader.load(weight, r).shape for r in range(ranks)] == [weight.shape] * ranks


def test_the_share_of_a_rank_of_gpt_oss_120b() -> None:
    large = share_of(find_recipe("gpt-oss-120b").described_target().config, 8)
    # 90 MXFP4 blocks of 32 columns do not divide by eight: twelve each, six of padding at the end.
    assert (large.heads, large.kv_heads, large.inner, large.tokens) == (8, 1, 384, 25136)


@pytest.mark.parametrize(("ranks", "use"), [(4, 3), (5, 3)])
def test_more_ranks_than_heads_are_refused(
    targets: dict[str, TargetCheckpoint], ranks: int, use: int
) -> None:
    with pytest.raises(InputError, match=f"tp {ranks}: the target has 3 key/value .* use {use}"):
        share_of(targets["llama"].config, ranks)


def test_a_tensor_of_another_size_is_named(targets: dict[str, TargetCheckpoint]) -> None:
    target = targets["llama"]
    graph = target_graph(replace(target.config, intermediate_size=30), TAPS, CAPACITY, 2)
    with pytest.raises(InputError, match=r"mlp\.gate_proj\.weight' \[29, 64\].* cannot make"):
        loader_of(target).check(graph.weights)


def test_equal_logits_on_two_ranks_go_to_the_lower_token() -> None:
    """Ties within a shard, across shards, and a token that is in two shards."""
    logits = np.random.default_rng(0).integers(0, 3, (2, 5, 11)).astype(np.float32)
    tokens, rows = np.argmax(logits, -1), np.tile(np.arange(5), (2, 1))
    tokens = np.concatenate([tokens[:, :1], tokens[:, :-1]], 1)
    lengths = np.array([3, 7], np.int32)
    names = ["accepted", "anchor", "context"]
    wanted = run_op("SpeculativeVerify", [logits, tokens, rows, lengths], names)
    starts = (0, 4, 7)  # of shards of four tokens, the last two of them overlapping
    parts = [
        run_op("BestOfShard", [logits[..., s : s + 4], np.array([s])], ["best"])[0] for s in starts
    ]
    found = run_op("VerifyShards", [np.stack(parts), tokens, rows, lengths], names)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
