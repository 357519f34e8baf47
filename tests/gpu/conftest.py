"""Tests that need a GPU are skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from dflash_trt.engines import cuda
from dflash_trt.errors import InputError


@pytest.fixture(scope="session")
def capability() -> int:
    try:
        return cuda.capability()
    except InputError as error:
        pytest.skip(str(error))
