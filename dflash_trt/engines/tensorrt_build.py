"""Compiles plans in a child process and builds engine directories for TensorRT.

The compiler is a large library that may abort, and one of its parsers looks for a library by a name
that the package does not ship. So it runs in a process of its own, with that name provided, and
whatever happens to it becomes one sentence.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.engines.memory import return_free_memory
from dflash_trt.engines.plan import Expectations, Plan, check_plan
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt.plan import Binding, PlanRequest

Progress = Callable[[str], None]
COMMAND = (sys.executable, "-m", "dflash_trt.engines.tensorrt_compile")
_LIBRARY = "libtensorrt_rtx.so"
# Measured on the models of the recipes: the compiler's own code, then what each layer adds.
_BASE_BYTES, _BYTES_PER_LAYER = 500_000_000, 220_000


@dataclass(frozen=True)
class PlanReport:
    """What compiling one plan took and gave. Sizes in bytes, times in seconds."""

    name: str
    file: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    plan_bytes: int
    scratch_bytes: int
    compiler: str
    capabilities: tuple[int, ...]
    bindings: tuple[Binding, ...]
    layers: Mapping[str, int]
    kernels: Mapping[str, int]
    plugins: Mapping[str, str]
    ours: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def collectives(self) -> Sequence[str]:
        """The nodes at which ranks meet, in order."""
        return [*self.ours.get("AllReduce", ()), *self.ours.get("AllGather", ())]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PlanReport:
        """The inverse of `to_json`, after a trip through a JSON file."""
        bindings = tuple(binding_from_json(b) for b in values["bindings"])
        return cls(
            **{
                **values,
                "bindings": bindings,
                "capabilities": tuple(values["capabilities"]),
            }
        )


def binding_from_json(values: Mapping[str, Any]) -> Binding:
    return Binding(
        **{**values, "shape": tuple(values["shape"]), "made_of": tuple(values["made_of"])}
    )


def estimate_peak_bytes(layers: int) -> int:
    """Host memory that compiling a network of so many layers will take, about."""
    return _BASE_BYTES + layers * _BYTES_PER_LAYER


def compile_plans(
    plans: Sequence[PlanRequest],
    folder: Path,
    backend: str,
    capabilities: Sequence[int],
    progress: Progress = lambda _: None,
) -> list[PlanReport]:
    """Compile every plan to `folder/NAME.engine`, check it, and report.

    Raises `InputError` with one sentence if the compiler refuses, crashes or makes something else
    than was asked for; plans made so far stay in `folder`, which the caller removes.
    """
    files = {plan.name: folder / f"{plan.name}.engine" for plan in plans}
    request = {
        "backend": backend,
        "capabilities": list(capabilities),
        "plans": [{"request": p.to_json(), "path": str(files[p.name])} for p in plans],
    }
    reports = []
    for message in _run_child(request, progress):
        plan = next(p for p in plans if p.name == message["plan"])
        report = _report(message, files[plan.name])
        check_plan(
            Plan.read(files[plan.name]), _expectations(plan, report, capabilities), plan.name
        )
        reports.append(report)
        return_free_memory()  # a plan's text is large, and the next one is being compiled
    return reports


def _report(message: Mapping[str, Any], file: Path) -> PlanReport:
    network, plan = message["report"], Plan.read(file)
    return PlanReport(
        name=message["plan"],
        file=file.name,
        seconds=round(message["seconds"], 2),
        cpu_seconds=round(message["cpu_seconds"], 2),
        peak_bytes=message["peak_bytes"],
        plan_bytes=message["plan_bytes"],
        scratch_bytes=plan.scratch_bytes,
        compiler=message["compiler"],
        capabilities=plan.capabilities,
        bindings=tuple(binding_from_json(b) for b in network["bindings"]),
        layers=network["layers"],
        kernels=plan.kernels,
        plugins=network["plugins"],
        ours=network["ours"],
    )


def _expectations(
    plan: PlanRequest, report: PlanReport, capabilities: Sequence[int]
) -> Expectations:
    """Scratch is for activations: the logits of a call and a few dozen rows of the widest layer."""
    caches = [b for b in report.bindings if b.role == "cache" and b.direction == "input"]
    named = [b for b in report.bindings if b.role != "scratch"]
    weights = [b for b in report.bindings if b.role == "weight" and len(b.shape) == 2]
    batch = plan.letters["B"][2]
    rows = batch * max(
        sizes[2] for letter, sizes in plan.letters.items() if letter != "B" and letter != "L"
    )
    widest = max((max(b.shape) for b in weights), default=1)
    vocabulary_rows = batch * max(plan.letters.get(x, (1, 1, 1))[2] for x in "WM")
    return Expectations(
        capabilities=tuple(capabilities),
        inputs=tuple(b.name for b in named if b.direction == "input"),
        outputs=tuple(b.name for b in named if b.direction == "output"),
        plugins=tuple(report.plugins),
        capacity=caches[0].shape[2],
        kv_heads=max(b.shape[1] for b in caches),
        quantised=(
            *((b.shape[0], b.shape[1]) for b in weights if b.made_of[1] in ("fp8", "nvfp4")),
            *(_unpacked(b) for b in report.bindings if plan.weights.get(b.name) == "mxfp4_blocks"),
        ),
        collectives=tuple(report.collectives),
        scratch_limit=64_000_000 + 4 * 4 * widest * vocabulary_rows + 64 * rows * 4096,
    )


def _unpacked(blocks: Binding) -> tuple[int, int]:
    """Rows and columns of one expert's matrix; a plugin's blocks are bytes of two values."""
    _, rows, columns = blocks.shape
    return rows, columns * 2 if blocks.dtype == "INT8" else columns


# -- the child process


def _run_child(request: Mapping[str, Any], progress: Progress) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch, library_folder(request["backend"]) as libraries:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request))
        with (Path(scratch) / "log").open("w+") as log:
            child = subprocess.Popen(
                [*COMMAND, str(path)],
                stdout=subprocess.PIPE, stderr=log, text=True, env=_environment(libraries),
            )  # fmt: skip
            try:
                yield from _listen(child, progress, log)
            finally:
                child.kill()
                child.wait()


def _environment(libraries: str) -> dict[str, str]:
    folders = [libraries, os.environ.get("LD_LIBRARY_PATH", "")]
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**kept, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}


def _listen(child: Any, progress: Progress, log: Any) -> Iterator[dict[str, Any]]:
    """Follow the child's messages; its end decides whether all is well."""
    where, trouble = "the start", ""
    for line in child.stdout:
        if not line.startswith("{"):
            continue
        message = json.loads(line)
        if "node" in message:
            where = f"node '{message['node']}'"
        elif "stage" in message:
            where = f"plan '{message['plan']}'"
            progress(f"{message['stage']} {message['plan']}")
        elif "trouble" in message:
            trouble = message["trouble"]
        elif "error" in message:
            raise InputError(message["error"])
        elif "report" in message:
            yield message
    if child.wait() != 0:
        raise InputError(_crash_sentence(child.returncode, where, trouble, log))


def _crash_sentence(code: int, where: str, trouble: str, log: Any) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    reason = trouble or (lines[-1] if lines else "it said nothing")
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"the TensorRT compiler {how} at {where}: {reason}"


@contextmanager
def library_folder(backend: str) -> Iterator[str]:
    """A folder for the library search path, in which the ONNX parser finds its main library."""
    if backend != "tensorrt-rtx":
        yield ""
        return
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "the package tensorrt-rtx-cu13 is not installed: pip install 'dflash-trt[tensorrt-rtx]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        library = Path(spec.submodule_search_locations[0]) / f"{_LIBRARY}.1"
        (Path(folder) / _LIBRARY).symlink_to(library)
        yield folder
