"""A real Triton server with generated repositories, asked by the real client."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from dflash_trt.bench.endpoints import find_server
from dflash_trt.bench.interactivity import sweep
from dflash_trt.cli import main
from dflash_trt.engines.build import BuildOptions, build_cpu
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.serving.triton.tensors import INPUTS
from tests.serving import deployment
from tests.serving.conftest import wait_for
from tests.serving.triton_server import Triton, environment, members, running_triton

QUESTION = "Why is the sky blue?"
TYPES = {"STRING": "BYTES"}


@pytest.fixture(scope="module")
def engine(tiny_checkpoints: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "tiny4"
    build_cpu(*tiny_checkpoints, BuildOptions("tiny4", block=8, max_seq_len=512, max_batch=4), out)
    return out


@pytest.fixture(scope="module")
def runtime(engine: Path) -> Runtime:
    return Runtime.load(engine, threads=1)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def triton(
    packages: Path, engine: Path, smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Triton]:
    folder = tmp_path_factory.mktemp("triton")
    repository = str(folder / "repository")
    for command in (
        ["triton", str(engine), "-o", repository, "--name", "tiny", "--threads", "1", "--copy"],
        ["triton", str(engine), "-o", repository, "--name", "rows", "--threads", "1", "--max-batch", "4"],
        ["triton", str(smollm2_engine), "-o", repository],
    ):  # fmt: skip
        assert main(command) == 0
    with running_triton(packages, Path(repository), folder) as server:
        yield server
    assert server.process.returncode == 0


def expected(runtime: Runtime, **options: Any) -> Any:
    return runtime.generate(QUESTION, GenerationOptions(**{"max_tokens": 24} | options))


def tensors(kind: Any, values: dict[str, Any], rows: bool = False) -> list[Any]:
    """Inputs for the client `kind`."""
    made = []
    dtypes = {t.name: t.dtype for t in INPUTS}
    for name, value in values.items():
        dtype = TYPES.get(dtypes[name], dtypes[name])
        array = np.atleast_1d(np.array(value, np.object_ if dtype == "BYTES" else None))
        if dtype != "BYTES":
            array = array.astype({"FP32": np.float32}.get(dtype, dtype.lower()))
        if rows:
            array = array[np.newaxis] if array.ndim == 1 else array
        made.append(kind.InferInput(name, array.shape, dtype))
        made[-1].set_data_from_numpy(array)
    return made


class Stream:
    """One gRPC stream: responses in order, final flags included."""

    def __init__(self, triton: Triton) -> None:
        self.arrived: queue.SimpleQueue = queue.SimpleQueue()
        self.client = grpc_client.InferenceServerClient(triton.grpc)
        self.client.start_stream(lambda result, error: self.arrived.put((result, error)))

    def ask(self, model: str, values: dict[str, Any], rows: bool = False, name: str = "") -> None:
        self.client.async_stream_infer(
            model, tensors(grpc_client, values, rows), request_id=name,
            enable_empty_final_response=True,
        )  # fmt: skip

    def until_final(self) -> list[Any]:
        """All responses of one request."""
        results = []
        while True:
            result, error = self.arrived.get(timeout=60)
            if error is not None:
                raise error
            results.append(result)
            if is_final(result):
                return results

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def is_final(result: Any) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


def text(results: list[Any]) -> str:
    arrays = [result.as_numpy("text_output") for result in results]
    return b"".join(a.reshape(-1)[0] for a in arrays if a is not None).decode()


def test_generate_is_the_runtimes_answer(triton: Triton, runtime: Runtime) -> None:
    answer = triton.generate(
        "tiny", text_input=QUESTION, max_tokens=24, bad_words="", stop_words=""
    )
    wanted = expected(runtime)
    assert answer["text_output"] == wanted.text
    assert answer["output_ids"] == wanted.tokens
    assert answer["sequence_length"] == 24


def test_smollm2_answers_as_the_command_does(
    triton: Triton, smollm2_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(smollm2_engine), QUESTION, "--max-tokens", "20", "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    answer = triton.generate("smollm2", text_input=QUESTION, max_tokens=20, return_figures=True)
    assert answer["text_output"] == wanted["text"]
    assert answer["output_ids"] == wanted["token_ids"]
    figures = json.loads(answer["figures"])
    assert figures["drafting"] == "on"
    assert figures["acceptance_length"] == wanted["acceptance_length"]


def test_streaming_ends_with_one_final_response(triton: Triton, runtime: Runtime) -> None:
    stream = Stream(triton)
    values = {
        "text_input": QUESTION,
        "max_tokens": 24,
        "stream": True,
        "return_finish_reason": True,
    }
    stream.ask("tiny", values)
    results = stream.until_final()
    assert len(results) > 2
    assert text(results) == expected(runtime).text
    reasons = [r.as_numpy("finish_reason")[0].decode() for r in results]
    assert reasons == [""] * (len(results) - 1) + ["length"]
    stream.ask("tiny", {**values, "stream": False})
    assert text(stream.until_final()) == expected(runtime).text
    stream.close()
    assert stream.arrived.empty()


def test_http_streaming(triton: Triton, runtime: Runtime) -> None:
    body = json.dumps({"text_input": QUESTION, "max_tokens": 24, "stream": True}).encode()
    url = f"http://{triton.http}/v2/models/tiny/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as response:
        lines = [line.decode() for line in response if line.startswith(b"data: ")]
    parts = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]
    assert "".join(parts) == expected(runtime).text


def test_sixteen_at_a_time(triton: Triton, runtime: Runtime) -> None:
    questions = [f"What is {i} times {i}?" for i in range(16)]

    def ask(question: str) -> str:
        return triton.generate("tiny", text_input=question, max_tokens=20)["text_output"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, questions))
    wanted = [g.text for g in runtime.generate(questions, GenerationOptions(20))]
    assert answers == wanted
    stream = Stream(triton)
    for index, question in enumerate(questions):
        stream.ask("tiny", {"text_input": question, "max_tokens": 20}, name=str(index))
    found = {}
    for _ in questions:
        (result,) = stream.until_final()
        found[int(result.get_response().id)] = text([result])
    stream.close()
    assert found == dict(enumerate(wanted))


def test_stop_words(triton: Triton, runtime: Runtime) -> None:
    whole = expected(runtime).text
    stop = whole[10:12]
    wanted = whole[: whole.index(stop)]
    for inputs in (
        {"stop_words": ["never", stop]},
        {"sampling_parameters": json.dumps({"stop": stop})},
    ):
        answer = triton.generate(
            "tiny", text_input=QUESTION, max_tokens=24, return_finish_reason=True, **inputs
        )
        assert (answer["text_output"], answer["finish_reason"]) == (wanted, "stop")


def test_tokens_in_tokens_out(triton: Triton, runtime: Runtime) -> None:
    ids = runtime.prompt_ids(QUESTION)
    wanted = expected(runtime).tokens
    answer = triton.generate(
        "tiny", input_ids=[*ids, 9, 9], input_lengths=len(ids), request_output_len=24
    )
    assert answer["output_ids"] == wanted
    stream = Stream(triton)
    stream.ask("tiny", {"input_ids": ids, "request_output_len": 24, "streaming": True})
    pieces = [result.as_numpy("output_ids") for result in stream.until_final()]
    assert np.concatenate(pieces).tolist() == wanted
    stream.close()


EVERYTHING: dict[str, Any] = {
    "text_input": QUESTION, "apply_chat_template": True, "max_tokens": 12, "request_output_len": 12,
    "min_length": 2, "stop_words": "never", "bad_words": "", "end_id": 257, "pad_id": 257,
    "top_k": 40, "runtime_top_k": 40, "beam_width": 1, "top_p": 0.9, "runtime_top_p": 0.9,
    "temperature": 0.8, "length_penalty": 1.0, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "random_seed": 5, "stream": False,
    "streaming": False, "return_log_probs": True, "exclude_input_in_output": True,
    "sampling_parameters": '{"logprobs": 2}', "return_finish_reason": True,
    "return_cumulative_logprob": True, "return_logprobs": True, "return_num_input_tokens": True,
    "return_num_output_tokens": True, "draft": True, "adaptive": False,
    "return_figures": True,
}  # fmt: skip
OTHER_PROMPTS = ("messages", "input_ids", "input_lengths")


def test_every_input_together(triton: Triton, runtime: Runtime) -> None:
    assert {t.name for t in INPUTS} == {*EVERYTHING, *OTHER_PROMPTS}
    answer = triton.generate("tiny", **EVERYTHING)
    wanted = expected(
        runtime, max_tokens=12, min_tokens=2, top_k=40, top_p=float(np.float32(0.9)),
        temperature=float(np.float32(0.8)), min_p=float(np.float32(0.01)),
        repetition_penalty=float(np.float32(1.1)), presence_penalty=float(np.float32(0.1)),
        frequency_penalty=float(np.float32(0.1)), seed=5, logprobs=2, stop_token_ids=(257,),
    )  # fmt: skip
    assert answer["output_ids"] == wanted.tokens
    total = sum(entry.logprob for entry in wanted.logprobs)
    assert answer["cum_log_probs"] == pytest.approx(total, rel=1e-5)
    assert answer["cumulative_logprob"] == answer["cum_log_probs"]
    assert answer["output_log_probs"] == pytest.approx([e.logprob for e in wanted.logprobs])
    assert len(json.loads(answer["logprobs"])) == 12
    assert answer["num_input_tokens"] == wanted.metrics.prompt_tokens
    assert answer["num_output_tokens"] == 12
    assert json.loads(answer["figures"])["seed"] == 5


@pytest.mark.parametrize("left_out", [name for name in EVERYTHING if name != "text_input"])
def test_each_input_may_be_left_out(triton: Triton, left_out: str) -> None:
    """Over HTTP and over gRPC, with the same answer."""
    inputs = {name: value for name, value in EVERYTHING.items() if name != left_out}
    answer = triton.generate("tiny", **inputs)
    assert answer["sequence_length"] == 12
    stream = Stream(triton)
    stream.ask("tiny", inputs)
    (result,) = stream.until_final()
    stream.close()
    assert len(result.as_numpy("output_ids")) == 12
    if left_out != "random_seed":
        assert result.as_numpy("output_ids").tolist() == answer["output_ids"]


def test_messages_echo_and_plain_text(triton: Triton, runtime: Runtime) -> None:
    messages = json.dumps([{"role": "user", "content": QUESTION}])
    wanted = expected(runtime).text
    assert triton.generate("tiny", messages=messages, max_tokens=24)["text_output"] == wanted
    echoed = triton.generate(
        "tiny", text_input=QUESTION, max_tokens=24, exclude_input_in_output=False
    )
    assert echoed["text_output"] == QUESTION + wanted
    plain = triton.generate("tiny", text_input="Once", max_tokens=9, apply_chat_template=False)
    ids = runtime.codec.ids("Once")
    assert plain["text_output"] == runtime.generate(ids, GenerationOptions(9)).text


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 5}, "give exactly one of text_input, messages and input_ids"),
        ({"text_input": "x", "input_ids": [1, 2]}, "give exactly one"),
        ({"text_input": "x", "temperature": -1.0}, "temperature -1.0: must be 0 to 100"),
        ({"text_input": "x", "max_tokens": 0}, "max-tokens 0"),
        (
            {"text_input": "x", "repetition_penalty": 1e-30},
            "repetition-penalty 1.0000000031710769e-30: must be 0.01",
        ),
        ({"text_input": "x", "beam_width": 2}, "beam_width: only 1"),
        ({"text_input": "x", "bad_words": "y"}, "bad_words: not supported"),
        ({"text_input": "x" * 600}, "the engine holds 512"),
        ({"input_ids": [1, 288]}, "token 288 is outside the vocabulary"),
        ({"input_ids": [1, 2], "input_lengths": 3}, "input_lengths 3: input_ids has 2"),
        ({"messages": "["}, "messages: is not JSON"),
        ({"messages": "[1]"}, "messages: must be a list of objects"),
        ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters: is not JSON"),
        ({"text_input": "x", "sampling_parameters": '{"best": 1}'}, "best is not supported"),
        ({"text_input": "x", "sampling_parameters": '{"top_k": "a"}'}, "top_k cannot be 'a'"),
        ({"text_input": "x", "sampling_parameters": '{"n": 2}'}, "n is not supported"),
    ],
)
def test_bad_input_stays_with_its_request(triton: Triton, inputs: dict, message: str) -> None:
    answer = triton.generate("tiny", **inputs)
    assert answer["status"] == 400
    assert message in answer["error"]


def test_a_refusal_ends_a_stream_once_and_the_stream_lives(triton: Triton) -> None:
    stream = Stream(triton)
    stream.ask("tiny", {"text_input": QUESTION, "max_tokens": 0, "stream": True})
    with pytest.raises(InferenceServerException, match="max-tokens 0"):
        stream.until_final()
    stream.ask("tiny", {"text_input": QUESTION, "max_tokens": 3, "stream": True})
    assert stream.until_final()
    stream.close()


def test_rows_of_a_batch(triton: Triton, runtime: Runtime) -> None:
    """Each row has its answer and its index; the last response is the final one."""
    questions = [QUESTION, "Two?", "Three?"]
    values = {"text_input": [[q.encode()] for q in questions], "max_tokens": [[8], [9], [10]]}
    stream = Stream(triton)
    stream.ask("rows", values, rows=True)
    results = stream.until_final()
    stream.close()
    texts = {int(r.as_numpy("batch_index")[0, 0]): text([r]) for r in results}
    assert texts == {
        i: runtime.generate(question, GenerationOptions(8 + i)).text
        for i, question in enumerate(questions)
    }


def test_a_cancelled_request_frees_its_slot(triton: Triton) -> None:
    """Four long answers take the one slot and the queue; cancelled, they let a fifth through at once."""
    stream = Stream(triton)
    for index in range(4):
        parameters = json.dumps({"ignore_eos": True, "max_tokens": 900})
        values = {"text_input": QUESTION, "stream": True, "sampling_parameters": parameters}
        stream.ask("smollm2", values, name=str(index))
    stream.arrived.get(timeout=60)
    stream.close(cancel=True)
    begin = time.monotonic()
    answer = triton.generate("smollm2", text_input="Hi", max_tokens=2)
    assert answer["sequence_length"] == 2
    assert time.monotonic() - begin < 5


def alive(server: Triton) -> int:
    """Exit status of the Kubernetes example's liveness probe, asked of `server`."""
    python, *options, script = deployment.container()["livenessProbe"]["exec"]["command"]
    address = f"127.0.0.1:{deployment.ports()['http']}"
    assert (python, options, script.count(address)) == ("python3", ["-c"], 1)
    command = [sys.executable, "-c", script.replace(address, server.http)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120).returncode


