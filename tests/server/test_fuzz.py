"""What the OpenAPI document promises holds for requests nobody thought of."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health/live"),
]


@pytest.fixture(scope="module")
def document(live):
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_breaks_it(document, method, path):
    """No 5xx, and no answer that is not in the document."""

    @given(case=document[path][method].as_strategy())
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        if isinstance(case.body, dict):
            case.body |= {"max_tokens": 2, "max_completion_tokens": 2}  # long answers are no news
        case.call_and_validate(checks=CHECKS)

    run()
