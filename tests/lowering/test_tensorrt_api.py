"""The full package's API against what our code calls, on its real bindings (11.4).

The full package cannot build anything here, but its bindings are a wheel of their own. They import
once three libraries with the right names and symbols are there, empty ones will do; then every class,
enum and signature can be compared with `tensorrt_rtx`, which the rest of the tests exercise.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_bindings") is None,
        reason="pip install --no-deps tensorrt-cu13-bindings==11.4.0.106",
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]
ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {
    "libnvinfer.so.11": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL", "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "libnvonnxparser.so.11": (
        "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL",
        "getNvOnnxParserVersion",
    ),
    "libnvinfer_plugin.so.11": ("initLibNvInferPlugins",),
}  # fmt: skip
# Where our code talks to TensorRT, and the class behind each variable's name.
SOURCES = [
    *(ROOT / "dflash_trt/lowering/tensorrt").glob("*.py"),
    ROOT / "dflash_trt/engines/tensorrt_compile.py",
    ROOT / "dflash_trt/engines/tensorrt.py",
    ROOT / "plugins/dflash_plugins/base.py",
]
OBJECTS = {
    "definition": "INetworkDefinition",
    "builder": "Builder",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "parser": "OnnxParser",
    "attention": "IAttention",
    "context": "IExecutionContext",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "layer": "*Layer",  # of some kind: which one, the interpreter of networks shows
}
# Functions of ours whose text arguments are members of an enum.
WORDS = {
    "elementwise": "ElementWiseOperation",
    "_binary": "ElementWiseOperation",
    "unary": "UnaryOperation",
    "reduce": "ReduceOperation",
    "cast": "DataType",
}
PROBE = """
import json, sys, types
wanted, package = json.load(open(sys.argv[1])), sys.argv[2]
import importlib
trt = importlib.import_module(package)
def find(chain):
    thing = trt
    kind, _, rest = chain.partition(".")
    if kind == "*Layer":
        kinds = [k for k in dir(trt) if k.endswith("Layer") and hasattr(getattr(trt, k), rest)]
        return getattr(getattr(trt, kinds[0]), rest) if kinds else None
    for part in chain.split("."):
        if not hasattr(thing, part):
            return None
        thing = getattr(thing, part)
    return thing
found = {}
for chain in wanted:
    thing = find(chain)
    found[chain] = None if thing is None else (getattr(thing, "__doc__", "") or "")[:1500]
print(json.dumps(found))
"""


def used_names() -> list[str]:
    """Attribute chains of the module that our sources use, such as `DataType.BF16`."""
    names = {f"DataType.{n}" for n in ("FP8", "FP4", "E8M0", "BF16", "INT64", "INT32", "BOOL")}
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        ours = {alias.asname or alias.name for n in nodes for alias in imported(n)}
        for node in nodes:
            names |= attributes(node, ours) | members(node)
    return sorted(names - IGNORED)


def imported(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom | ast.Import) else []


def attributes(node: ast.AST, ours: set[str]) -> set[str]:
    """`trt.DataType.BF16` and `net.definition.add_cast`, by the classes they belong to."""
    if not isinstance(node, ast.Attribute):
        return set()
    parts = [part.partition("(")[0] for part in ast.unparse(node).split(".")]
    for index, part in enumerate(parts[:-1]):
        if part == "trt" and parts[index + 1][0].isupper():
            return {".".join(parts[index + 1 : index + 3])}
        if part in OBJECTS and not (index == 0 and part in ours):
            return {f"{OBJECTS[part]}.{parts[index + 1]}"}
    return set()


def members(node: ast.AST) -> set[str]:
    """`net.elementwise(a, b, "SUM")` uses `ElementWiseOperation.SUM`."""
    if not isinstance(node, ast.Call):
        return set()
    kind = WORDS.get(ast.unparse(node.func).split(".")[-1])
    texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return {f"{kind}.{text}" for text in texts} if kind else set()


# How TensorRT-RTX is told what to compile for; the full package compiles for the GPU it runs on.
IGNORED = {
    "ComputeCapability",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lib")
    for name, symbols in LIBRARIES.items():
        code = "".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in symbols)
        (folder / "stub.c").write_text(code)
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", folder / name, folder / "stub.c"], check=True
        )
    return folder


def probe(folder: Path, package: str, names: list[str]) -> dict[str, str | None]:
    (folder / "wanted.json").write_text(json.dumps(names))
    (folder / "probe.py").write_text(PROBE)
    done = subprocess.run(
        [sys.executable, folder / "probe.py", folder / "wanted.json", package],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def signatures(doc: str) -> list[list[str]]:
    """Names of the arguments of each overload in a docstring."""
    lines = [line for line in doc.splitlines() if "(self: " in line]
    return [re.findall(r"(\w+): ", line.partition(" -> ")[0])[1:] for line in lines]


def test_every_name_that_we_use_exists_in_both_packages(libraries):
    names = used_names()
    assert {"INetworkDefinition.add_kv_cache_update", "CausalMaskKind"} <= set(names)
    assert len(names) > 120
    for package in ("tensorrt_bindings", "tensorrt_rtx"):
        found = probe(libraries, package, names)
        missing = [name for name, doc in found.items() if doc is None]
        assert not missing, f"{package} lacks {missing}"


def test_every_call_takes_the_same_arguments_in_both_packages(libraries):
    calls = [name for name in used_names() if "." in name and name.split(".")[1][0].islower()]
    full, rtx = (probe(libraries, p, calls) for p in ("tensorrt_bindings", "tensorrt_rtx"))
    for call in calls:
        wanted = signatures(rtx[call] or "")
        missing = [s for s in wanted[:1] if s not in signatures(full[call] or "")]
        assert not missing, f"{call}{missing} is {signatures(full[call] or '')} in the full package"
