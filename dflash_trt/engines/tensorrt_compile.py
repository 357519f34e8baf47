"""The compiling process: one request in, plans and a report out, progress on standard output.

Run as `python -m dflash_trt.engines.tensorrt_compile REQUEST.json` by `tensorrt_build`, which says
what a crash in here means to the user. Each line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from dflash_trt.engines.memory import keep_little_free_memory, return_free_memory
from dflash_trt.errors import InputError
from dflash_trt.lowering.tensorrt import api, plugins, readback, writer
from dflash_trt.lowering.tensorrt.network import Network
from dflash_trt.lowering.tensorrt.plan import NetworkReport, PlanRequest


def main(arguments: Sequence[str]) -> int:
    request = json.loads(Path(arguments[0]).read_text())
    keep_little_free_memory()
    try:
        compile_all(request)
    except InputError as error:
        say(error=str(error))
        return 2
    return 0


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def compile_all(request: dict[str, Any]) -> None:
    """Compile every plan of a request and say its report."""
    trt = api.load(request["backend"])
    compiler = Compiler(trt, tuple(request["capabilities"]))
    for item in request["plans"]:
        plan = PlanRequest.from_json(item["request"])
        say(stage="network", plan=plan.name)
        started, busy = time.monotonic(), time.process_time()
        report, size = compile_one(compiler, plan, Path(item["path"]))
        return_free_memory()
        seconds, cpu_seconds = time.monotonic() - started, time.process_time() - busy
        say(
            report=report.to_json(), plan=plan.name, seconds=seconds, cpu_seconds=cpu_seconds,
            peak_bytes=peak_bytes(), plan_bytes=size, compiler=trt.version,
        )  # fmt: skip


def compile_one(compiler: Compiler, plan: PlanRequest, path: Path) -> tuple[NetworkReport, int]:
    """Compile a plan into `path`; what was written and how many bytes. Nothing else stays."""
    report, data = compiler.compile(plan)
    return report, path.write_bytes(data)


def peak_bytes() -> int:
    """This process's peak memory. (`getrusage` would count what the parent had before the start.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class Compiler:
    """Builder, logger and plugin creators, kept alive for as long as anything is compiled."""

    def __init__(self, loaded: api.Api, capabilities: tuple[int, ...]) -> None:
        from dflash_plugins.base import register
        from dflash_plugins.registry import KINDS

        self.trt: Any = loaded.module
        self.backend, self.capabilities = loaded.backend, capabilities
        self.logger = _make_logger(self.trt)
        self.builder = self.trt.Builder(self.logger)
        self.settings: dict[str, dict[str, Any]] = {}
        self.creators = register(self.trt, list(KINDS.values()), capabilities, self.settings)

    def compile(self, plan: PlanRequest) -> tuple[NetworkReport, memoryview]:
        """Write, check and compile one network; its plan stays where the compiler put it."""
        net = self.write(plan)
        say(stage="compile", plan=plan.name, layers=net.definition.num_layers)
        data = self.builder.build_serialized_network(net.definition, self._config(net))
        if data is None:
            raise InputError(f"plan '{plan.name}': TensorRT could not compile it: {self._reason()}")
        return net.report, memoryview(data)

    def write(self, plan: PlanRequest) -> Network:
        """Write one network and compare it with its source graph."""
        graph = onnx.load(plan.graph).graph
        flags = 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        definition = self.builder.create_network(flags)
        nodes = writer.needed_nodes(graph, plan.outputs)
        self.settings.clear()
        spliced = plugins.splice(self.trt, definition, self.logger, nodes, plan, self.settings)
        net = writer.write_network(
            self.trt, definition, plan, graph, spliced, self.settings,
            progress=lambda node: say(node=node),
        )  # fmt: skip
        readback.check_network(self.trt, definition, nodes, plan)
        return net

    def _reason(self) -> str:
        return self.logger.errors[-1] if self.logger.errors else "no reason was given"

    def _config(self, net: Network) -> Any:
        trt = self.trt
        config = self.builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if self.backend == "tensorrt-rtx":
            config.num_compute_capabilities = len(self.capabilities)
            for index, capability in enumerate(self.capabilities):
                kind = getattr(trt.ComputeCapability, f"SM{capability}")
                config.set_compute_capability(kind, index)
        config.add_optimization_profile(self._profile(net))
        return config

    def _profile(self, net: Network) -> Any:
        """Smallest, usual and largest size of every input that varies."""
        profile = self.builder.create_optimization_profile()
        for name, dimensions in net.dimensions.items():
            sizes = [
                tuple(d if isinstance(d, int) else net.request.letters[d][i] for d in dimensions)
                for i in range(3)
            ]
            if sizes[0] != sizes[2]:
                profile.set_shape(name, *sizes)
        return profile


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        """Keeps errors; warnings go to standard error."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
                say(trouble=message)
            elif severity <= trt.ILogger.WARNING:
                print(message, file=sys.stderr)

    return Logger()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
