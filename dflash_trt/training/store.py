"""Features on disk: what the target saw and said, memory-mapped, appended sequence by sequence.

A store is a folder. Rows of all sequences lie end to end:

    taps.bin       bfloat16 [rows, n_taps * H]   hidden states after the tapped layers
    tokens.bin     int32    [rows]               the token of each row
    greedy.bin     int32    [rows]               the target's choice for the next row, -1 in prompts
    index.jsonl    one line per sequence         written last: without its line a sequence is not
    store.json     what the rows are made of
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.errors import InputError

SCHEMA = 1
_BF16_BYTES = 2


class StoreError(InputError):
    """A feature store that is missing, torn, or made for something else."""


@dataclass(frozen=True)
class StoreMeta:
    """What every row of a store has in common."""

    hidden: int
    taps: tuple[int, ...]
    mask_token: int
    target: str
    schema: int = SCHEMA

    @property
    def width(self) -> int:
        return self.hidden * len(self.taps)


@dataclass(frozen=True)
class Sequence:
    """One prompt with its answer: rows ``start .. start+length`` of the store."""

    prompt: int
    sample: int
    domain: str
    start: int
    length: int
    prompt_length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def read_meta(folder: Path) -> StoreMeta:
    """Read ``store.json``; names the folder when it is not a store of this schema."""
    path = folder / "store.json"
    if not path.is_file():
        raise StoreError(f"{folder} is not a feature store: store.json is missing")
    raw: dict[str, Any] = json.loads(path.read_text())
    unknown = set(raw) - {f.name for f in fields(StoreMeta)}
    if unknown:
        raise StoreError(f"{path} has unknown keys: {', '.join(sorted(unknown))}")
    if raw.get("schema") != SCHEMA:
        raise StoreError(f"{path} has schema {raw.get('schema')}, this version reads {SCHEMA}")
    return StoreMeta(**{**raw, "taps": tuple(raw["taps"])})


def read_index(folder: Path) -> list[Sequence]:
    """The sequences of a store, in row order; a torn last line (killed writer) is dropped."""
    path = folder / "index.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    return [Sequence(**json.loads(line)) for line in lines[:-1]]


class StoreWriter:
    """Appends sequences; opening an existing store goes on after its last whole sequence."""

    def __init__(self, folder: Path, meta: StoreMeta) -> None:
        self.folder, self.meta = folder, meta
        folder.mkdir(parents=True, exist_ok=True)
        self._claim()
        self.sequences = read_index(folder)
        self.rows = self.sequences[-1].stop if self.sequences else 0
        self._taps = self._open("taps.bin", self.meta.width * _BF16_BYTES)
        self._tokens = self._open("tokens.bin", 4)
        self._greedy = self._open("greedy.bin", 4)
        self._index = self._open_index()

    def _claim(self) -> None:
        if not (self.folder / "store.json").exists():
            (self.folder / "store.json").write_text(json.dumps(asdict(self.meta), indent=1) + "\n")
        elif (found := read_meta(self.folder)) != self.meta:
            raise StoreError(f"{self.folder} holds features of {found}, not of {self.meta}")

    def _open(self, name: str, row_bytes: int) -> Any:
        path = self.folder / name
        path.touch()
        if path.stat().st_size < self.rows * row_bytes:
            raise StoreError(f"{path} is shorter than index.jsonl says: delete the store")
        os.truncate(path, self.rows * row_bytes)
        return path.open("ab")

    def _open_index(self) -> Any:
        path = self.folder / "index.jsonl"
        text = "".join(json.dumps(asdict(s)) + "\n" for s in self.sequences)
        path.write_text(text)
        return path.open("a")

    def done(self) -> set[tuple[int, int]]:
        """(prompt, sample) of every stored sequence."""
        return {(s.prompt, s.sample) for s in self.sequences}

    def append(
        self,
        taps: NDArray[np.uint16],
        tokens: NDArray[np.int32],
        greedy: NDArray[np.int32],
        *,
        prompt: int,
        sample: int,
        domain: str,
        prompt_length: int,
    ) -> None:
        """Add one sequence: taps [rows, width] as bf16 bit patterns, tokens and greedy [rows]."""
        rows = len(tokens)
        if taps.shape != (rows, self.meta.width) or taps.dtype != np.uint16:
            raise StoreError(
                f"taps must be uint16 [{rows}, {self.meta.width}], got {taps.dtype} {taps.shape}"
            )
        for file, array in (
            (self._taps, taps),
            (self._tokens, tokens.astype(np.int32)),
            (self._greedy, greedy.astype(np.int32)),
        ):
            file.write(np.ascontiguousarray(array).data)
        sequence = Sequence(prompt, sample, domain, self.rows, rows, prompt_length)
        self.sequences.append(sequence)
        self.rows += rows
        self._index.write(json.dumps(asdict(sequence)) + "\n")

    def flush(self) -> None:
        """Make everything appended so far survive a kill: data first, index last."""
        for file in (self._taps, self._tokens, self._greedy, self._index):
            file.flush()

    def close(self) -> None:
        self.flush()
        for file in (self._taps, self._tokens, self._greedy, self._index):
            file.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FeatureStore:
    """Read side: ``taps`` uint16 [rows, width], ``tokens`` and ``greedy`` int32 [rows], mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = read_meta(folder)
        self.sequences = read_index(folder)
        if not self.sequences:
            raise StoreError(f"{folder} holds no sequence: run the features step first")
        rows = self.sequences[-1].stop
        self.taps = self._map("taps.bin", np.uint16, (rows, self.meta.width))
        self.tokens = self._map("tokens.bin", np.int32, (rows,))
        self.greedy = self._map("greedy.bin", np.int32, (rows,))

    def _map(self, name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        path = self.folder / name
        need = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size < need:
            raise StoreError(f"{path} is shorter than index.jsonl says: delete the store")
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)
