"""What a calibration refuses; `tests.engines.test_tensorrt_build` compares its peaks."""

from __future__ import annotations

import pytest

from dflash_trt.engines.build import BuildOptions, source_graphs
from dflash_trt.errors import InputError
from dflash_trt.quantization.calibration import calibrate_pair


def test_a_weight_without_a_product_is_named(tiny_checkpoints):
    """The first of them, before anything is loaded or run."""
    s = source_graphs(*tiny_checkpoints, BuildOptions("tiny", 4, max_seq_len=64))
    names = {"target.l1.attn.o.weight", "lost.b", "lost.a"}
    with pytest.raises(InputError, match=r"^weight 'lost\.a': nothing is multiplied with it"):
        calibrate_pair(s.target, s.drafter, names, None, [], 4, 0, None)
