"""Whom a sweep asks: the runtime in this process, or a running server, OpenAI-compatible or Triton.

A server is asked through its HTTP stream, from the outside: times include the network and the HTTP
stack. Tokens are those it reports, never its chunks. Drafting is switched off with the request field
`draft`, and each answer must say in its figures that it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from threading import Thread
from time import perf_counter
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from dflash_trt.bench.interactivity import Timeline
from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import Delta, GenerationOptions, Prompt, Runtime

Json = dict[str, Any]
Finished = Callable[[], None]
_SECONDS = 600.0


class Endpoint(Protocol):
    """Answers prompts. slots: users that it serves at once at most, None where it does not say."""

    @property
    def name(self) -> str: ...
    @property
    def slots(self) -> int | None: ...
    def count(self, text: str) -> int:
        """Tokens of a prompt, the chat template included."""

    def submit(self, prompt: Prompt, options: GenerationOptions, finished: Finished) -> Timeline:
        """Begin a request; its timeline fills up until `finished` is called, whatever happens."""


class LocalRuntime:
    """The runtime in this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.name, self.slots = runtime.manifest.name, runtime.manifest.max_batch

    def count(self, text: str) -> int:
        return len(self._runtime.prompt_ids(text))

    def submit(self, prompt: Prompt, options: GenerationOptions, finished: Finished) -> Timeline:
        line = Timeline()

        def sink(delta: Delta) -> None:
            if delta.tokens:
                line.arrivals.append((perf_counter(), len(delta.tokens)))
            if delta.finish_reason is not None:
                line.failure = None if delta.error is None else str(delta.error)
                finished()

        self._runtime.submit(prompt, options, sink, line.generation)
        return line


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer. tokens: in this piece where the server says so, in the whole
    answer where `whole`; figures: what drafting did, in the last piece."""

    carries: bool = False
    tokens: int | None = None
    whole: bool = False
    prompt_tokens: int | None = None
    figures: Json | None = None


class Dialect(Protocol):
    """What one kind of server is sent, and what its events mean."""

    @property
    def path(self) -> str: ...
    def body(self, prompt: Prompt, options: GenerationOptions) -> Json: ...
    def read(self, event: Json) -> Chunk: ...


@dataclass(frozen=True)
class OpenAIDialect:
    """/v1/chat/completions; the count of tokens comes with the usage, at the end."""

    model: str
    path: str = "/v1/chat/completions"

    def body(self, prompt: Prompt, options: GenerationOptions) -> Json:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": options.max_tokens,
            "ignore_eos": options.ignore_eos,
            "draft": options.draft,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: Json) -> Chunk:
        usage = event.get("usage") or {}
        choice = (event.get("choices") or [{}])[0]
        return Chunk(
            carries=bool((choice.get("delta") or {}).get("content")),
            tokens=usage.get("completion_tokens"),
            whole=True,
            prompt_tokens=usage.get("prompt_tokens"),
            figures=choice.get("dflash"),
        )


@dataclass(frozen=True)
class TritonDialect:
    """/generate_stream of the model that `dflash-trt triton` writes; each response says how many
    tokens it carries."""

    model: str

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/generate_stream"

    def body(self, prompt: Prompt, options: GenerationOptions) -> Json:
        text = (
            {"text_input": prompt}
            if isinstance(prompt, str)
            else {"messages": json.dumps(list(prompt))}
        )
        sampling = {"max_tokens": options.max_tokens, "ignore_eos": options.ignore_eos}
        returned = ("num_input_tokens", "num_output_tokens", "figures", "finish_reason")
        return {
            **text,
            "sampling_parameters": json.dumps(sampling),
            "draft": options.draft,
            "stream": True,
            **{f"return_{name}": True for name in returned},
        }

    def read(self, event: Json) -> Chunk:
        count = event.get("num_output_tokens")
        figures = event.get("figures")
        return Chunk(
            carries=bool(count),
            tokens=count,
            prompt_tokens=event.get("num_input_tokens"),
            figures=json.loads(figures) if figures and event.get("finish_reason") else None,
        )


class Server:
    """A server at `url`, asked in one thread per request."""

    slots: int | None = None

    def __init__(self, url: str, dialect: Dialect, name: str, key: str | None = None) -> None:
        self._url, self._dialect, self.name, self._key = url, dialect, name, key

    def count(self, text: str) -> int:
        line = Timeline()
        self._ask(line, text, GenerationOptions(1))
        return line.generation.metrics.prompt_tokens

    def submit(self, prompt: Prompt, options: GenerationOptions, finished: Finished) -> Timeline:
        line = Timeline()

        def ask() -> None:
            try:
                self._ask(line, prompt, options)
            except (OSError, HTTPException, ValueError, InputError) as error:
                line.failure = str(error)
            finally:
                finished()

        Thread(target=ask, name="dflash-user", daemon=True).start()
        return line

    def _ask(self, line: Timeline, prompt: Prompt, options: GenerationOptions) -> None:
        figures: Json = {}
        metrics = line.generation.metrics
        body = self._dialect.body(prompt, options)
        for event in _events(_opened(self._url + self._dialect.path, body, self._key)):
            chunk = self._dialect.read(event)
            if chunk.carries:
                line.arrivals.append((perf_counter(), chunk.tokens or 0))
            if chunk.whole and chunk.tokens is not None:
                line.counted = chunk.tokens
            metrics.prompt_tokens = chunk.prompt_tokens or metrics.prompt_tokens
            figures = chunk.figures or figures
        _check(figures, options)
        metrics.cycles = figures["cycles"]
        metrics.committed = round(figures["cycles"] * figures["acceptance_length"])


def _check(figures: Json, options: GenerationOptions) -> None:
    """An answer that was drafted against our wish, or does not say, would be counted wrongly."""
    if "drafting" not in figures:
        raise InputError("the server's answer does not say what drafting did")
    if options.draft == figures["drafting"].startswith("off"):
        raise InputError(f"drafting was asked to be {options.draft}, it was {figures['drafting']}")


def find_server(url: str, model: str | None = None, key: str | None = None) -> Server:
    """The server at a base URL: OpenAI-compatible if it lists models at /v1/models, else Triton.

    model: None for the first that it lists; key: sent as a bearer token.
    """
    url = url.rstrip("/").removesuffix("/v1")
    listed = _json(f"{url}/v1/models", None, key)
    if listed is not None:
        name = _chosen(url, model, [entry["id"] for entry in listed["data"]])
        return Server(url, OpenAIDialect(name), f"{name} at {url} (OpenAI)", key)
    index: Any = _json(f"{url}/v2/repository/index", {"ready": True}, key)
    if index is None:
        raise InputError(f"{url}: is neither an OpenAI-compatible server nor a Triton")
    name = _chosen(url, model, [entry["name"] for entry in index])
    return Server(url, TritonDialect(name), f"{name} at {url} (Triton)", key)


def _chosen(url: str, model: str | None, served: Sequence[str]) -> str:
    if not served or (model is not None and model not in served):
        wanted = "a model" if model is None else f"the model '{model}'"
        raise InputError(f"{url}: does not serve {wanted}, but {', '.join(served) or 'none'}")
    return model or served[0]


def _json(url: str, body: Json | None, key: str | None) -> Json | None:
    """An answer; None where the server knows no such path."""
    try:
        with closing(_opened(url, body, key)) as answer:
            return json.loads(answer.read())
    except InputError as error:
        if isinstance(error.__cause__, HTTPError) and error.__cause__.code in (400, 404, 405):
            return None
        raise


def _opened(url: str, body: Json | None, key: str | None) -> Any:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urlopen(Request(url, data, headers), timeout=_SECONDS)
    except HTTPError as error:
        raise InputError(f"{url}: {error.code}, {_reason(error)}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise InputError(f"{url}: {error}") from error


def _reason(error: HTTPError) -> str:
    """The server's own words."""
    try:
        content = json.loads(error.read())["error"]
        return str(content["message"] if isinstance(content, dict) else content)
    except (OSError, ValueError, LookupError, TypeError):
        return error.reason


def _events(answer: Any) -> Iterator[Json]:
    """The objects of a stream of server-sent events."""
    with closing(answer):
        for line in answer:
            data = line.decode().removeprefix("data:").strip()
            if not line.startswith(b"data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise InputError(f"the server: {event['error']}")
            yield event
