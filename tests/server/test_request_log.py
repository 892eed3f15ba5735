"""One line for every request, and its id in the answer, the log and the dashboard."""

import json
import logging
import threading
from dataclasses import replace

import httpx
import pytest

from keepwarm import config
from keepwarm.engine.jobs import JobStatus
from keepwarm.server import process
from keepwarm.server.http.logs import JsonFormatter, log_fields, log_to_stderr
from tests.kit.waiting import wait_until
from tests.server.conftest import serve
from tests.server.test_keep_alive import Slowly

SECRET = "swordfish"
A, B = {"Authorization": "Bearer a-key"}, {"Authorization": "Bearer b-key"}


@pytest.fixture(scope="module")
def keyed(serving, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("alice = a-key\nb-key\n")
    file.chmod(0o600)
    with serving(api_keys=f"@{file}", admin_key="root") as live:
        yield live


@pytest.fixture
def lines(caplog):
    """A function: the fields of every request line so far."""
    caplog.set_level(logging.DEBUG, "keepwarm.requests")
    return lambda: [r.keepwarm_fields for r in caplog.records if r.name == "keepwarm.requests"]


def body(text=SECRET, **fields):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def line_of(lines, answer):
    """The line of an answer, which may come after its last byte."""
    name = answer.headers["x-request-id"]
    wait_until(lambda: any(line["id"] == name for line in lines()))
    (found,) = [line for line in lines() if line["id"] == name]
    return found


def test_a_line_has_names_tokens_by_place_times_and_status(keyed, lines):
    header = {**A, "X-Keepwarm-Agent": "ops"}
    cold = keyed.post("/v1/chat/completions", body(), **header)
    warm = keyed.post("/v1/chat/completions", body(), **header)
    receipt, usage = warm.json()["keepwarm"], warm.json()["usage"]
    line = line_of(lines, warm)
    assert line.pop("total_ms") >= line.pop("first_token_ms") > 0
    for part in ("reading", "preparing", "waiting", "restoring", "prefilling", "first_step"):
        assert line.pop(f"{part}_ms") >= 0
    assert line == {
        "id": warm.headers["x-request-id"],
        "key": "alice",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "agent": "ops",
        "prompt_tokens": usage["prompt_tokens"],
        **{tier: receipt["reused"].get(tier, 0) for tier in ("live", "memory", "disk")},
        "computed": receipt["recomputed"],
        "answer_tokens": usage["completion_tokens"],
        "finished": True,
    }
    assert line["live"] == usage["prompt_tokens"] - 1
    assert line["id"] != cold.headers["x-request-id"]
    assert line_of(lines, cold)["computed"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", body(stream=True)),
        ("messages", body(model="m")),
        ("responses", {"input": SECRET, "max_output_tokens": 4}),
        ("completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2}),
        ("cache/warm", body()),
    ],
)
def test_every_api_has_its_line(keyed, lines, path, asked):
    line = line_of(lines, keyed.post(f"/v1/{path}", asked, **B))
    assert (line["path"], line["status"], line["finished"]) == (f"/v1/{path}", 200, True)
    assert line["prompt_tokens"] == line["live"] + line["memory"] + line["disk"] + line["computed"]
    assert line["key"] not in ("", "b-key")


def test_refused_and_failed_requests_have_a_line_and_an_id(keyed, lines):
    for answer, status, key in (
        (keyed.post("/v1/chat/completions", {}, **A), 400, "alice"),
        (keyed.post("/v1/chat/completions", body()), 401, ""),
        (keyed.get("/v1/nowhere", **A), 404, "alice"),
        (keyed.get("/health"), 200, ""),
        (keyed.post("/v1/admin/unload", {}, **A), 403, ""),
    ):
        assert answer.status_code == status
        line = line_of(lines, answer)
        assert (line["status"], line["key"]) == (status, key)


def test_an_unexpected_error_has_an_id_too(serving, lines, monkeypatch):
    with serving() as live:
        monkeypatch.setattr(live.host, "submit", lambda request, turn: 1 / 0)
        answer = live.post("/v1/chat/completions", body())
        assert answer.status_code == 500
        assert "see its log" in answer.json()["error"]["message"]
        assert line_of(lines, answer)["status"] == 500
        assert 'outcome="failed"} 1.0' in live.get("/metrics").text


@pytest.mark.parametrize("is_prefilled", [False, True])
def test_log_line_of_a_client_that_leaves_has_what_was_done(
    served_model, tmp_path, lines, is_prefilled
):
    """Not what was planned: all of its prompt, and no token of the answer."""
    slow = replace(served_model, module=Slowly(served_model.module))
    asked = body("The quick brown fox. " * (1 if is_prefilled else 400), stream=True)
    asked |= {"max_tokens": 12000, "logit_bias": {"2": -100}}
    with serve(slow, config.load({"KEEPWARM_HOME": str(tmp_path)})) as live:

        def done():
            return live.host.engine.stats().counters

        url = f"{live.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=asked, timeout=300) as answer:
            wait_until(lambda: done()["generated_tokens" if is_prefilled else "prefilled_tokens"])
        line = line_of(lines, answer)
        assert line["finished"] is False
        assert line["computed"] == done()["prefilled_tokens"]
        assert (line["computed"] == line["prompt_tokens"]) is is_prefilled
        assert (line["answer_tokens"] > 0) is is_prefilled
        assert (line["first_token_ms"] is not None) is is_prefilled


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("my-id.7", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("é", False)],
)
def test_an_id_that_the_client_gives_is_kept_if_it_is_one(keyed, given, is_kept):
    answer = keyed.get("/v1/models", **A, **{"x-request-id": given.encode("latin-1")})
    assert (answer.headers["x-request-id"] == given) is is_kept