def test_probes_ask_where_the_server_answers(triton: Triton) -> None:
    """Default ports are those of Triton's own."""
    stage, container = deployment.stage("triton"), deployment.container()
    assert (stage.ports, stage.asked_port) == ((8000, 8001, 8002), 8000)
    paths = [stage.asked_path]
    for probe in ("startupProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == "http"
        paths.append(asked["path"])
    for path in paths:
        with urllib.request.urlopen(f"http://{triton.http}{path}", timeout=30) as answer:
            assert answer.status == 200
    assert alive(triton) == 0


def shared_memory(server: Triton) -> set[Path]:
    """Memory files that Triton and its models' processes map; those of other servers are not."""
    found = set()
    for pid in members(server.process.pid):
        with suppress(psutil.Error):
            found |= {Path(region.path) for region in psutil.Process(pid).memory_maps()}
    held = {path for path in found if path.match("/dev/shm/*")}
    assert any(path.name.startswith("triton_python_backend") for path in held)
    return held


def left(held: set[Path]) -> list[Path]:
    """What would stay if everybody were killed now."""
    return [path for path in held if path.exists()]


def test_killed_processes(packages: Path, engine: Path, tmp_path: Path) -> None:
    """Without its process a model answers with an error until it is reloaded; a killed server takes
    its models' processes and their memory with it."""
    repository = tmp_path / "repository"
    assert main(["triton", str(engine), "-o", str(repository), "--threads", "1"]) == 0
    with running_triton(packages, repository, tmp_path) as server:
        client = http_client.InferenceServerClient(server.http)
        (child,) = set(members(server.process.pid)) - {server.process.pid}
        assert not left(shared_memory(server))
        os.kill(child, signal.SIGKILL)
        begin = time.monotonic()
        assert "error" in server.generate("tiny4", text_input="x", max_tokens=3)
        assert time.monotonic() - begin < 10
        assert alive(server) == 1
        client.unload_model("tiny4")
        wait_for(lambda: not client.is_model_ready("tiny4"))
        client.load_model("tiny4")
        assert server.generate("tiny4", text_input="x", max_tokens=3)["sequence_length"] == 3
        assert not left(shared_memory(server))
        client.close()
        server.process.kill()


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; Triton waits for a model's process when the model is unloaded."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_a_model_of_several_ranks_starts_and_ends_them(
    packages: Path, tiny_checkpoints: tuple, runtime: Runtime, tmp_path: Path
) -> None:
    """Its process is rank 0. A rank that dies ends the model with a sentence; reloaded, it answers. All
    ranks end when the model is unloaded, and when the server is killed."""
    engine, repository, log = tmp_path / "two", tmp_path / "repository", tmp_path / "log"
    build_cpu(*tiny_checkpoints, BuildOptions("two", block=8, max_seq_len=512, ranks=2), engine)
    assert main(["triton", str(engine), "-o", str(repository), "--threads", "1"]) == 0
    wanted = expected(runtime)
    with running_triton(packages, repository, tmp_path) as server:
        answer = server.generate("two", text_input=QUESTION, max_tokens=24, return_figures=True)
        assert answer["text_output"] == wanted.text
        assert json.loads(answer["figures"])["drafting"] == "on"
        first = psutil.Process(server.process.pid).children(recursive=True)
        worker = next(p for p in first if "dflash_trt.supervisor" in p.cmdline()).children()[0]
        assert not left(shared_memory(server))
        worker.kill()
        ended = f"rank 1 ({socket.gethostname()}, process {worker.pid}) has ended; all ranks end"
        wait_for(lambda: ended in log.read_text())
        assert "error" in server.generate("two", text_input="x", max_tokens=3)
        wait_for(lambda: not running(first), 20)
        client = http_client.InferenceServerClient(server.http)
        client.unload_model("two")
        wait_for(lambda: not client.is_model_ready("two"))
        client.load_model("two")
        answer = server.generate("two", text_input=QUESTION, max_tokens=24)
        assert answer["text_output"] == wanted.text
        second = psutil.Process(server.process.pid).children(recursive=True)
        assert len(running(second)) == len(first)
        client.unload_model("two")
        wait_for(lambda: not running(second), 20)
        assert log.read_text().count("all ranks end") == 1
        client.load_model("two")
        client.close()
        third = psutil.Process(server.process.pid).children(recursive=True)
        assert len(running(third)) == len(first)
        assert not left(shared_memory(server))
        server.process.kill()
    wait_for(lambda: not running(third), 20)


