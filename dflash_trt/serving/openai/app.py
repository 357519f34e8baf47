"""The routes, as a FastAPI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Send

from dflash_trt import __version__
from dflash_trt.errors import InputError
from dflash_trt.runtime.text import TextCodec
from dflash_trt.serving.openai.answers import Answer, ChatAnswer, TextAnswer
from dflash_trt.serving.openai.choices import Choices, Job
from dflash_trt.serving.openai.describe import ERRORS, NOT_READY, describe
from dflash_trt.serving.openai.errors import ApiError, as_api_error, from_validation
from dflash_trt.serving.openai.guard import Guard
from dflash_trt.serving.openai.host import EngineHost
from dflash_trt.serving.openai.limits import ServerOptions
from dflash_trt.serving.openai.metrics import exposition
from dflash_trt.serving.openai.schema import ChatRequest, CompletionRequest, Sampling


def create_app(host: EngineHost, options: ServerOptions) -> FastAPI:
    """The application; engines begin to load when the server starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        host.start()
        yield

    app = FastAPI(title="dflash-trt", version=__version__, lifespan=lifespan)
    app.add_middleware(Guard, options=options)
    _add_error_handlers(app)
    _add_probes(app, host)
    _add_models(app, host)
    _add_completions(app, _Front(host, options))
    describe(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return from_validation(list(error.errors())).response()

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(InputError)
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()


def _add_probes(app: FastAPI, host: EngineHost) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @app.get("/ready", responses=NOT_READY)
    async def ready() -> dict[str, str]:
        """The engines have answered."""
        if not host.ready:
            raise ApiError(503, host.problem)
        return {"status": "ready"}

    @app.get("/metrics", responses=NOT_READY, response_class=Response)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(exposition(host.runtime.metrics), media_type="text/plain; version=0.0.4")


def _add_models(app: FastAPI, host: EngineHost) -> None:
    def card() -> dict[str, Any]:
        created = {"object": "model", "created": 0, "owned_by": "dflash-trt"}
        return {"id": host.model, **created, "max_model_len": host.runtime.manifest.max_seq_len}

    @app.get("/v1/models", responses=NOT_READY)
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model}", responses=NOT_READY | {404: ERRORS[404]})
    async def model(model: str) -> dict[str, Any]:
        if model != host.model:
            raise ApiError(404, f"model {model!r} is not served here", "model")
        return card()


def _add_completions(app: FastAPI, front: _Front) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS, response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        tools, messages = body.used_tools(), [m.for_template() for m in body.messages]
        front.check_model(body)
        ids = await run_in_threadpool(front.host.chat_ids, messages, tools, body.reasoning_effort)
        readers = [front.host.reader(bool(tools)) for _ in range(body.choices)]
        answer = ChatAnswer(*front.head(), readers)
        return await front.respond(request, body, [ids], answer)

    @app.post("/v1/completions", responses=ERRORS, response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt; no chat template is applied."""
        front.check_model(body)
        prompts = await run_in_threadpool(front.ids, body)
        answer = TextAnswer(*front.head(), len(prompts))
        return await front.respond(request, body, prompts, answer)


class _Front:
    """From a checked body to a response."""

    def __init__(self, host: EngineHost, options: ServerOptions) -> None:
        self.host, self._options = host, options

    def head(self) -> tuple[str, str, TextCodec]:
        runtime = self.host.runtime
        fingerprint = f"dflash-{runtime.manifest.target.digest.split(':')[-1][:12]}"
        return self.host.model, fingerprint, runtime.codec

    def check_model(self, body: Sampling) -> None:
        if body.model is not None and body.model != self.host.model:
            raise ApiError(404, f"model {body.model!r} is not served here", "model")

    def ids(self, body: CompletionRequest) -> list[Sequence[int]]:
        codec = self.host.runtime.codec
        return [codec.ids(p) if isinstance(p, str) else p for p in body.prompts()]

    async def respond(
        self, request: Request, body: Sampling, prompts: Sequence[Sequence[int]], answer: Answer
    ) -> Response:
        jobs = [job for prompt in prompts for job in self._jobs(prompt, body)]
        choices = Choices(self.host, jobs, self._options.request_seconds)
        if body.stream:
            return EventStream(_events(choices, answer, body.wants_usage))
        await _until_done(request, choices)
        return JSONResponse(answer.whole(choices.generations))

    def _jobs(self, prompt: Sequence[int], body: Sampling) -> list[Job]:
        limit = self._max_tokens(len(prompt), body)
        return [(prompt, body.options(limit, index)) for index in range(body.choices)]

    def _max_tokens(self, prompt: int, body: Sampling) -> int:
        """What was asked for, else what fits; more than the server's limit is refused."""
        limit = self._options.max_tokens or self.host.runtime.manifest.max_seq_len
        wanted = body.wanted_tokens()
        if wanted is not None and wanted > limit:
            raise ApiError(
                400, f"max_tokens: {wanted} is above this server's {limit}", "max_tokens"
            )
        room = max(self.host.runtime.manifest.max_seq_len - prompt, 1)
        usual = min(limit, room, body.usual_tokens or room)
        return wanted or max(usual, body.min_tokens or 0)


async def _until_done(request: Request, choices: Choices) -> None:
    """Wait for all choices; a client that goes away cancels them."""
    done = asyncio.create_task(_drain(choices))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ApiError(499, "the client went away")
        try:
            done.result()
        except Exception as error:
            raise as_api_error(error) from error
    finally:
        for task in (done, gone):
            task.cancel()
        await asyncio.gather(done, gone, return_exceptions=True)


async def _drain(choices: Choices) -> None:
    async for _ in choices.deltas():
        pass


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(choices: Choices, answer: Answer, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events: chunks, [DONE]; an error takes the place of [DONE]."""
    try:
        for index in range(len(choices.generations)):
            if (chunk := answer.opening(index)) is not None:
                yield _event(chunk)
        async with aclosing(choices.deltas()) as deltas:  # type: ignore[type-var]
            async for index, delta in deltas:
                chunk = answer.chunk(index, delta, choices.generations[index])
                if chunk is not None:
                    yield _event(chunk)
        if with_usage:
            yield _event(answer.closing(choices.generations))
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(as_api_error(error).body())
    finally:
        choices.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class EventStream(StreamingResponse):
    """A stream that is closed as soon as the client is gone."""

    def __init__(self, events: AsyncIterator[str]) -> None:
        self._events = events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):  # type: ignore[type-var]
            await super().stream_response(send)
