"""The OpenAPI document holds for generated requests."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

APIS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate"),
}
AGAIN = {  # the bodies of the APIs, for an agent
    f"/v1/agents/{{agent_id}}/{name}"
    for name in ("chat/completions", "messages", "v1/messages", "compact")
}
GENERATING = APIS | AGAIN
MANY, FEW = 4, 2
SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}
RESPONSE = {"input": "Hello", "background": None, "conversation": None, "prompt": None}
ADMIN = {"Authorization": "Bearer admin"}
HANGS_S = 300.0  # the fuzzer's own 10 s are too few on a busy machine
AGENT = "fuzzed"

NOT_HERE = {"/v1/admin/load", "/v1/admin/unload"}  # take the model away; admin/test_models.py does


@pytest.fixture(scope="module")
def server(serving):
    """One of its own: what is kept there is cleared."""
    with serving(admin_key="admin") as live:
        yield live


@pytest.fixture(scope="module")
def document(server):
    import schemathesis  # takes seconds

    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=300)


def made(server):
    """Names of things that are there."""
    body = {"input": "Hello", "max_output_tokens": 2}
    named = {"X-Keepwarm-Agent": AGENT, "X-Keepwarm-Cache": "durable"}
    answer = server.post("/v1/responses", body, **named).json()
    number = server.host.engine.requests()[-1].number
    return {"agent_id": AGENT, "response_id": answer["id"], "name": "tiny", "number": number}


def requests(operation, path):
    """What the document allows, and where the model is asked also what it does not."""
    import schemathesis

    good = operation.as_strategy()
    if path not in GENERATING:
        return good
    bad = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    return st.one_of(good, bad)


def test_no_request_of_any_operation_breaks_the_server(server, document, pytestconfig):
    """No 5xx, and no answer that is not in the document."""
    tried = [
        (path, method)
        for path, methods in document.raw_schema["paths"].items()
        for method in methods
        if path not in NOT_HERE
    ]
    assert len(tried) > 60
    n_times = 6 if pytestconfig.getoption("--soak") else 1
    for path, method in tried:
        n_examples = n_times * (MANY if path in APIS else FEW)
        needs_things = "{" in path or "responses" in path
        known = made(server) if needs_things else {}
        fuzz(path, document[path][method.upper()], known, n_examples)


def fuzz(path, operation, known, n_examples):
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conformance = (
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.status_code_conformance,
    )

    @given(case=requests(operation, path), there=st.booleans(), stream=st.booleans())
    @settings(
        max_examples=n_examples,
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
        case.call_and_validate(
            checks=(not_a_server_error, *conformance), headers=ADMIN, timeout=HANGS_S
        )

    run()
