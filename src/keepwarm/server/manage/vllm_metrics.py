"""The metrics that routers and autoscalers read of vLLM, under its names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keepwarm.server.models.models import Models

RUNNING = "vllm:num_requests_running", "Requests that are prefilled or decoded."
WAITING = "vllm:num_requests_waiting", "Requests that wait."
USAGE = "vllm:kv_cache_usage_perc", "Memory for running requests that is in use; 1 is all of it."
QUERIES = "vllm:prefix_cache_queries", "Prompt tokens of all requests."
HITS = "vllm:prefix_cache_hits", "Those that were reused."
GENERATED = "vllm:generation_tokens", "Generated tokens."
NAMES = RUNNING, WAITING, USAGE, QUERIES, HITS, GENERATED


class VllmCollector(Collector):
    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []  # otherwise registering calls `collect`

    def collect(self) -> Iterator[Metric]:
        if not self._models.ready:
            return
        stats = self._models.stats()
        figures = stats.counts.figures()
        yield GaugeMetricFamily(*RUNNING, value=stats.prefilling + stats.decoding)
        yield GaugeMetricFamily(*WAITING, value=stats.waiting)
        yield GaugeMetricFamily(*USAGE, value=self._usage())
        yield CounterMetricFamily(*QUERIES, value=figures["prompt_tokens"])
        yield CounterMetricFamily(*HITS, value=sum(figures["reused"].values()))
        yield CounterMetricFamily(*GENERATED, value=stats.counters["generated_tokens"])

    def _usage(self) -> float:
        """Of the batch: live caches give way, as vLLM's unused blocks do."""
        uses = [use for engine in self._models.engines for use in engine.memory()]
        batches = [use for use in uses if use.name == "batch"]
        limit = sum(use.max_bytes or 0 for use in batches)
        return sum(use.n_bytes for use in batches) / limit if limit else 0.0
