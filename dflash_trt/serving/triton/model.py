"""The class that Triton's Python backend looks for; importable inside Triton only."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.serving.triton.exchange import Exchange
from dflash_trt.serving.triton.tensors import INPUTS

_POLL_SECONDS = 0.01  # under a cycle's length
_PARENT_SECONDS = 0.5


class TritonPythonModel:
    """Loads the engines once; requests of all clients meet in the runtime's batch."""

    def initialize(self, args: Mapping[str, str]) -> None:
        _unname_shared_memory()
        Thread(target=_end_with, args=(os.getppid(),), name="dflash-parent", daemon=True).start()
        config = json.loads(args["model_config"])
        self._batched = config["max_batch_size"] > 0
        self._runtime = _load(config["parameters"], args)
        self._live: list[Exchange] = []
        self._lock, self._awake, self._ended = Lock(), Event(), False
        self._watcher = Thread(target=self._watch, name="dflash-cancel", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            exchange = Exchange(_Channel(request.get_response_sender()), self._batched)
            with self._lock:
                self._live.append(exchange)
            exchange.start(_tensors(request), self._runtime)
            self._awake.set()

    def finalize(self) -> None:
        """End what still runs, then the threads."""
        for exchange in self._alive():
            exchange.cancel()
        end = time.monotonic() + 10
        while self._alive() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        self._ended = True
        self._awake.set()
        self._watcher.join(1)

    def _alive(self) -> list[Exchange]:
        with self._lock:
            self._live = [exchange for exchange in self._live if not exchange.closed]
            return list(self._live)

    def _watch(self) -> None:
        """Triton does not tell of a cancellation, it must be asked."""
        while not self._ended:
            self._awake.wait()
            self._awake.clear()
            while not self._ended and (alive := self._alive()):
                for exchange in alive:
                    exchange.poll()
                time.sleep(_POLL_SECONDS)


def _unname_shared_memory() -> None:
    """Server and model have their shared memory open by now. Triton takes its name away when the model
    is unloaded, and leaves the file behind if either of them was killed."""
    for argument in Path("/proc/self/cmdline").read_text().split("\0"):
        if argument.startswith("triton_python_backend_shm_region_"):
            Path("/dev/shm", argument).unlink(missing_ok=True)


def _end_with(parent: int) -> None:
    """A server that is stopped amid requests, or killed, leaves this process behind; end it."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)


def _load(parameters: Mapping[str, Mapping[str, str]], args: Mapping[str, str]) -> Runtime:
    """The engines, loaded and asked once."""
    values = {key: value["string_value"] for key, value in parameters.items()}
    version = Path(args["model_repository"]) / args["model_version"]
    folder = version / values["engine_directory"]
    try:
        threads, queue = int(values["threads"]), int(values["max_queue"])
        runtime = Runtime.load(folder, threads, queue, start_ranks=True)
        runtime.generate([0, 0], GenerationOptions(2, ignore_eos=True))
    except Exception as error:
        raise pb_utils.TritonModelException(str(error)) from error
    return runtime


def _tensors(request: Any) -> dict[str, NDArray[Any]]:
    """The inputs that were sent."""
    found = {t.name: pb_utils.get_input_tensor_by_name(request, t.name) for t in INPUTS}
    return {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}


class _Channel:
    """An `exchange.Channel` over Triton's response sender."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, tensors: Mapping[str, NDArray[Any]], final: bool) -> None:
        made = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        self._respond(pb_utils.InferenceResponse(output_tensors=made), final)

    def fail(self, message: str, kind: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, kind))
        self._respond(pb_utils.InferenceResponse(output_tensors=[], error=error), True)

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()

    def _respond(self, response: Any, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)
