"""Prompts are never in the log: it says what failed and where, without messages.

The model of these tests quotes its prompt when it breaks, and its template when it refuses.
"""

import io
import json
import logging
import signal

import httpx
import pytest

from keepwarm.server.http.logs import (
    LINE,
    LINES_PER_MINUTE,
    JsonFormatter,
    RedactingFormatter,
    RepeatLimit,
)
from tests.kit.checkpoints import CHATML, write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.processes import SMALL, served
from tests.server.talks import tokenizer_of

SECRET = "swordfish"
BREAKS = "§"
REFUSED = "please refuse"
QUOTING = (
    "{% for message in messages %}{% if '" + REFUSED + "' in message['content'] %}"
    "{{ raise_exception('I do not like: ' + message['content']) }}{% endif %}{% endfor %}"
)
PATHS = {"chat/completions": "messages", "messages": "messages", "responses": "input"}


@pytest.fixture(scope="module")
def quoting(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quoting")
    return write_checkpoint(directory, template=QUOTING + CHATML)


def body_of(field, text, **fields):
    text = f"{text} The password is {SECRET}."
    asked = [{"role": "user", "content": text}]
    return {"model": "m", "max_tokens": 16, "max_output_tokens": 16, field: asked, **fields}


def wrong(field):
    """Bodies that are refused, each with the secret in it."""
    return [
        body_of(field, "", temperature=SECRET),
        body_of(field, REFUSED),
        body_of(field, "") | {field: [{"role": SECRET, "content": SECRET}]},
    ]


def leave_a_stream(client, path, body):
    """Read a little of an answer that would be long, and go away."""
    long = {**body, "max_tokens": 3000, "max_output_tokens": 3000, "stream": True}
    with client.stream("POST", path, json=long) as answer:
        next(answer.iter_raw())


def everything(client):
    """All that can become of a request, by each API; the bodies of those that broke."""
    broken = []
    for name, field in PATHS.items():
        path = f"/v1/{name}"
        assert client.post(path, json=body_of(field, "Well?")).status_code == 200
        for body in wrong(field):
            assert client.post(path, json=body).status_code == 400, body
        assert client.post(path, content=f'{{"{SECRET}').status_code == 400
        broken.append(client.post(path, json=body_of(field, BREAKS)))
        assert broken[-1].status_code == 500
        broken.append(client.post(path, json=body_of(field, BREAKS, stream=True)))
        leave_a_stream(client, path, body_of(field, "Well?"))
    return [answer.text for answer in broken]


def test_log_of_a_process_has_every_request_and_no_prompt(quoting, tmp_path):
    """Answers, refusals, failures and streams that are left, through three APIs."""
    token = tokenizer_of(quoting).encode(BREAKS).ids[-1]
    settings = {"KEEPWARM_LOG_FORMAT": "json", "KEEPWARM_LOG_LEVEL": "debug"}
    breaks = {"KEEPWARM_BREAKS_AT": str(token)}
    with served(quoting, tmp_path, command=SMALL, **settings, **breaks) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            told = everything(client)
            wait_until(lambda: 'state="decoding"} 0.0' in client.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        said, logged = server.process.communicate(timeout=300)
    assert all(SECRET in text for text in told)  # whose prompt it was is told all of it
    assert logged.count("builtins.RuntimeError") >= len(told)
    assert "processes.py" in logged  # where it broke
    assert SECRET not in logged
    assert SECRET not in said
    check_lines([json.loads(line) for line in logged.splitlines()])


def check_lines(lines):
    """Start, every request though there are many, stop; who only looks is for debug."""
    assert {"time", "level", "logger"} <= set.intersection(*(set(line) for line in lines))
    events = [line for line in lines if "event" in line]
    assert (events[0]["event"], events[-1]["event"]) == ("started", "stopped")
    assert events[-1]["requests"] > 0
    assert events[-1]["hit_rate"] > 0
    asked = [line for line in lines if line.get("path", "").startswith("/v1/")]
    assert len(asked) == 8 * len(PATHS) > LINES_PER_MINUTE
    assert {line["level"] for line in asked} == {"info"}
    assert {line["level"] for line in lines if line.get("path") == "/metrics"} == {"debug"}


def raised(how):
    try:
        how()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def from_a_cause():
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        raise KeyError(SECRET) from error


def while_handling():
    try:
        raise ValueError(SECRET)
    except ValueError:
        raise KeyError(SECRET)  # noqa: B904, the point


@pytest.mark.parametrize("formatter", [RedactingFormatter(LINE), JsonFormatter()])
@pytest.mark.parametrize("how", [from_a_cause, while_handling])
def test_log_names_an_error_and_its_causes_without_their_words(how, formatter):
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter)
    logger = logging.Logger("apart")
    logger.addHandler(handler)
    logger.error("it failed", exc_info=raised(how))
    assert "it failed" in written.getvalue()
    assert "builtins.KeyError" in written.getvalue()
    assert "builtins.ValueError" in written.getvalue()
    assert how.__name__ in written.getvalue()
    assert SECRET not in written.getvalue()


def test_what_is_repeated_is_logged_some_times_a_minute_and_then_counted():
    now, said = [0.0], io.StringIO()
    handler = logging.StreamHandler(said)
    handler.addFilter(RepeatLimit(clock=lambda: now[0]))
    logger = logging.Logger("repeats")
    logger.addHandler(handler)
    for second in range(61):
        now[0] = second
        logger.warning("no HTTP from %s", "there")
        if second == 30:
            logger.warning("another place")
    lines = said.getvalue().splitlines()
    assert lines[:LINES_PER_MINUTE] == ["no HTTP from there"] * LINES_PER_MINUTE
    n_dropped = 60 - LINES_PER_MINUTE
    again = f"no HTTP from there ({n_dropped} lines like this were left out)"
    assert lines[LINES_PER_MINUTE:] == ["another place", again]
