"""The same numbers in every view of a server: log, dashboard, metrics, cache API, command line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ledger.book import (
    TIERS,
    Book,
    Sent,
    Totals,
    is_warm,
    n_reused_of,
    store_figures,
    tokens_by_tier,
)

Json = dict[str, Any]
STATES = {"finished": "done", "cancelled": "cancelled", "refused": "refused"}
OF_STORE = "keepwarm_store_"  # all processes, all time
OPEN_INDEX = 32 << 10  # bytes of its file of shared memory, while a process has it open
LONGER_MS = 1.0  # parts of a time are rounded one by one


class Views:
    """What one server process shows. `differences` compares all of it with the book."""

    def __init__(
        self, book: Book, url: str, log: Path, admin: str, keys: Mapping[str, str]
    ) -> None:
        self._book, self._log, self._keys = book, log, keys
        self._http = httpx.Client(base_url=url, timeout=600, headers={"x-api-key": admin})

    def close(self) -> None:
        self._http.close()

    def differences(self) -> list[str]:
        found: list[str] = []
        for name, expected, got in self._compared():
            if expected != got:
                found.append(f"{name}: {expected} by the ledger, {got} shown")
        return found

    def _compared(self) -> Iterator[tuple[str, object, object]]:
        yield from self._requests()
        yield from self._lines()
        yield from self._metrics()
        yield from self._sums()
        yield from self._agents()

    def get(self, path: str, key: str = "") -> Any:
        """Every call counts, those of the views too."""
        answer = self._http.get(path, headers={"x-api-key": key} if key else {})
        self._book.call(path.split("?", maxsplit=1)[0].split("/")[2 if "/v1" in path else 1], 200)
        return answer.text if path == "/metrics" else answer.raise_for_status().json()

    # each request

    def _requests(self) -> Iterator[tuple[str, object, object]]:
        """The dashboard's records, which are then the book's: it compares all else with them."""
        found = defaultdict(list)
        for record in self.get("/v1/dashboard/requests?limit=500")["data"]:
            found[record["request_id"]].append(record)
        for sent in self._book.life:
            sent.jobs = found.pop(sent.id, [])
            yield from self._request(sent)
        yield "dashboard: requests that nobody sent", [], list(found)
        for name, key in self._keys.items():
            seen = self.get("/v1/dashboard/requests?limit=500", key)["data"]
            own = {sent.id for sent in self._book.life if sent.key == name}
            yield f"dashboard: requests of {name}", own, {record["request_id"] for record in seen}

    def _request(self, sent: Sent) -> Iterator[tuple[str, object, object]]:
        jobs, where = sent.jobs, f"dashboard: {sent.id} {sent.path}"
        states = [STATES[sent.outcome]] * max(1, len(sent.prompts))
        yield f"{where}: states", states, [job["state"] for job in jobs]
        yield f"{where}: key", {sent.key}, {job["key"] for job in jobs}
        yield f"{where}: prompt_tokens", sent.n_prompt, sum(job["prompt_tokens"] for job in jobs)
        n_answer = sum(job["answer_tokens"] for job in jobs)
        yield f"{where}: answer_tokens", between(sent.n_answer, n_answer, sent.max_answer), n_answer
        if sent.outcome == "refused":
            yield f"{where}: status", [sent.status], [job["status"] for job in jobs]
        if sent.outcome == "refused" or not all(job["receipt"] for job in jobs):
            return
        n_reused, reused = sum(map(n_reused_of, jobs)), tokens_by_tier(jobs)
        for job in jobs:
            yield f"{where}: recomputed", job["receipt"]["recomputed"], job["prefilled"]
            yield f"{where}: agent", sent.agent or None, job["agent"]
            yield f"{where}: parts of ttft_ms", *parts(job["ttft_ms"], job["phases_ms"])
        if sent.reused is not None:
            yield f"{where}: reused", dict.fromkeys(TIERS, 0) | sent.reused, reused
        yield f"{where}: reused at most", True, n_reused <= self._book.n_known(sent)
        n_computed = sum(job["prefilled"] for job in jobs)
        least = 0 if sent.outcome == "cancelled" else sent.n_prompt - n_reused
        yield f"{where}: computed", between(least, n_computed, sent.n_prompt - n_reused), n_computed

    def _lines(self) -> Iterator[tuple[str, object, object]]:
        lines = {line["id"]: line for line in self._read_log() if "id" in line}
        for sent in self._book.life:
            line, where = lines.get(sent.id, {}), f"log: {sent.id} {sent.path}"
            yield f"{where}: key", sent.key, line.get("key")
            yield f"{where}: path", sent.path, line.get("path")
            yield f"{where}: status", sent.status, line.get("status")
            if sent.outcome == "refused":
                continue
            jobs = sent.jobs
            expected = {
                "agent": sent.agent,
                "prompt_tokens": sent.n_prompt,
                **tokens_by_tier(jobs),
                "computed": sum(job["prefilled"] for job in jobs),
                "answer_tokens": sum(job["answer_tokens"] for job in jobs),
                "finished": sent.outcome == "finished",
            }
            yield where, expected, {name: line.get(name) for name in expected}
            times = [job["ttft_ms"] for job in jobs if job["ttft_ms"] is not None]
            first = min(times, default=None)
            yield f"{where}: first_token_ms", first, line.get("first_token_ms")
            if sent.outcome == "finished" and first is not None:
                yield f"{where}: first token in time", True, first <= 1000 * sent.seconds

    def _read_log(self) -> Iterator[Json]:
        for line in self._log.read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)

    # all of them

    def _metrics(self) -> Iterator[tuple[str, object, object]]:
        expected_calls = dict(self._book.calls)
        shown = samples(self.get("/metrics"))
        calls = {
            (labels["api"], labels["outcome"]): int(value)
            for labels, value in shown["keepwarm_http_requests_total"]
        }
        yield "metrics: HTTP requests", expected_calls, calls
        total = Totals.of(self._book.life)
        answers = {name: n for name, n in total.outcomes.items() if name != "refused"}
        yield "metrics: answers", answers, by(shown["keepwarm_answers_total"], "outcome")
        yield "metrics: prefilled", total.computed, one(shown["keepwarm_prefilled_tokens_total"])
        yield "metrics: generated", total.generated, one(shown["keepwarm_generated_tokens_total"])
        yield "metrics: active", 0, sum(n for _, n in shown["keepwarm_active_requests"])
        first = by(shown["keepwarm_time_to_first_token_seconds_count"], "warm")
        yield "metrics: first tokens", total.first_tokens, first
        yield from self._times(shown)
        yield from self._of_store(shown)
        lived = one(shown["process_start_time_seconds"])
        yield (
            "metrics: time saved",
            True,
            one(shown["keepwarm_saved_seconds_total"])
            <= (self.get("/v1/dashboard/now")["time"] - lived),
        )

    def _times(self, shown: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
        """Sums of times are those of the single requests; each is rounded to 0.1 ms."""
        jobs = [job for sent in self._book.life for job in sent.jobs if job["state"] == "done"]
        answered = [job for job in jobs if job["answer_tokens"]]
        for warm, seconds in by(shown["keepwarm_time_to_first_token_seconds_sum"], "warm").items():
            own = [job["ttft_ms"] for job in answered if is_warm(job) is (warm == "yes")]
            is_near = math.isclose(sum(own) / 1000, seconds, abs_tol=1e-4 * (1 + len(own)))
            yield f"metrics: first tokens, warm {warm}, {sum(own)} ms", True, is_near
        parts = by(shown["keepwarm_time_to_first_token_part_seconds_total"], "part")
        for name, seconds in parts.items():
            ms = sum(job["phases_ms"].get(name, 0.0) for job in answered)
            is_near = math.isclose(ms / 1000, seconds, abs_tol=1e-4 * (1 + len(answered)))
            yield f"metrics: part {name}, {ms} ms", True, is_near
        timed = sum(job["answer_tokens"] > 1 for job in answered)
        yield "metrics: answers timed", timed, one(shown["keepwarm_token_seconds_count"])

    def _of_store(self, shown: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
        figures = store_figures(self._book.all)
        names = {"prompt_tokens": "prompt_tokens_total", "computed": "computed_tokens_total"}
        names |= {name: name for name in ("hit_rate", "hit_rate_from_turn_2")}
        for name, metric in names.items():
            yield f"metrics: {metric}", figures[name], one(shown[f"{OF_STORE}{metric}"])
        for name, metric in (("reused", "reused_tokens"), ("hits", "hits"), ("misses", "misses")):
            got = by(shown[f"{OF_STORE}{metric}_total"], "tier")
            yield f"metrics: {metric}", figures[name], got
        own = store_figures(self._book.life)
        n_prompt, n_reused = own["prompt_tokens"], sum(own["reused"].values())
        yield "metrics: prompt tokens", n_prompt, one(shown["keepwarm_prompt_tokens_total"])
        reused = dict.fromkeys(TIERS, 0) | by(shown["keepwarm_reused_tokens_total"], "tier")
        yield "metrics: reused tokens", own["reused"], reused
        yield "metrics: vLLM's hits", n_reused, one(shown["vllm:prefix_cache_hits_total"])
        yield "metrics: vLLM's queries", n_prompt, one(shown["vllm:prefix_cache_queries_total"])

    def _sums(self) -> Iterator[tuple[str, object, object]]:
        """The dashboard's and the cache API's."""
        figures, total = store_figures(self._book.all), Totals.of(self._book.life)
        cache, saved = self.get("/v1/cache"), self.get("/v1/dashboard/saved")
        yield "cache: prompts", figures, cache["prompts"]
        evicted = sum(tier["evicted"] for tier in cache["tiers"].values())
        self._book.evicted[len(self._book.lives)] = evicted
        yield "dashboard: evicted", evicted, saved["health"]["evicted"]
        counters = cache["counters"]
        jobs = [job for sent in self._book.life for job in sent.jobs if job["state"] != "refused"]
        yield "cache: requests", len(jobs), counters["requests"]
        yield "cache: refused", total.outcomes["refused"], counters["refused"]
        own = store_figures(self._book.life)
        yield "cache: reused", own["reused"], dict.fromkeys(TIERS, 0) | counters["reused_tokens"]
        yield "cache: prompt tokens", own["prompt_tokens"], counters["prompt_tokens"]
        for name in ("hit_rate", "hit_rate_from_turn_2"):
            yield f"dashboard: {name}", figures[name], saved[name]
        for name in ("reused", "computed"):
            yield f"dashboard: total {name}", figures[name], saved["total"][name]
        ever = Totals.of(self._book.all)
        points = {
            **ever.outcomes,
            **figures["reused"],
            "computed": figures["computed"],
            "prefilled": ever.computed,
            "generated": ever.generated,
        }
        shown = {name: sum(point[name] for point in saved["points"]) for name in points}
        yield "dashboard: points", points, shown
        restores = cache["failed_restores"]  # `missing`: evicted between plan and reading
        yield (
            "cache: restores",
            dict.fromkeys({*restores} - {"missing"}, 0),
            {reason: n for reason, n in restores.items() if reason != "missing"},
        )
        faults = ("quarantined", "read_errors", "failed_saves", "failed_restores", "drifts")
        yield (
            "dashboard: health",
            dict.fromkeys(faults, 0) | {"failed_restores": sum(restores.values())},
            {name: saved["health"][name] for name in faults},
        )

    # agents

    def _agents(self) -> Iterator[tuple[str, object, object]]:
        for name, key in self._keys.items():
            own = {agent: t for (owner, agent), t in self._book.agents.items() if owner == name}
            listed = self.get("/v1/agents?limit=1000", key)["data"]
            yield f"agents of {name}", own, {agent["id"]: agent["turns"] for agent in listed}
            lengths = {agent["id"]: agent["n_tokens"] for agent in listed}
            yield f"tokens of {name}", {agent: t[-1] for agent, t in own.items()}, lengths


def command_line(book: Book, home: Path, environ: Mapping[str, str]) -> list[str]:
    """`keepwarm cache stats` and `ls`, beside the server or after it."""
    stats, agents = (_command(verb, environ) for verb in ("stats", "ls"))
    store = home / "store"
    files = [file for file in (store / "blocks").rglob("*") if file.is_file()]
    least, most = bytes_of(store / "blocks"), bytes_of(store) + OPEN_INDEX
    pairs = {
        "prompts": (store_figures(book.all), stats["prompts"]),
        "bytes": (between(least, stats["n_bytes"], most), stats["n_bytes"]),
        "blocks": (len({file.name.split(".")[0] for file in files}), stats["blocks"]),
        "tokens of agents": (
            sorted(turns[-1] for turns in book.agents.values()),
            sorted(agent["n_tokens"] for agent in agents),
        ),
    }
    return [
        f"command line: {name}: {expected} by the ledger, {got} shown"
        for name, (expected, got) in pairs.items()
        if expected != got
    ]


def _command(verb: str, environ: Mapping[str, str]) -> Any:
    command = [sys.executable, "-m", "keepwarm", "cache", verb, "--json"]
    return json.loads(subprocess.run(command, env=environ, check=True, capture_output=True).stdout)


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def between(least: int, got: int, most: int) -> int:
    """What is right: the number itself if it is in the range."""
    return min(max(least, got), most)


def parts(whole: float | None, phases: Mapping[str, float]) -> tuple[bool, bool]:
    """Whether parts add up to the whole, where there is one."""
    return True, whole is None or abs(sum(phases.values()) - whole) <= LONGER_MS


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every sample of Prometheus's format by its name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        name, _, labels = name.partition("{")
        pairs = (pair.split("=", 1) for pair in labels.removesuffix("}").split(",") if pair)
        found[name].append(({key: text.strip('"') for key, text in pairs}, float(value)))
    return found


def one(values: Sequence[tuple[object, float]]) -> float | None:
    return values[0][1] if values else None


def by(values: Sequence[tuple[Mapping[str, str], float]], label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in values}