def test_log_lines_of_requests_without_a_key_are_limited_and_others_are_not(keyed, caplog, lines):
    """A flood without a key does not fill the disk."""
    answers = keyed.get("/v1/models", **A), keyed.get("/v1/models")
    ids = [line_of(lines, answer)["id"] for answer in answers]
    records = {r.keepwarm_fields["id"]: r for r in caplog.records}  # others' may come late
    assert [records[name].keepwarm_fields["key"] for name in ids] == ["alice", ""]
    assert [records[name].keepwarm_unlimited for name in ids] == [True, False]


class Drained(logging.Handler):
    """What a stopping server says of unsaved blocks; the second time it is let go on."""

    def __init__(self):
        super().__init__()
        self.said, self.go_on = [], threading.Event()

    def emit(self, record):
        fields = getattr(record, "keepwarm_fields", {})
        if "unsaved_blocks" in fields:
            self.said.append(fields)
        if len(self.said) == 2:
            self.go_on.set()


def test_a_stop_says_how_much_is_still_to_be_written(serving, caplog, monkeypatch):
    """At once and then at intervals, until it is on disk."""
    caplog.set_level(logging.INFO, "keepwarm.server")
    monkeypatch.setattr(process, "DRAIN_LINES_S", 0.05)
    drained = Drained()
    logging.getLogger("keepwarm.server").addHandler(drained)
    with serving() as live:
        store = live.models.store
        put = store.on_disk.disk.put

        def slow(record):
            drained.go_on.wait(300)
            return put(record)

        monkeypatch.setattr(store.on_disk.disk, "put", slow)
        live.post("/v1/chat/completions", body(SECRET * 200)).raise_for_status()
        wait_until(lambda: not live.models.n_unfinished and store.write_stats().queued_blocks > 1)
    logging.getLogger("keepwarm.server").removeHandler(drained)
    first = drained.said[0]
    assert (first["event"], first["unsaved_blocks"] > 1) == ("draining", True)
    assert first["unsaved_bytes"] > 1000
    assert "unfinished_requests" not in first
    assert len(drained.said) >= 2
    assert store.write_stats().queued_blocks == 0


def test_a_request_that_is_just_being_started_is_unfinished(serving, monkeypatch):
    """It waits no more, and its prompt is not computed yet: it may be read from disk."""
    with serving() as live:
        scheduler = live.models.loaded[0].engine._scheduler
        start, entered, go_on = scheduler._intake.start, threading.Event(), threading.Event()

        def slow(*given):
            entered.set()
            go_on.wait(300)
            return start(*given)

        monkeypatch.setattr(scheduler._intake, "start", slow)
        asked = threading.Thread(target=live.post, args=("/v1/chat/completions", body()))
        asked.start()
        try:
            assert entered.wait(300)
            assert [job.status for job in scheduler.jobs] == [JobStatus.RESTORING]
            assert live.models.n_unfinished == 1
        finally:
            go_on.set()
            asked.join(300)
        wait_until(lambda: not live.models.n_unfinished)


def test_text_and_json_have_the_same_fields():
    said = []
    logger = logging.Logger("keepwarm.server")
    logger.addFilter(lambda record: said.append(record) or False)
    log_fields(logger, logging.INFO, {"key": "", "path": "/a", "store": "/my home", "n": None})
    (record,) = said
    assert record.getMessage() == 'key=- path=/a store="/my home" n=-'
    line = json.loads(JsonFormatter().format(record))
    assert {name: line[name] for name in ("key", "path", "store", "n", "level", "logger")} == {
        "key": "",
        "path": "/a",
        "store": "/my home",
        "n": None,
        "level": "info",
        "logger": "keepwarm.server",
    }


def test_the_level_is_a_setting(caplog):
    logger = logging.getLogger("keepwarm")
    before = logger.level
    try:
        for level in ("debug", "error"):
            log_to_stderr(config.load({}, log_level=level))
            assert logger.getEffectiveLevel() == getattr(logging, level.upper())
    finally:
        logger.setLevel(before)
