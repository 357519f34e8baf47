"""The op domain: one opset for the bodies, one registry of reference functions.

Shape letters used by every op in this folder:

    B  sequences in the batch          S  tokens of a sequence in this call
    N  query heads                     K  key/value heads (N is a multiple of K)
    D  size of one head                L  capacity of a cache, in tokens
    R  feature rows to inject          W  rows whose logits are read
    M  drafted slots (block - 1)       V  vocabulary
    P  rows of a rotary table          ranks  processes that share one target
"""

import onnx
from onnxscript import values

from dflash_trt.domain import DOMAIN

VERSION = 1
OPSET_VERSION = 24

DFLASH = values.Opset(DOMAIN, VERSION)
OPSET = values.Opset("", OPSET_VERSION)

OPSET_IMPORTS = [
    onnx.helper.make_opsetid("", OPSET_VERSION),
    onnx.helper.make_opsetid(DOMAIN, VERSION),
]


def with_domain_import(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """Return `function` importing both opsets, so that it may call other functions of ours."""
    known = {entry.domain for entry in function.opset_import}
    function.opset_import.extend(entry for entry in OPSET_IMPORTS if entry.domain not in known)
    return function
