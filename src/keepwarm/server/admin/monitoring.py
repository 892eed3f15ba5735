"""Liveness, readiness, and metrics for Prometheus: the engine's snapshot, latencies of answers.

Each application has its own registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, NotRequired, TypeAlias

from fastapi import Request, Response
from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from typing_extensions import TypedDict

from keepwarm.engine.stats import Stats
from keepwarm.errors import Stopping
from keepwarm.server.http.body import api_router
from keepwarm.server.http.keys import CurrentViewer
from keepwarm.server.http.problems import OpenAIErrorOut
from keepwarm.server.models.calls import Served
from keepwarm.server.models.models import Models
from keepwarm.store.tier import SHARED_STATES, SharedStats

Values: TypeAlias = Mapping[str, float]  # by label value; "" without a label

FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/models": "models",
    "/v1/agents": "agents",
    "/v1/cache": "cache",
    "/v1/admin": "admin",
    "/v1/dashboard": "dashboard",
    "/api": "ollama",
    "/mcp": "mcp",
    "/dashboard": "page",
    "/docs": "docs",
    "/openapi.json": "docs",
    "/health": "health",
    "/metrics": "metrics",
}
TTFT = (
    "keepwarm_time_to_first_token_seconds",
    "From the first byte of a request to the first token of its answer.",
)
PHASES = "keepwarm_time_to_first_token_part_seconds", "The sum of these times, by part."
TOKEN = "keepwarm_token_seconds", "Time per output token of one answer."
HTTP = "keepwarm_http_requests", "Completed HTTP requests, refused ones included."
LOADED = "keepwarm_model_loaded", "1 while the model is loaded."
LOADS = "keepwarm_model_loads", "How often the model was loaded."
SHARED = "keepwarm_shared_tier_state", "1 for the state that a shared tier is in."
READY = "keepwarm_ready", "1 while requests are accepted."

VLLM_RUNNING = "vllm:num_requests_running", "Requests that are prefilled or decoded."
VLLM_WAITING = "vllm:num_requests_waiting", "Requests that wait."
VLLM_USAGE = (
    "vllm:kv_cache_usage_perc",
    "Memory for running requests that is in use; 1 is all of it.",
)
VLLM_QUERIES = "vllm:prefix_cache_queries", "Prompt tokens of this process's requests."
VLLM_HITS = "vllm:prefix_cache_hits", "Those that were reused."
VLLM_GENERATED = "vllm:generation_tokens", "Generated tokens."
VLLM_NAMES = VLLM_RUNNING, VLLM_WAITING, VLLM_USAGE, VLLM_QUERIES, VLLM_HITS, VLLM_GENERATED

router = api_router(tags=["Health"])
UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": OpenAIErrorOut, "description": "Not ready."}
}


class Sample(NamedTuple):
    """One metric read from a snapshot."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    label: str
    read: Callable[[Stats], Values]


def _one(value: float) -> Values:
    return {"": value}


def _counter(name: str) -> Callable[[Stats], Values]:
    return lambda stats: _one(stats.counters[name])


def _by_tier(name: str) -> Callable[[Stats], Values]:
    return lambda stats: {tier: getattr(found, name) for tier, found in stats.tiers.items()}


def _figure(name: str) -> Callable[[Stats], Values]:
    """A count of the store, by tier or alone; a rate of no tokens has no value."""

    def read(stats: Stats) -> Values:
        value = stats.counts.figures()[name]
        return value if isinstance(value, dict) else {} if value is None else _one(value)

    return read


def _bytes(stats: Stats) -> Values:
    return {**_by_tier("n_bytes")(stats), "live": stats.live.n_bytes}


def _limits(stats: Stats) -> Values:
    limits = {tier: found.max_bytes for tier, found in stats.tiers.items()}
    limits["live"] = stats.live.max_bytes
    return {tier: n_bytes for tier, n_bytes in limits.items() if n_bytes is not None}


def _evicted(stats: Stats) -> Values:
    return {**_by_tier("evicted")(stats), "live": stats.live.evicted}


