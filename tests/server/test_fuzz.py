"""The OpenAPI document holds for generated requests."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
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
APIS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate"),
}
AGAIN = {  # the bodies of the APIs, for an agent
    f"/v1/agents/{{agent_id}}/{name}"
    for name in ("chat/completions", "messages", "v1/messages", "compact")
}
GENERATING = APIS | AGAIN
MANY, FEW = 25, 8
SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}
RESPONSE = {"input": "Hello", "background": None, "conversation": None, "prompt": None}
ADMIN = {"Authorization": "Bearer admin"}
HANGS_S = 300.0  # the fuzzer's own 10 s are too few on a busy machine
AGENT = "fuzzed"

OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/compact"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/api/chat"),
    ("POST", "/api/generate"),
    ("POST", "/api/embed"),
    ("POST", "/api/embeddings"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/api/show"),
    ("POST", "/api/pull"),
    ("GET", "/v1/agents"),
    ("POST", "/v1/agents"),
    ("POST", "/v1/agents/import"),
    ("GET", "/v1/agents/{agent_id}"),
    ("PATCH", "/v1/agents/{agent_id}"),
    ("DELETE", "/v1/agents/{agent_id}"),
    ("POST", "/v1/agents/{agent_id}/fork"),
    ("POST", "/v1/agents/{agent_id}/rewind"),
    ("GET", "/v1/agents/{agent_id}/export"),
    ("POST", "/v1/agents/{agent_id}/chat/completions"),
    ("POST", "/v1/agents/{agent_id}/v1/messages"),
    ("POST", "/v1/agents/{agent_id}/compact"),
    ("POST", "/v1/admin/agents/{agent_id}/release"),
    ("GET", "/v1/cache"),
    ("POST", "/v1/cache/lookup"),
    ("POST", "/v1/cache/lookup/completions"),
    ("POST", "/v1/cache/lookup/messages"),
    ("POST", "/v1/cache/lookup/responses"),
    ("POST", "/v1/cache/warm"),
    ("POST", "/v1/cache/warm/completions"),
    ("POST", "/v1/cache/warm/messages"),
    ("POST", "/v1/cache/warm/responses"),
    ("POST", "/v1/cache/prefill"),
    ("POST", "/v1/cache/prefill/completions"),
    ("POST", "/v1/cache/prefill/messages"),
    ("POST", "/v1/cache/prefill/responses"),
    ("POST", "/v1/cache/clear"),
    ("POST", "/v1/cache/verify"),
    ("GET", "/metrics"),
    ("GET", "/v1/dashboard/now"),
    ("GET", "/v1/dashboard/requests"),
    ("POST", "/v1/dashboard/requests/{number}/cancel"),
    ("GET", "/v1/dashboard/agents"),
    ("GET", "/v1/dashboard/connect"),
    ("GET", "/v1/dashboard/settings"),
    ("GET", "/v1/dashboard/saved"),
    ("GET", "/v1/dashboard/forest"),
    ("GET", "/v1/dashboard/misses"),
]
NOT_HERE = {  # these take the model away; test_admin.py does so
    ("POST", "/v1/admin/load"),
    ("POST", "/v1/admin/unload"),
}


@pytest.fixture(scope="module")
def server(serving):
    """One of its own: what is kept there is cleared."""
    with serving(admin_key="admin") as live:
        yield live


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=300)


@pytest.fixture
def known(server):
    """Names of things that are there."""
    body = {"input": "Hello", "max_output_tokens": 2}
    named = {"X-Keepwarm-Agent": AGENT, "X-Keepwarm-Cache": "durable"}
    answer = server.post("/v1/responses", body, **named).json()
    number = server.host.engine.requests()[-1].number
    return {"agent_id": AGENT, "response_id": answer["id"], "name": "tiny", "number": number}


def test_every_operation_is_tried(document):
    found = {
        (method.upper(), path)
        for path, methods in document.raw_schema["paths"].items()
        for method in methods
    }
    assert found == {*OPERATIONS, *NOT_HERE}


def requests(operation, path):
    """What the document allows, and where the model is asked also what it does not."""
    good = operation.as_strategy()
    if path not in GENERATING:
        return good
    bad = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    return st.one_of(good, bad)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_breaks_it(document, known, method, path):
    """No 5xx, and no answer that is not in the document."""

    @given(case=requests(document[path][method], path), there=st.booleans(), stream=st.booleans())
    @settings(
        max_examples=MANY if path in APIS else FEW,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case, there, stream):
        if isinstance(case.body, dict):
            case.body |= SHORT | {"stream": stream}  # long answers are no news
        if isinstance(case.body, dict) and path.startswith("/api/"):
            given = case.body.get("options")
            limited = {**given, "num_predict": 2} if isinstance(given, dict) else given
            case.body |= {"options": limited or {"num_predict": 2}, "keep_alive": None}
        if there and isinstance(case.body, dict) and "responses" in path:
            case.body |= RESPONSE | {"previous_response_id": known["response_id"]}
        if there and case.path_parameters:
            case.path_parameters = {name: known[name] for name in case.path_parameters}
        case.call_and_validate(checks=CHECKS, headers=ADMIN, timeout=HANGS_S)

    run()
