"""What a plugin states about itself, and the `IPluginV3` class made from that statement.

A `PluginKind` knows its inputs, outputs, kernels and launches, and nothing of TensorRT. The classes
that TensorRT sees are made for the module in use (`tensorrt` or `tensorrt_rtx`), because their base
classes live there.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dflash_plugins.aot import Cubin, KernelBuild, compile_kernel, pack, unpack
from dflash_plugins.launch import Launch, LoadedKernels, device_capability

NAMESPACE = "dflash"
VERSION = "1"
SETTINGS, DESCRIPTION, CODE = "settings", "kernels", "code"

Settings = dict[str, Any]


@dataclass(frozen=True)
class Tensor:
    """A device tensor as a launch sees it."""

    address: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """An output's type, and the input whose shape it has."""

    dtype: str
    like: int


class PluginKind(ABC):
    """One plugin with its settings (`dtype`, sizes that are fixed when the plan is built).

    While a network is written, `settings` may be filled in after the plugin was made.
    """

    name: ClassVar[str]
    num_outputs: ClassVar[int] = 1

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def input_types(self) -> tuple[str, ...]:
        """TensorRT type names of all inputs, such as `BF16`."""

    @abstractmethod
    def outputs(self) -> tuple[Output, ...]: ...

    @abstractmethod
    def kernels(self) -> tuple[KernelBuild, ...]: ...

    @abstractmethod
    def launches(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int
    ) -> list[Launch]: ...

    def workspace_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Scratch memory for inputs of these largest shapes."""
        return 0


def build_cubins(kind: PluginKind, capabilities: Sequence[int]) -> list[Cubin]:
    """The kernels of one plugin for every capability of a plan."""
    return [compile_kernel(k, capability) for capability in capabilities for k in kind.kernels()]


CubinSource = Callable[[PluginKind], list[Cubin]]


def make_classes(trt: Any) -> tuple[type, type]:
    """(plugin class, creator class) on the base classes of `trt`."""
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class Plugin(*bases):  # type: ignore[misc]
        """A plugin of ours as TensorRT sees it; everything particular is in its `PluginKind`."""

        def __init__(self, kind: PluginKind, cubins: CubinSource) -> None:
            for base in bases:
                base.__init__(self)
            self.plugin_name, self.plugin_version = kind.name, VERSION
            self.plugin_namespace = NAMESPACE
            self.num_outputs = kind.num_outputs
            self.kind, self.cubins = kind, cubins
            self.loaded: LoadedKernels | None = None

        def get_capability_interface(self, _kind: Any) -> Plugin:
            return self

        def clone(self) -> Plugin:
            copy = Plugin(self.kind, self.cubins)
            copy.loaded = self.loaded
            return copy

        def get_output_data_types(self, _types: Any) -> list[Any]:
            return [getattr(trt.DataType, output.dtype) for output in self.kind.outputs()]

        def get_output_shapes(self, inputs: Any, _shape_inputs: Any, _builder: Any) -> list[Any]:
            return [trt.DimsExprs(inputs[output.like]) for output in self.kind.outputs()]

        def supports_format_combination(self, position: int, tensors: Any, _count: int) -> bool:
            names = (*self.kind.input_types(), *(o.dtype for o in self.kind.outputs()))
            given = tensors[position].desc
            wanted = getattr(trt.DataType, names[position])
            return bool(given.format == trt.TensorFormat.LINEAR and given.type == wanted)

        def configure_plugin(self, _inputs: Any, _outputs: Any) -> None:
            pass

        def get_aliased_input(self, _output: int) -> int:
            return -1

        def get_valid_tactics(self) -> list[int]:
            return [1]

        def set_tactic(self, _tactic: int) -> None:
            pass

        def get_workspace_size(self, inputs: Any, _outputs: Any) -> int:
            return self.kind.workspace_bytes([tuple(tensor.max) for tensor in inputs])

        def get_fields_to_serialize(self) -> Any:
            description, code = pack(self.cubins(self.kind))
            settings = json.dumps(self.kind.settings).encode()
            # TensorRT reads the arrays after this call returns: keep them.
            self.kept = [np.frombuffer(data, np.int8) for data in (settings, description, code)]
            kinds = trt.PluginFieldType
            return trt.PluginFieldCollection(
                [
                    trt.PluginField(SETTINGS, self.kept[0], kinds.CHAR),
                    trt.PluginField(DESCRIPTION, self.kept[1], kinds.CHAR),
                    trt.PluginField(CODE, self.kept[2], kinds.INT8),
                ]
            )

        def on_shape_change(self, _inputs: Any, _outputs: Any) -> None:
            pass

        def attach_to_context(self, _context: Any) -> Plugin:
            copy = self.clone()
            copy.loaded = copy.loaded or LoadedKernels(self.cubins(self.kind), device_capability())
            return copy

        def enqueue(
            self, input_descs: Any, output_descs: Any, inputs: Any, outputs: Any,
            workspace: int, stream: int,
        ) -> None:  # fmt: skip
            assert self.loaded is not None, "the plugin was not attached to a context"
            launches = self.kind.launches(
                _tensors(input_descs, inputs), _tensors(output_descs, outputs), workspace
            )
            for launch in launches:
                self.loaded.launch(launch, stream)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        """Makes a plugin from an ONNX node (build) or from the fields in a plan (run).

        The node's `settings` is a name: the settings themselves are put into `settings[name]` by the
        time that the network is compiled. Kernels are compiled when the plan is written.
        """

        def __init__(
            self, kind: type[PluginKind], capabilities: Sequence[int], settings: dict[str, Settings]
        ) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = kind.name, VERSION, NAMESPACE
            self.kind, self.capabilities, self.settings = kind, tuple(capabilities), settings
            self.compiled: dict[str, list[Cubin]] = {}
            empty = np.array([], np.int8)
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField(SETTINGS, empty, trt.PluginFieldType.CHAR)]
            )

        def create_plugin(self, _name: str, fields: Any, phase: Any) -> Plugin:
            held = {item.name: _field_bytes(item) for item in fields}
            if phase == trt.TensorRTPhase.BUILD:
                own = self.settings.setdefault(held[SETTINGS].rstrip(b"\0").decode(), {})
                return Plugin(self.kind(own), self.build)
            cubins = unpack(held[DESCRIPTION], held[CODE])
            return Plugin(self.kind(json.loads(held[SETTINGS])), lambda _kind: cubins)

        def build(self, kind: PluginKind) -> list[Cubin]:
            """The kernels of `kind`, compiled once for each set of settings."""
            key = json.dumps(kind.settings, sort_keys=True)
            if key not in self.compiled:
                self.compiled[key] = build_cubins(kind, self.capabilities)
            return self.compiled[key]

    return Plugin, Creator


def _field_bytes(item: Any) -> bytes:
    data = item.data
    if isinstance(data, str):
        return data.encode()
    return bytes(data) if isinstance(data, bytes) else np.asarray(data).tobytes()


def _tensors(descriptions: Any, addresses: Any) -> list[Tensor]:
    return [
        Tensor(int(address), tuple(description.dims))
        for description, address in zip(descriptions, addresses, strict=True)
    ]


def register(
    trt: Any,
    kinds: Sequence[type[PluginKind]],
    capabilities: Sequence[int],
    settings: dict[str, Settings] | None = None,
) -> list[Any]:
    """Register a creator for each kind; keep the returned list as long as TensorRT is used.

    `capabilities` and `settings` are of use when plans are built, not when they are run.
    """
    _, creator_class = make_classes(trt)
    held = {} if settings is None else settings
    creators = [creator_class(kind, capabilities, held) for kind in kinds]
    for creator in creators:
        if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
            raise RuntimeError(f"the plugin {creator.name} could not be registered")
    return creators
