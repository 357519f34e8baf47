"""Kernels of the plugins run in Triton's interpreter here; it has to be chosen before the import."""

import os
import sys

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
os.environ["TRITON_INTERPRET"] = "1"
