"""The engine directory appears whole or not at all, and refuses what was not built here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from dflash_trt.checkpoints import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.engines import build, directory
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.engines.directory import MANIFEST, read_manifest
from dflash_trt.engines.onnxruntime import OnnxRuntimePair
from dflash_trt.errors import InputError

Pair = tuple[TargetCheckpoint, DrafterCheckpoint]


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_engine, tmp_path / "engine")


def change(path: Path, edit: Callable[[dict], None]) -> None:
    content = json.loads((path / MANIFEST).read_text())
    edit(content)
    (path / MANIFEST).write_text(json.dumps(content))


def test_describes_the_build(engine: Path) -> None:
    m = read_manifest(engine)
    assert (m.block, m.drafted, m.trained_block, m.passes) == (8, 7, 8, 1)
    assert m.target.digest.startswith("sha256:")
    assert {w["name"] for w in m.weights} >= {"lm_head.weight", "drafter.fc.weight"}
    source = onnx.load(engine / "source" / "target.onnx")
    assert {f.name for f in source.functions} >= {"CachedAttention", "SpeculativeVerify"}


def test_lm_head_is_stored_once(tiny_checkpoints: Pair, tmp_path: Path) -> None:
    """Both int8 models point to the same packed and plain lm_head in the weights file."""
    build_cpu(*tiny_checkpoints, BuildOptions("t", 8, "int8", max_seq_len=512), tmp_path / "e")
    places = []
    for name in ("target", "drafter"):
        model = onnx.load(tmp_path / "e" / f"{name}.onnx", load_external_data=False)
        (head,) = [t for t in model.graph.initializer if t.name == "lm_head.weight.q.blocks8"]
        places.append({e.key: e.value for e in head.external_data})
    assert places[0] == places[1]
    assert any(key.startswith("prepacked_") for key in places[0])


@pytest.mark.parametrize(
    ("kind", "multiplies"),
    [
        ("x86_64 avx2", False),
        ("x86_64 avx2 avx512f", False),
        ("x86_64 avx2 avx_vnni", True),
        ("x86_64 avx2 avx512f avx512_vnni amx_int8", True),
        ("aarch64", True),
    ],
)
def test_bytes_are_multiplied_where_sums_do_not_overflow(
    kind: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "cpu_kind", lambda: kind)
    assert directory.multiplies_bytes() is multiplies


@pytest.mark.parametrize("name", ["weights.bin", "target.onnx", "tokenizer.json"])
def test_cut_short_edited_or_missing(engine: Path, name: str) -> None:
    file = engine / name
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-1])
    with pytest.raises(InputError, match=rf"{name}: has \d+ bytes instead of \d+; build"):
        OnnxRuntimePair(engine)
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=f"{name}: was changed after the build; build"):
        OnnxRuntimePair(engine)
    file.unlink()
    with pytest.raises(InputError, match=f"{name}: is missing; build"):
        OnnxRuntimePair(engine)


def test_foreign_engines(engine: Path) -> None:
    change(engine, lambda c: c["target_requirements"].update(cpu="a toaster"))
    with pytest.raises(InputError, match="was built for cpu 'a toaster', here it is"):
        OnnxRuntimePair(engine)
    change(engine, lambda c: c.update(schema=99))
    with pytest.raises(InputError, match="engine format 99, this version reads 1; build"):
        OnnxRuntimePair(engine)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}'])
def test_damaged_manifest(engine: Path, text: str) -> None:
    (engine / MANIFEST).write_text(text)
    with pytest.raises(InputError, match=r"engine\.json: is damaged"):
        read_manifest(engine)


def test_not_an_engine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not an engine directory"):
        read_manifest(tmp_path)


def test_an_interrupted_build_leaves_nothing(
    tiny_checkpoints: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_cpu(*tiny_checkpoints, BuildOptions("t", 8, max_seq_len=512), tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


def test_a_build_replaces_engines_only(tiny_checkpoints: Pair, engine: Path) -> None:
    build_cpu(*tiny_checkpoints, BuildOptions("again", 5, max_seq_len=512), engine)
    assert read_manifest(engine).name == "again"
    assert [p.name for p in engine.parent.iterdir()] == ["engine"]
    (engine / MANIFEST).unlink()
    with pytest.raises(InputError, match="is not an engine directory, so it is not replaced"):
        build_cpu(*tiny_checkpoints, BuildOptions("t", 8, max_seq_len=512), engine)
    assert (engine / "weights.bin").exists()
