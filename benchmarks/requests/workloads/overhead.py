"""What the server adds to the engine: time and CPU time per token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.requests.bare import DecodeTimes, decode_alone
from benchmarks.requests.client import BenchRequest
from benchmarks.requests.files import tiny_like
from benchmarks.requests.measure import in_child
from benchmarks.requests.report.results import Record, Series
from benchmarks.requests.run import WorkloadRun
from benchmarks.requests.targets import keepwarm_server

TINY_TOKENS = 1000
HOW = "the identical prompt repeated, right after each answer"


def run(run: WorkloadRun) -> Iterator[Record]:
    """Time on the model, CPU time on a tiny one, where decoding does not hide it."""
    run.show_status("the model, bare and served")
    bare, served = _both(run, run.model, run.sizes.stream)
    yield from times(run, bare, served)
    run.show_status("a tiny model, bare and served")
    n_tokens = TINY_TOKENS if run.sizes.stream > 24 else 100
    bare, served = _both(run, tiny_like(run.model, run.folder), n_tokens)
    yield from processor(run, bare, served)


def _both(run: WorkloadRun, model: Path, n_tokens: int) -> tuple[DecodeTimes, DecodeTimes]:
    """The same answer from the engine, then from a server."""
    messages = run.prompts.chat(64, 16, next(run.seeds))
    ask = BenchRequest(messages, n_tokens, forbidden=run.stop_tokens)
    bare = in_child(
        decode_alone, model, run.folder / f"store-bare-{model.name}", ask, run.sizes.samples
    )
    return bare, _served(run, model, ask)


def _served(run: WorkloadRun, model: Path, ask: BenchRequest) -> DecodeTimes:
    server = keepwarm_server(model, run.folder, f"overhead-{model.name}")
    try:
        server.start()
        server.ask(ask)
        token_s, cpu_s = [], []
        for _ in range(run.sizes.samples):
            before = server.cpu_s() or 0.0
            reply = server.ask(ask)
            token_s.append(reply.token_s)
            cpu_s.append(((server.cpu_s() or 0.0) - before) / reply.completion_tokens)
    finally:
        server.close()
    return DecodeTimes(token_s, cpu_s)


def times(run: WorkloadRun, bare: DecodeTimes, served: DecodeTimes) -> Iterator[Record]:
    alone, streamed = _pair(
        run, "time per token", f"{HOW}; first token excluded", bare.token_s, served.token_s
    )
    yield from (alone, streamed)
    added = [max(0.0, streamed.median / alone.median - 1)]
    yield run.claim("fraction of a token's time added by the server", added, 0.03, at_least=False)


def processor(run: WorkloadRun, bare: DecodeTimes, served: DecodeTimes) -> Iterator[Record]:
    what = "CPU time per token, tiny model"
    alone, streamed = _pair(run, what, HOW, bare.cpu_s, served.cpu_s)
    yield from (alone, streamed)
    added = [streamed.median - alone.median]
    yield run.claim("CPU ms added per streamed token, tiny model", added, 0.5, at_least=False)


def _pair(
    run: WorkloadRun, what: str, how: str, bare: list[float], served: list[float]
) -> tuple[Series, Series]:
    return (
        run.series(f"{what}, bare engine", "ms", [1000 * s for s in bare], how=how),
        run.series(f"{what}, served", "ms", [1000 * s for s in served], how=how),
    )
