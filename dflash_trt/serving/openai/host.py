"""The engines behind a server: loaded in the background, asked once, watched afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from dflash_trt.errors import InputError
from dflash_trt.runtime.generate import GenerationOptions, Runtime
from dflash_trt.runtime.harmony_codec import HarmonyCodec
from dflash_trt.runtime.text import Message
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.limits import ServerOptions
from dflash_trt.serving.openai.readers import HarmonyReader, Reader, TextReader, ToolTextReader
from dflash_trt.serving.openai.tools import ToolTemplate


class EngineHost:
    """`ready` once the engines have answered, and no longer after they failed, until they answer
    again."""

    def __init__(self, folder: Path, options: ServerOptions) -> None:
        self._folder, self._options = folder, options
        self._runtime: Runtime | None = None
        self._tools: ToolTemplate | None = None
        self.problem = "the engines are loading"

    def start(self) -> None:
        """Load in the background, unless that is done."""
        if self._runtime is None:
            Thread(target=self._load, name="dflash-load", daemon=True).start()

    def load(self) -> None:
        """Load now."""
        self.adopt(Runtime.load(self._folder, self._options.threads, self._options.max_queue))

    def _load(self) -> None:
        try:
            self.load()
        except Exception as error:
            known = isinstance(error, InputError)
            self.problem = str(error) if known else f"the engines failed: {type(error).__name__}"

    def adopt(self, runtime: Runtime) -> None:
        """Serve with `runtime` once it has answered."""
        runtime.generate([0, 0], GenerationOptions(2, ignore_eos=True))
        self._tools = ToolTemplate(self._folder, runtime.manifest.chat_arguments)
        self._runtime, self.problem = runtime, ""

    @property
    def ready(self) -> bool:
        return not self.problem

    @property
    def runtime(self) -> Runtime:
        """The loaded runtime; 503 while there is none."""
        if self._runtime is None:
            raise ApiError(503, self.problem)
        return self._runtime

    @property
    def model(self) -> str:
        return self._options.model or self.runtime.manifest.name

    def failed(self, error: BaseException) -> None:
        self.problem = f"the engines failed: {type(error).__name__}"

    def answered(self) -> None:
        self.problem = ""

    def chat_ids(
        self, messages: Sequence[Message], tools: Sequence[Message], effort: str | None = None
    ) -> list[int]:
        """Token ids of a chat, in the model's chat format. effort: of reasoning, where it has one."""
        codec = self.runtime.codec
        if isinstance(codec, HarmonyCodec):
            return codec.chat_ids(messages, tools, effort)
        if effort is not None:
            raise InputError("reasoning_effort: this model's chat format takes none")
        if tools and self._tools is not None:
            return codec.ids(self._tools.render(messages, tools))
        return codec.chat_ids(messages)

    def reader(self, tools: bool) -> Reader:
        """For one choice of an answer to a chat."""
        codec = self.runtime.codec
        if isinstance(codec, HarmonyCodec):
            return HarmonyReader(codec.chat.stream())
        return ToolTextReader() if tools else TextReader()