def test_a_server_stopped_amid_requests_leaves_nothing(
    packages: Path, engine: Path, tmp_path: Path
) -> None:
    """Triton gives up after its exit timeout and forgets the model's process."""
    repository = tmp_path / "repository"
    assert main(["triton", str(engine), "-o", str(repository), "--threads", "1"]) == 0
    parameters = json.dumps({"ignore_eos": True, "max_tokens": 400})
    body = json.dumps({"text_input": "x", "stream": True, "sampling_parameters": parameters})
    with running_triton(packages, repository, tmp_path, exit_seconds=1) as server:
        url = f"http://{server.http}/v2/models/tiny4/generate_stream"
        streams = [urllib.request.urlopen(url, body.encode(), timeout=60) for _ in range(8)]
        assert server.process.poll() is None
        assert not left(shared_memory(server))
    for stream in streams:
        stream.close()


def test_unload_and_reload(triton: Triton, runtime: Runtime) -> None:
    client = http_client.InferenceServerClient(triton.http)
    before = len(members(triton.process.pid))
    client.unload_model("rows")
    wait_for(lambda: not client.is_model_ready("rows"))
    wait_for(lambda: len(members(triton.process.pid)) == before - 1)
    client.load_model("rows")
    assert client.is_model_ready("rows")
    assert triton.generate("rows", text_input=QUESTION, max_tokens=24)["text_output"] == (
        expected(runtime).text
    )
    config = client.get_model_config("rows")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert all(tensor["optional"] for tensor in config["input"])
    client.close()


def test_a_concurrency_sweep(triton: Triton, runtime: Runtime) -> None:
    """Tokens are counted by response; drafting is switched off by request."""
    server = find_server(f"http://{triton.http}", "tiny")
    assert server.count("Why?") == len(runtime.prompt_ids("Why?"))
    plain, drafted = sweep(server, ["Why?"], [2], GenerationOptions(20, ignore_eos=True))
    for level in (plain, drafted):
        assert (level.requests, level.failed, level.output_tokens) == (4, 0, 80)
    own = runtime.generate("Why?", GenerationOptions(20, ignore_eos=True)).metrics
    assert drafted.acceptance_length == pytest.approx(own.committed / own.cycles, abs=2e-3)
    with pytest.raises(InputError, match="does not serve the model 'gpt-17', but"):
        find_server(f"http://{triton.http}", "gpt-17")
