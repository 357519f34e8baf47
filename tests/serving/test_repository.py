"""What `dflash-trt triton` writes and what it refuses; no server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.engines.directory import read_manifest
from dflash_trt.serving.triton.repository import RepositoryOptions, write_repository


def config(repository: Path, name: str) -> str:
    return (repository / name / "config.pbtxt").read_text()


def test_written_by_reference_or_with_the_engines(tiny_engine: Path, tmp_path: Path) -> None:
    write_repository(tiny_engine, tmp_path, RepositoryOptions())
    assert json.dumps(str(tiny_engine)) in config(tmp_path, "tiny")
    assert "max_batch_size: 0" in config(tmp_path, "tiny")
    assert sorted(p.name for p in (tmp_path / "tiny/1").iterdir()) == ["model.py"]
    write_repository(tiny_engine, tmp_path, RepositoryOptions(copy=True, max_batch=4))
    assert read_manifest(tmp_path / "tiny/1/engine").name == "tiny"
    assert str(tiny_engine) not in config(tmp_path, "tiny")
    assert "max_batch_size: 4" in config(tmp_path, "tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_only_its_own_folder_is_replaced(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.pbtxt").write_text('name: "theirs"')
    assert main(["triton", str(tiny_engine), "-o", str(tmp_path)]) == 2
    assert "exists and is not ours" in capsys.readouterr().err
    assert config(tmp_path, "tiny") == 'name: "theirs"'


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--name", "a/b"], "name 'a/b': use letters"),
        (["--max-batch", "-1"], "max-batch -1: must be 0 to 4096"),
        (["--max-queue", "0"], "max-queue 0: must be 1 or more"),
        (["--environment", "/nowhere"], "environment /nowhere: has no bin/python3"),
    ],
)
def test_refusals(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list, message: str
) -> None:
    assert main(["triton", str(tiny_engine), "-o", str(tmp_path / "repository"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "repository").exists()


def test_a_folder_that_holds_no_engine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["triton", str(tmp_path), "-o", str(tmp_path / "repository")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "repository").exists()