def _failed_restores(stats: Stats) -> Values:
    """Failed calls of a shared tier are no bad records; its state tells of them."""
    shared = _shared(stats)
    return {
        tier: found.quarantined + (0 if tier in shared else found.errors)
        for tier, found in stats.tiers.items()
    }


def _shared(stats: Stats) -> dict[str, SharedStats]:
    return {name: tier for name, tier in stats.tiers.items() if isinstance(tier, SharedStats)}


def _oldest(stats: Stats) -> Values:
    ages = {name: tier.oldest_s for name, tier in _shared(stats).items()}
    return {name: age for name, age in ages.items() if age is not None}


def _shared_reads(outcome: str) -> Callable[[Stats], Values]:
    return lambda stats: {name: getattr(tier, outcome) for name, tier in _shared(stats).items()}


def _requests(stats: Stats) -> Values:
    return {"waiting": stats.waiting, "prefilling": stats.prefilling, "decoding": stats.decoding}


def _outcomes(stats: Stats) -> Values:
    return {name: stats.counters[name] for name in ("finished", "cancelled", "failed")}


SAMPLES = (
    Sample(
        "keepwarm_store_hit_rate", "gauge",
        "Prompt tokens reused, as a share of the prompt tokens of all requests to the store.", "",
        _figure("hit_rate"),
    ),
    Sample(
        "keepwarm_store_hit_rate_from_turn_2", "gauge",
        "The same over the requests that continue a conversation.", "",
        _figure("hit_rate_from_turn_2"),
    ),
    Sample(
        "keepwarm_store_hits", "counter",
        "Warm requests to the store that reused most from a tier.", "tier", _figure("hits"),
    ),
    Sample(
        "keepwarm_store_misses", "counter", "Requests to the store that did not.", "tier",
        _figure("misses"),
    ),
    Sample(
        "keepwarm_store_prompt_tokens", "counter", "Prompt tokens of all requests to the store.",
        "", _figure("prompt_tokens"),
    ),
    Sample(
        "keepwarm_store_reused_tokens", "counter", "Those that were reused.", "tier",
        _figure("reused"),
    ),
    Sample(
        "keepwarm_store_computed_tokens", "counter", "Prompt tokens not found in any tier.", "",
        _figure("computed"),
    ),
    Sample(
        "keepwarm_prompt_tokens", "counter", "Prompt tokens of this process's requests.", "",
        _counter("prompt_tokens"),
    ),
    Sample(
        "keepwarm_reused_tokens", "counter", "Those that were reused.", "tier",
        lambda stats: stats.counters["reused_tokens"],
    ),
    Sample(
        "keepwarm_prefilled_tokens", "counter", "Prompt tokens prefilled.", "",
        _counter("prefilled_tokens"),
    ),
    Sample(
        "keepwarm_generated_tokens", "counter", "Generated tokens.", "",
        _counter("generated_tokens"),
    ),
    Sample(
        "keepwarm_drafted_tokens", "counter", "Draft tokens that steps computed.", "",
        _counter("drafted_tokens"),
    ),
    Sample(
        "keepwarm_accepted_tokens", "counter",
        "Drafted tokens that were right, and generated without a step of their own.", "",
        _counter("accepted_tokens"),
    ),
    Sample(
        "keepwarm_saved_seconds", "counter",
        "Prefill time saved by reuse, as far as it is known.", "",
        lambda stats: _one(stats.counters["saved_ms"] / 1000),
    ),
    Sample(
        "keepwarm_shared_prefills", "counter",
        "Requests that waited for another request to prefill their prefix.", "",
        _counter("waited_for_prefix"),
    ),
    Sample("keepwarm_answers", "counter", "Answers by outcome.", "outcome", _outcomes),
    Sample("keepwarm_active_requests", "gauge", "Requests in the engine.", "state", _requests),
    Sample("keepwarm_kept_bytes", "gauge", "Bytes stored.", "tier", _bytes),
    Sample("keepwarm_kept_bytes_limit", "gauge", "Byte limit.", "tier", _limits),
    Sample("keepwarm_blocks", "gauge", "Blocks stored.", "tier", _by_tier("blocks")),
    Sample(
        "keepwarm_shared_tier_hits", "counter", "Records loaded from a shared tier.", "tier",
        _shared_reads("hits"),
    ),
    Sample(
        "keepwarm_shared_tier_misses", "counter",
        "Records that a shared tier should have and did not send, or not in time.", "tier",
        _shared_reads("misses"),
    ),
    Sample(
        "keepwarm_shared_tier_oldest_seconds", "gauge",
        "Age of the oldest record in a directory or bucket that this machine sweeps.",
        "tier", _oldest,
    ),
    Sample("keepwarm_evictions", "counter", "Blocks or live caches evicted.", "tier", _evicted),
    Sample(
        "keepwarm_restore_failures", "counter",
        "Records that were damaged or unreadable; each counts as a miss.", "tier", _failed_restores,
    ),
    Sample(
        "keepwarm_failed_restores", "counter",
        "Requests whose restore failed in part or whole; the tokens were computed.", "reason",
        lambda stats: stats.failed_restores,
    ),
    Sample(
        "keepwarm_written_bytes", "counter", "Bytes written to disk.", "",
        lambda stats: _one(stats.writes.written_bytes),
    ),
    Sample(
        "keepwarm_dropped_saves", "counter", "Saves that were dropped.", "reason",
        lambda stats: stats.writes.lost,
    ),
    Sample(
        "keepwarm_rebuilt_batches", "counter", "Batches rebuilt after a failure.", "",
        _counter("rebuilt_batches"),
    ),
    Sample(
        "keepwarm_audits", "counter", "Restored prompts compared with a cold run.", "",
        _counter("audits"),
    ),
    Sample("keepwarm_drifts", "counter", "Audits whose answer differed.", "", _counter("drifts")),
    Sample(
        "keepwarm_audit_nats", "counter",
        "Divergence of audited answers from cold ones, where blocks are rounded.", "",
        _counter("audit_nats"),
    ),
    Sample(
        "keepwarm_step_seconds", "gauge", "Duration of one decode step of the batch.", "",
        lambda stats: _one(stats.step_ms / 1000),
    ),
    Sample(
        "keepwarm_prefill_tokens_per_second", "gauge", "Prefill speed.", "",
        lambda stats: _one(stats.prefill_tokens_per_s),
    ),
)  # fmt: skip


