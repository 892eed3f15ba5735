"""The time to the first token is what a client waits, and each part of it is where it was spent."""

import json
import time

import httpx
import pytest

from keepwarm.engine.lane import Lane
from keepwarm.engine.prefill import Prefill
from tests.kit.waiting import wait_until
from tests.server.admin.test_metrics import read
from tests.server.test_request_log import line_of, lines  # noqa: F401, a fixture

DELAY_S = 1.0
SEEN_MS = 1000 * DELAY_S / 2  # a busy machine begins to count late
PARTS = ("reading", "preparing", "waiting", "restoring", "prefilling", "first_step")


def delayed(monkeypatch, owner, name):
    """Have the first call of a method take longer."""
    method, calls = getattr(owner, name), []

    def slow(*given, **options):
        if not calls:
            calls.append(1)
            time.sleep(DELAY_S)
        return method(*given, **options)

    monkeypatch.setattr(owner, name, slow)


def slow_down(part, engine, monkeypatch):
    scheduler = engine._scheduler
    places = {
        "preparing": (engine._preparation, "prepare"),
        "waiting": (scheduler._intake, "has_slot"),
        "restoring": (Lane, "restore"),
        "prefilling": (Prefill, "feed"),
        "first_step": (scheduler, "_start_decoding"),
    }
    if part in places:
        delayed(monkeypatch, *places[part])


def ask(live, text, *, sent_slowly=False):
    """A streamed answer, and the milliseconds until its first token was there."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "stream": True,
        "logit_bias": {"2": -100},
        "keepwarm": {"explain": True},
    }
    sent = json.dumps(body).encode()

    def pieces():
        yield sent[:9]
        time.sleep(DELAY_S if sent_slowly else 0)
        yield sent[9:]

    url, header = f"{live.url}/v1/chat/completions", {"Content-Type": "application/json"}
    began, events, first_ms = time.perf_counter(), [], None
    with httpx.stream("POST", url, content=pieces(), headers=header, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if first_ms is None and any(c["delta"].get("content") for c in events[-1]["choices"]):
                first_ms = 1000 * (time.perf_counter() - began)
    (receipt,) = [event["keepwarm"] for event in events if "phases_ms" in event.get("keepwarm", {})]
    return answer, receipt, first_ms


@pytest.mark.parametrize("part", PARTS)
def test_what_a_client_waits_for_is_in_the_part_that_took_it(live, lines, monkeypatch, part):  # noqa: F811
    ask(live, f"Before {part}.")  # sums are there from the first answer on
    summed = read(live)
    slow_down(part, live.host.engine, monkeypatch)
    answer, receipt, waited_ms = ask(live, f"Slow {part}.", sent_slowly=part == "reading")
    phases, line = receipt["phases_ms"], line_of(lines, answer)

    assert tuple(phases) == PARTS
    assert phases[part] >= SEEN_MS
    assert max(phases, key=phases.__getitem__) == part
    assert sum(phases.values()) == pytest.approx(line["first_token_ms"], abs=1)
    assert SEEN_MS <= line["first_token_ms"] <= waited_ms
    assert {name: line[f"{name}_ms"] for name in PARTS} == phases
    name = answer.headers["x-request-id"]
    (shown,) = [
        one
        for one in live.get("/v1/dashboard/requests").json()["data"]
        if one["request_id"] == name
    ]
    assert (shown["phases_ms"], shown["ttft_ms"]) == (phases, line["first_token_ms"])
    after = read(live)
    for name in PARTS:
        more = [after["keepwarm_time_to_first_token_part_seconds_total", name]]
        more.append(-summed["keepwarm_time_to_first_token_part_seconds_total", name])
        assert 1000 * sum(more) == pytest.approx(phases[name], abs=0.01)
    times = [
        sum(found["keepwarm_time_to_first_token_seconds_sum", warm] for warm in ("no", "yes"))
        for found in (summed, after)
    ]
    assert 1000 * (times[1] - times[0]) == pytest.approx(line["first_token_ms"], abs=0.01)


def test_the_parts_of_a_receipt_are_there_only_if_they_are_asked_for(live):
    body = {"messages": [{"role": "user", "content": "Plain."}], "max_tokens": 2}
    assert "phases_ms" not in live.post("/v1/chat/completions", body).json()["keepwarm"]


def test_several_prompts_have_the_parts_of_the_first_token(live):
    body = {"prompt": [[5, 6, 7], [8, 9, 10]], "max_tokens": 2, "keepwarm": {"explain": True}}
    answer = live.post("/v1/completions", body)
    phases = answer.json()["keepwarm"]["phases_ms"]
    name = answer.headers["x-request-id"]

    def shown():
        found = live.get("/v1/dashboard/requests").json()["data"]
        return [one for one in found if one["request_id"] == name]

    wait_until(lambda: len(shown()) == 2)
    first = min(shown(), key=lambda one: one["ttft_ms"])
    assert first["phases_ms"] == phases
