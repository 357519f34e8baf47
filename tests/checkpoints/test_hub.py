"""Downloads from the hub: one that stops goes on in the next run, at the byte where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from dflash_trt.checkpoints import open_drafter, open_target
from dflash_trt.engines.build import BuildOptions, build_cpu
from tests import tiny
from tests.checkpoints.hub_server import Hub, serving

TARGET, DRAFTER = "org/target", "org/drafter"
# huggingface_hub writes pieces of 10 MB; what it has of the next one is lost.
PIECE, AFTER = 10 << 20, 17_000_000
DOWNLOAD = f"from dflash_trt.checkpoints.hub import download; print(download({TARGET!r}))"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a pair; the target has 25 MB of weights, of which `AFTER` bytes come at first."""
    tiny.tiny_target(tmp_path / "hub" / TARGET, intermediate_size=8192)
    tiny.tiny_drafter(tmp_path / "hub" / DRAFTER)
    with serving(tmp_path / "hub") as served:
        served.cut, served.after = TARGET, AFTER
        yield served


def environment(hub: Hub) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home(hub)), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {n: v for n, v in os.environ.items() if not n.startswith("HF_")} | own


def home(hub: Hub) -> Path:
    return hub.root.parent / "home"


def python(hub: Hub, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(hub) | more,
        capture_output=True,
        text=True,
        timeout=120,
    )


def begun(hub: Hub) -> list[Path]:
    return list(home(hub).glob("hub/models--org--*/blobs/*.incomplete"))


def test_a_build_goes_on_with_its_download(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out" / "engine"
    arguments = ["build", "--target", TARGET, "--drafter", DRAFTER, "--max-seq-len", "128"]
    program = "import sys; from dflash_trt.cli import main; sys.exit(main())"
    command = ["-c", program, *arguments, "-o", str(out)]
    first = python(hub, *command)
    assert first.returncode == 2
    said = [line for line in first.stderr.splitlines() if line.startswith("dflash-trt:")]
    assert len(said) == 1, first.stderr
    assert f"{TARGET}: cannot be downloaded from the Hugging Face hub (Server error '503" in said[0]
    assert "; the same command goes on from what is here, or fetch it elsewhere" in said[0]
    assert "Traceback" not in first.stderr
    assert not out.parent.exists()
    [part] = begun(hub)
    assert part.stat().st_size == PIECE

    hub.cut = ""
    hub.ranges.clear()
    second = python(hub, *command)
    assert second.returncode == 0, second.stderr
    assert hub.ranges == [(TARGET, f"bytes={PIECE}-"), (DRAFTER, "")]
    assert not begun(hub)
    pair = open_target(hub.root / TARGET), open_drafter(hub.root / DRAFTER)
    build_cpu(*pair, BuildOptions("direct", block=8, max_seq_len=128), tmp_path / "direct")
    assert weights(out) == weights(tmp_path / "direct")

    hub.ranges.clear()
    offline = python(hub, "-c", DOWNLOAD, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    folder = Path(offline.stdout.strip())
    data = (hub.root / TARGET / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == data
    assert not hub.ranges


def weights(engine: Path) -> str:
    return json.loads((engine / "engine.json").read_text())["files"]["weights.bin"]["sha256"]


def test_what_the_hub_refuses_is_one_sentence(hub: Hub) -> None:
    """The reason is further down in what huggingface_hub says."""
    missing = python(hub, "-c", DOWNLOAD.replace(TARGET, "org/none"))
    said = missing.stderr.splitlines()[-1]
    assert "org/none: cannot be downloaded from the Hugging Face hub (Repository Not Found" in said
    assert said.endswith("); fetch it elsewhere and give the folder as a path")


def test_a_killed_download_goes_on_and_is_checked(hub: Hub) -> None:
    """Where what it left is damaged, that is noticed; the next run begins anew."""
    hub.hold = True
    killed = subprocess.Popen([sys.executable, "-c", DOWNLOAD], env=environment(hub))
    assert hub.reached.wait(30)
    deadline = monotonic() + 60
    while not (begun(hub) and begun(hub)[0].stat().st_size >= PIECE):
        assert killed.poll() is None
        assert monotonic() < deadline
    killed.kill()
    killed.wait()
    [part] = begun(hub)
    assert part.stat().st_size == PIECE
    data = bytearray(part.read_bytes())
    data[1000] ^= 1
    part.write_bytes(data)

    hub.cut = ""
    hub.ranges.clear()
    refused = python(hub, "-c", DOWNLOAD)
    assert refused.returncode == 1
    assert f"{TARGET}: model.safetensors came with SHA-256" in refused.stderr.splitlines()[-1]
    assert "it was taken away, fetch it again" in refused.stderr.splitlines()[-1]
    assert not begun(hub)
    again = python(hub, "-c", DOWNLOAD)
    assert again.returncode == 0, again.stderr
    assert hub.ranges == [(TARGET, f"bytes={PIECE}-"), (TARGET, "")]


def test_a_part_that_is_longer_than_its_file_is_begun_anew(hub: Hub) -> None:
    assert python(hub, "-c", DOWNLOAD).returncode != 0
    [part] = begun(hub)
    with part.open("ab") as file:
        file.truncate(10 * PIECE)
    hub.cut = ""
    hub.ranges.clear()
    again = python(hub, "-c", DOWNLOAD)
    assert again.returncode == 0, again.stderr
    assert hub.ranges == [(TARGET, "")]
