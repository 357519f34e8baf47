"""From checkpoint tensors to the weights of a graph, following the graph's table, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from dflash_trt.checkpoints.base import TensorSource
from dflash_trt.checkpoints.described import AbsentTensors
from dflash_trt.checkpoints.modelopt import ModelOptTensors, StoredMatrix
from dflash_trt.config import DrafterConfig, TargetConfig
from dflash_trt.errors import InputError
from dflash_trt.models.graph import Weight
from dflash_trt.models.rope import rope_tables


class WeightLoader:
    """Makes the weights that a graph's table asks for, from a target and a drafter checkpoint."""

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        configs: Mapping[str, TargetConfig | DrafterConfig],
    ) -> None:
        self._sources = sources
        self._configs = configs

    def check(self, weights: Sequence[Weight]) -> None:
        """Compare all names, shapes and types before anything is read; name the first that is off."""
        for weight in weights:
            absent = isinstance(self._sources[weight.model], AbsentTensors)
            if weight.sources and not absent:
                self._check_one(weight)

    def _check_one(self, weight: Weight) -> None:
        source = self._sources[weight.model]
        for name in weight.sources:
            if name not in source.names():
                raise InputError(f"{source.origin}: the tensor '{name}' is missing")
            wanted = tensor_dtype_to_np_dtype(weight.dtype)
            if source.dtype(name) != wanted:
                raise InputError(
                    f"{source.origin}: '{name}' holds {source.dtype(name)}, not {wanted}"
                )
        shapes = [self._cut_shape(source, weight, i) for i in range(len(weight.sources))]
        if weight.kind == "norm" and len(weight.shape) == 2:
            shapes = [(1, *shape) for shape in shapes]
        if weight.kind == "mxfp4_blocks":  # [.., K/32, 16] are the same bytes as [.., K/2]
            shapes = [(*shape[:-2], shape[-2] * shape[-1]) for shape in shapes]
        rows = sum(shape[0] for shape in shapes)
        made = (rows, *shapes[0][1:])
        made = made[::-1] if weight.transpose else made
        if made != weight.shape or any(shape[1:] != shapes[0][1:] for shape in shapes):
            found = ", ".join(f"'{n}' {list(source.shape(n))}" for n in weight.sources)
            raise InputError(
                f"{source.origin}: {found} cannot make {weight.name} of shape {list(weight.shape)}"
            )

    @staticmethod
    def _cut_shape(source: TensorSource, weight: Weight, index: int) -> tuple[int, ...]:
        """The shape of a rank's part of a source, where the source has the size that is cut."""
        shape, shard = source.shape(weight.sources[index]), weight.shard
        if shard is None or len(shape) <= shard.axis or shape[shard.axis] != shard.whole[index]:
            return shape
        return (*shape[: shard.axis], shard.parts[index], *shape[shard.axis + 1 :])

    def load(self, weight: Weight, rank: int = 0, dtype: Any = None) -> np.ndarray:
        """The weight as a contiguous array of `weight.shape`, in the type of the graph input unless
        `dtype` is given; of a weight that is cut, the part of `rank`. Of a source that is cut along
        its first axis no other part is read, along another one all of it is read and cut.

        Besides the result a few megabytes of a tensor are in memory at a time, where its format
        allows that.
        """
        dtype = np.dtype(dtype or tensor_dtype_to_np_dtype(weight.dtype))
        if weight.kind.startswith("rope_"):
            return self._rope(weight).astype(dtype, copy=False)
        if weight.kind == "shard_start":
            assert weight.shard
            return np.array(weight.shard.span(0, rank)[:1], np.int64)
        made, at = np.empty(weight.shape, dtype), 0
        for piece in self._pieces(weight, rank):
            rows = made.T if weight.transpose else made.reshape(-1, *piece.shape[1:])
            rows[at : at + len(piece)] = piece.astype(dtype, copy=False)
            at += len(piece)
        return made

    def export_precision(self, weight: Weight) -> str:
        """What the checkpoint was exported in (`fp8`, `nvfp4`); empty where it is no export."""
        source = self._sources[weight.model]
        return source.precision if isinstance(source, ModelOptTensors) else ""

    def is_quantised(self, weight: Weight) -> bool:
        """Whether the checkpoint holds all of this weight quantised."""
        source = self._sources[weight.model]
        return isinstance(source, ModelOptTensors) and all(map(source.is_quantised, weight.sources))

    def check_scales(self, weight: Weight) -> None:
        """Refuse a quantised weight whose activations have no scale, before anything is compiled."""
        source = self._sources[weight.model]
        assert isinstance(source, ModelOptTensors)
        for name in weight.sources:
            source.input_scale(name)

    def stored(self, weight: Weight) -> StoredMatrix:
        """A quantised weight [N, K] as the checkpoint holds it, parts on top of each other; they
        read the same activations, so the largest of their input scales holds for all."""
        source = self._sources[weight.model]
        assert isinstance(source, ModelOptTensors)
        parts = [source.stored(name) for name in weight.sources]
        blocks = [p.block_scales for p in parts if p.block_scales is not None]
        return StoredMatrix(
            np.concatenate([p.codes for p in parts]),
            np.concatenate(blocks) if blocks else None,
            np.concatenate([p.scale for p in parts]),
            max(p.input_scale for p in parts),
        )

    def _pieces(self, weight: Weight, rank: int) -> Iterator[np.ndarray]:
        """The sources one after the other, in pieces along their first axis."""
        source = self._sources[weight.model]
        for index, name in enumerate(weight.sources):
            if weight.shard:
                yield self._cut(source, index, weight, rank)
            else:
                yield from source.rows(name)

    @staticmethod
    def _cut(source: TensorSource, index: int, weight: Weight, rank: int) -> np.ndarray:
        """A rank's part of a source, padded."""
        name, shard = weight.sources[index], weight.shard
        assert shard
        begin, end = shard.span(index, rank)
        least = (begin, end) if end > begin else (0, 1)  # of nothing, one entry for its shape
        array = source.read_part(name, shard.axis, *least)
        array = array.take(range(end - begin), shard.axis)
        missing = shard.parts[index] - (end - begin)
        margins = [(0, missing if axis == shard.axis else 0) for axis in range(array.ndim)]
        return np.pad(array, margins)

    def _rope(self, weight: Weight) -> np.ndarray:
        config = self._configs[weight.model]
        cos, sin = rope_tables(config.rope, config.head_dim, weight.shape[0])
        return cos if weight.kind == "rope_cos" else sin
