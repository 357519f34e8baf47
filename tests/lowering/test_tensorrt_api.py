"""The full package's API against what our code calls, on its real bindings (11.4).

The full package cannot build anything here, but its bindings are a wheel of their own. They import
once three libraries with the right names and symbols are there, empty ones will do; then every class,
enum and signature can be compared with `tensorrt_rtx`, which the rest of the tests exercise.
"""

from __future__ import annotations

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
}
PROBE = """
import json, sys, types
wanted, package = json.load(open(sys.argv[1])), sys.argv[2]
import importlib
trt = importlib.import_module(package)
def find(chain):
    thing = trt
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
    names = set()
    for path in SOURCES:
        text = path.read_text()
        names |= set(re.findall(r"\btrt\.([A-Z]\w*(?:\.[A-Z_0-9a-z]+)?)", text))
        for variable, kind in OBJECTS.items():
            if path.name == "writer.py" and variable == "attention":
                continue  # a module of ours
            calls = re.findall(rf"\b{variable}\.([a-z]\w*)\b", text)
            names |= {f"{kind}.{call}" for call in calls}
    operations = re.compile(r'"(SUM|SUB|PROD|DIV|MIN|MAX|LESS|GREATER|AND|OR)"')
    text = "".join(path.read_text() for path in SOURCES)
    names |= {f"ElementWiseOperation.{name}" for name in operations.findall(text)}
    names |= {f"DataType.{n}" for n in ("FP8", "FP4", "E8M0", "BF16", "INT64", "INT32", "BOOL")}
    names |= {f"UnaryOperation.{n}" for n in ("SQRT", "RECIP")}
    return sorted(names - IGNORED)


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
    assert len(names) > 60
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
