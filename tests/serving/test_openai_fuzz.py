"""Generated requests against the server's own OpenAPI description: no 5xx, answers as described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from dflash_trt.serving.openai.limits import ServerOptions
from tests.serving.conftest import Served, serving

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
BOUNDED = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def short(tiny_engine: Path) -> Iterator[Served]:
    """Short answers: a generated request may ask for 16 choices and name no length."""
    with serving(tiny_engine, ServerOptions(max_tokens=8, threads=1)) as served:
        yield served


def test_generated_requests(short: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    answered: set[tuple[str, int]] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @BOUNDED
        @valid_or_not(operation)
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                _soften(case.body)
            response = case.call(timeout=30)
            answered.add((case.path, response.status_code))
            case.validate_response(response, checks=CHECKS)

        check()
    assert {("/v1/completions", 200), ("/v1/chat/completions", 200)} <= answered
    assert {("/v1/completions", 400), ("/v1/chat/completions", 400)} <= answered


def _soften(body: dict) -> None:
    """Leave out valid values that this server would refuse for being another model's or too large."""
    for name, kind in (("model", str), ("stream", bool), ("max_tokens", int),
                       ("max_completion_tokens", int), ("min_tokens", int)):  # fmt: skip
        value = body.get(name)
        if type(value) is kind and (kind is not int or 1 <= value < 2**31):
            del body[name]


def valid_or_not(operation):
    """Cases of an operation, some valid, some not."""
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    positive, negative = (operation.as_strategy(generation_mode=mode) for mode in modes)
    return given(case=positive | negative)