class ReadyCollector(Collector):
    """The same as `/health/ready`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []  # otherwise registering calls `collect`

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(*READY, value=float(self._models.ready))


class EngineCollector(ReadyCollector):
    """Takes one snapshot per scrape."""

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        if self._models.ready:
            stats = self._models.stats()
            yield from (_family(sample, sample.read(stats)) for sample in SAMPLES)
            yield _shared_states(stats)
        yield from self._by_model()
        yield from self._latencies()

    def _latencies(self) -> Iterator[Metric]:
        ledger = self._models.ledger
        ttft = HistogramMetricFamily(*TTFT, labels=["warm"])
        for sample in ledger.times_to_first_token():
            ttft.add_metric([sample.label], sample.buckets, sample.total)
        phases = CounterMetricFamily(*PHASES, labels=["part"])
        for name, seconds in ledger.phases_s().items():
            phases.add_metric([name], seconds)
        token = ledger.times_per_token()
        yield from (ttft, phases)
        yield HistogramMetricFamily(*TOKEN, buckets=token.buckets, sum_value=token.total)

    def _by_model(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(*LOADED, labels=["model"])
        loads = CounterMetricFamily(*LOADS, labels=["model"])
        for slot in self._models.slots.all:
            loaded.add_metric([slot.host.name], slot.host.loaded is not None)
            loads.add_metric([slot.host.name], slot.n_loads)
        yield from (loaded, loads)


class VllmCollector(ReadyCollector):
    """The metrics that routers and autoscalers read of vLLM, under its names."""

    def collect(self) -> Iterator[Metric]:
        if not self._models.ready:
            return
        stats = self._models.stats()
        counters = stats.counters
        yield GaugeMetricFamily(*VLLM_RUNNING, value=stats.prefilling + stats.decoding)
        yield GaugeMetricFamily(*VLLM_WAITING, value=stats.waiting)
        yield GaugeMetricFamily(*VLLM_USAGE, value=self._usage())
        yield CounterMetricFamily(*VLLM_QUERIES, value=counters["prompt_tokens"])
        yield CounterMetricFamily(*VLLM_HITS, value=sum(counters["reused_tokens"].values()))
        yield CounterMetricFamily(*VLLM_GENERATED, value=counters["generated_tokens"])

    def _usage(self) -> float:
        """Of the batch: live caches give way, as vLLM's unused blocks do."""
        uses = [use for engine in self._models.engines for use in engine.memory()]
        batches = [use for use in uses if use.name == "batch"]
        limit = sum(use.max_bytes or 0 for use in batches)
        return sum(use.n_bytes for use in batches) / limit if limit else 0.0


