"""Generated requests against the server's own OpenAPI description: no 5xx, answers as described."""

from __future__ import annotations

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

from tests.serving.conftest import Served

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
BOUNDED = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_generated_requests(served: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    answered: set[tuple[str, int]] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @BOUNDED
        @valid_or_not(operation)
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)
                case.body.pop("stream", None)
            response = case.call(timeout=30)
            answered.add((case.path, response.status_code))
            case.validate_response(response, checks=CHECKS)

        check()
    assert {("/v1/completions", 200), ("/v1/chat/completions", 200)} <= answered
    assert {("/v1/completions", 400), ("/v1/chat/completions", 400)} <= answered


def valid_or_not(operation):
    """Cases of an operation, some valid, some not."""
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    positive, negative = (operation.as_strategy(generation_mode=mode) for mode in modes)
    return given(case=positive | negative)
