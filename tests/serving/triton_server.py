"""A real Triton server on loopback, from the wheel in `.venv-triton`, with the project's own wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_trt.supervisor import die_with_parent
from tests.serving.conftest import free_ports, wait_for

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-triton"


@dataclass
class Triton:
    http: str
    grpc: str
    process: subprocess.Popen

    def generate(self, model: str, **inputs: object) -> dict:
        """One answer by /generate; an error is an object with the key `error`."""
        request = urllib.request.Request(
            f"http://{self.http}/v2/models/{model}/generate", json.dumps(inputs).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.loads(error.read())}


def environment(folder: Path) -> Path:
    """Site packages of the server's environment, with the project's wheel of now; else a skip."""
    made = subprocess.run(
        ["make", "-s", ".venv-triton/.installed", f"PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no Triton server is to be had: {made.stderr.strip()[-200:]}")
    _install_wheel(folder)
    return next(VENV.glob("lib/python*/site-packages"))


def _install_wheel(folder: Path) -> None:
    pip = [str(VENV / "bin/python"), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", ".", "-w", str(folder)], cwd=ROOT, check=True)
    wheel = next(folder.glob("*.whl"))
    subprocess.run([*pip, "install", "--no-deps", "--force-reinstall", str(wheel)], check=True)


def _backend_folder(packages: Path, folder: Path) -> Path:
    """The Python backend with the stub of this Python's version."""
    server = packages / "pytriton/tritonserver"
    python = folder / "python"
    python.mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in (
        server / "backends/python/libtriton_python.so",
        server / "backends/python/triton_python_backend_utils.py",
        server / f"python_backend_stubs/{version}/triton_python_backend_stub",
    ):
        shutil.copy(file, python)
    return folder


@contextmanager
def running_triton(
    packages: Path, repository: Path, folder: Path, exit_seconds: int = 5
) -> Iterator[Triton]:
    """The server with all models of `repository`; stopped by SIGTERM, which must leave nothing. If
    this process is killed, the server dies with it."""
    backends = _backend_folder(packages, folder / "backends")
    http, grpc, metrics = free_ports(3)
    command = [
        packages / "pytriton/tritonserver/bin/tritonserver",
        f"--model-repository={repository}", f"--backend-directory={backends}",
        "--model-control-mode=explicit", "--load-model=*", f"--exit-timeout-secs={exit_seconds}",
        "--http-address=127.0.0.1", f"--http-port={http}",
        "--grpc-address=127.0.0.1", f"--grpc-port={grpc}",
        "--metrics-address=127.0.0.1", f"--metrics-port={metrics}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=_variables(packages), stdout=log, stderr=log, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    triton = Triton(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", process)
    try:
        wait_for(lambda: process.poll() is not None or _ready(triton), 120)
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        yield triton
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                process.kill()
    wait_for(lambda: not members(process.pid), 20)


def _variables(packages: Path) -> dict[str, str]:
    libraries = [str(packages / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    return {
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(libraries),
        "HOME": os.environ.get("HOME", "/"),
    }


def _ready(triton: Triton) -> bool:
    try:
        with urllib.request.urlopen(f"http://{triton.http}/v2/health/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def members(group: int) -> list[int]:
    """Processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