def _shared_states(stats: Stats) -> Metric:
    family = GaugeMetricFamily(*SHARED, labels=["tier", "state"])
    for name, tier in _shared(stats).items():
        for state in SHARED_STATES:
            family.add_metric([name, state], tier.state == state)
    return family


def _family(sample: Sample, values: Values) -> Metric:
    labels = [sample.label] if sample.label else []
    family: Metric = FAMILIES[sample.kind](sample.name, sample.help, labels=labels)
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)  # type: ignore[attr-defined]
    return family


class Metrics:
    """All metrics of one application."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        self.ready = CollectorRegistry()
        self.ready.register(ReadyCollector(models))
        self._http = Counter(*HTTP, ["api", "outcome"], registry=self.registry)
        self.registry.register(EngineCollector(models))
        self.registry.register(VllmCollector(models))
        ProcessCollector(registry=self.registry)

    def count_request(self, path: str, status: int) -> None:
        """Also one that the limits refuse."""
        self._http.labels(_api(path), _outcome(status)).inc()


def _outcome(status: int) -> str:
    if status == 499:
        return "cancelled"
    return "ok" if status < 400 else "refused" if status < 500 else "failed"


def _api(path: str) -> str:
    """The API of a path, from a fixed set, so that clients cannot add label values."""
    if path == "/":
        return "page"  # redirects there
    for prefix, api in APIS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return api
    return "other"


@router.get("/metrics", response_class=Response)
def read_metrics(request: Request, viewer: CurrentViewer) -> Response:
    """All metrics in Prometheus's format.

    Counted over all keys; with more than one key, only the admin key sees more than
    `keepwarm_ready`.
    """
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    metrics: Metrics = request.app.state.metrics
    return Response(
        encode(metrics.registry if viewer.may_see_totals else metrics.ready), media_type=media_type
    )


class HealthOut(TypedDict):
    status: Literal["ok"]
    kernels: NotRequired[str]


OK: HealthOut = {"status": "ok"}


@router.get("/health/live")
async def live() -> HealthOut:
    """200 while the process responds."""
    return OK


@router.get("/health/ready", responses=UNREADY)
@router.get("/health", responses=UNREADY)
async def ready(models: Served) -> HealthOut:
    """200 while the engine accepts requests; 503 while it is down, draining or being replaced.

    While a model is loaded, the message says what is being done and how far. `kernels`: how many
    of those that are compiled in idle time are done, while some are left.
    """
    if not models.ready:
        models.engine.check_open()  # raises, with the reason
        raise Stopping("The engine is not accepting requests; retry later.")
    work = [each for engine in models.engines for each in engine.idle_work]
    n_left, n_all = sum(each.n_left for each in work), sum(each.n_all for each in work)
    return {"status": "ok", "kernels": f"{n_all - n_left} of {n_all}"} if n_left else OK
