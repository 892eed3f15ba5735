"""`python -m benchmarks.traces`: recorded agent traffic through the real look-up and eviction.

360 conversations of coding agents (benchmarks/requests/data/README.md), eight at a time by their
timestamps. Keys, index, plan and eviction are the real ones at full size; tensors are stand-ins
that report their true size and hold no data.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.price.codecs import EXACT_BITS, Q4, Q8, Codec
from benchmarks.requests.recorded import RecordedRequest, load, requests
from benchmarks.rivals import Cache, Fifo, Sessions, TailFirst
from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.restorer import Plan, Restorer
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.errors import BadInput, KeepwarmError
from keepwarm.kv.kinds import Kind
from keepwarm.kv.layout import LayerSpec, Layout
from keepwarm.prefix.blocks import BLOCK_TOKENS, Namespace, block_key, pack, root
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Header, Part, Record, Tensor
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers

BUDGETS = (128_000, 256_000, 512_000, 1_024_000, 2_048_000)
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # K and V of 32 layers, 8 heads of 128, two bytes: an 8B model
NAMESPACE = Namespace(b"the traces, whoever made them...")
DELTA_ONLY = Layout((LayerSpec("0", Kind.DELTA, "KVCache", {}, {}),))
OURS, OURS_Q8, OURS_Q4 = "keepwarm", "keepwarm, q8 at rest", "keepwarm, q4 at rest"
TAIL_FIRST, SESSIONS = "tail-first LRU blocks", "LRU sessions"
FIFO, FIFO_10 = "FIFO sequences", "mlx-lm: FIFO, 10 sequences"


@dataclass(frozen=True)
class Result:
    policy: str
    budget_tokens: int
    n_requests: int
    input_tokens: int
    prefilled_tokens: int
    seconds: float  # the replay took

    @property
    def hit_rate(self) -> float:
        return 1 - self.prefilled_tokens / self.input_tokens


@dataclass(frozen=True)
class Task:
    policy: str
    budget_tokens: int
    n_conversations: int | None = None
    divisor: int = 1


class Shipped:
    """The real restorer over a memory tier, with stand-ins for tensors."""

    def __init__(self, n_tokens: int, codec: Codec | None = None) -> None:
        """As many bytes as so many tokens take exactly; blocks are kept by a codec."""
        self._now, self._codec = 0.0, codec
        self.tier = MemoryTier(n_tokens * TOKEN_BYTES, clock=lambda: self._now)
        tiers = Tiers([("memory", self.tier)])
        self._restorer = Restorer(
            NAMESPACE, DELTA_ONLY, tiers, Reader(tiers, n_threads=1), MemorySaver(self.tier)
        )
        self._tokens: dict[int, array[int]] = {}
        self._ids = np.random.default_rng(0)

    def serve(self, request: RecordedRequest) -> int:
        self._now = request.now
        tokens = self._make_tokens(request)
        plan = self._restorer.plan(tokens[: request.n_input])
        self._restorer.tiers.touch([read.key for read in plan.point.reads])
        self._keep(tokens, plan)
        return plan.n_tokens

    def _make_tokens(self, request: RecordedRequest) -> array[int]:
        """Prompt and answer: the common tokens, then new ones."""
        tokens = self._tokens.get(request.conversation, array("I"))[: request.n_common]
        n_new = request.n_input + request.n_output - len(tokens)
        tokens.frombytes(self._ids.integers(1 << 31, size=n_new, dtype=np.uint32).tobytes())
        self._tokens[request.conversation] = tokens
        return tokens

    def _keep(self, tokens: array[int], plan: Plan) -> None:
        n_known = plan.n_tokens // BLOCK_TOKENS
        first = max(0, n_known - 1)  # the last block that is known may have a whole one behind it
        parent = plan.point.reads[first - 1].key if first else root(NAMESPACE)
        for number in range(first, -(-len(tokens) // BLOCK_TOKENS)):
            start = number * BLOCK_TOKENS
            words = pack(tokens[start : start + BLOCK_TOKENS])
            key = block_key(NAMESPACE, parent, words)
            header = Header(NAMESPACE, key, parent, Part.DELTA, number, words)
            record = Record(header, (self._stand_in(number, len(words) // 4, len(tokens)),))
            if number < n_known:
                self.tier.replace(record)
            else:
                self._restorer.writer.put(record, Policy.EPHEMERAL)
            parent = key

    def _stand_in(self, number: int, n_tokens: int, n_all: int) -> Tensor:
        n_bytes, codec = n_tokens * TOKEN_BYTES, self._codec
        if codec is not None:
            lossy = codec.lossy_rows(n_all)
            if lossy.start <= number * BLOCK_TOKENS < lossy.stop:
                n_bytes = int(n_bytes * codec.bits / EXACT_BITS)
        return stand_in(n_bytes)


@cache
def stand_in(n_bytes: int) -> Tensor:
    """A tensor that reports its true size and holds one byte."""
    return Tensor("KV", "U8", (n_bytes,), np.broadcast_to(np.zeros(1, np.uint8), n_bytes).data)


CACHES: dict[str, Callable[[int], Cache]] = {
    OURS: Shipped,
    OURS_Q8: lambda n_tokens: Shipped(n_tokens, Q8),
    OURS_Q4: lambda n_tokens: Shipped(n_tokens, Q4),
    TAIL_FIRST: TailFirst,
    SESSIONS: Sessions,
    FIFO: Fifo,
    FIFO_10: lambda n_tokens: Fifo(n_tokens, max_entries=10),
}


def replay(task: Task) -> Result:
    """One policy at one budget over the whole trace."""
    began = time.perf_counter()
    policy = CACHES[task.policy](task.budget_tokens)
    n_requests = n_input = n_prefilled = 0
    for request in requests(load(task.n_conversations, task.divisor)):
        n_requests += 1
        n_input += request.n_input
        n_prefilled += request.n_input - policy.serve(request)
    seconds = round(time.perf_counter() - began, 1)
    return Result(task.policy, task.budget_tokens, n_requests, n_input, n_prefilled, seconds)


def replay_all(tasks: Sequence[Task], n_processes: int) -> list[Result]:
    """Run all tasks in parallel; the longest come first."""
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(n_processes, mp_context=spawn) as pool,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task("traces", total=len(tasks))
        futures = {pool.submit(replay, task): task for task in tasks}
        for _ in as_completed(futures):
            progress.advance(bar)
        return [future.result() for future in futures]


def as_json(results: Sequence[Result], command: str) -> dict[str, Any]:
    rows = [asdict(r) | {"hit_rate": round(r.hit_rate, 4)} for r in results]
    date = datetime.now(UTC).date().isoformat()
    return {"command": command, "date": date, "token_bytes": TOKEN_BYTES, "results": rows}


def table(results: Sequence[Result]) -> Table:
    """Tokens prefilled by policy and budget, with the hit rate."""
    budgets = sorted({result.budget_tokens for result in results})
    heads = ["millions of tokens prefilled (hit rate)", *(f"{b // 1000:,} k" for b in budgets)]
    made = Table(*heads, box=None, pad_edge=False)
    for column in made.columns[1:]:
        column.justify = "right"
    for policy in CACHES:
        cells = {r.budget_tokens: r for r in results if r.policy == policy}
        made.add_row(policy, *(_cell(cells.get(budget)) for budget in budgets))
    return made


def _cell(result: Result | None) -> str:
    return f"{result.prefilled_tokens / 1e6:,.1f} ({result.hit_rate:.3f})" if result else "-"


def plot(results: Sequence[Result], file: Path) -> None:
    """Plot tokens prefilled by budget, one line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for policy in CACHES:
        line = sorted((r.budget_tokens, r.prefilled_tokens) for r in results if r.policy == policy)
        axes.plot([b / 1e3 for b, _ in line], [n / 1e9 for _, n in line], "o-", label=policy)
    axes.set_xscale("log", base=2)
    ticks = sorted({result.budget_tokens for result in results})
    axes.set_xticks([t / 1e3 for t in ticks], [f"{t // 1000:,} k" for t in ticks])
    axes.set(xlabel="tokens kept", ylabel="tokens prefilled, billions", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Plot them to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="20 conversations, lengths and budgets divided by 16.")
    ] = False,
    conversations: Annotated[
        int | None, typer.Option("--conversations", min=1, help="Only so many of them.")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Parallel processes.")] = 2,
) -> None:
    """Count prefilled tokens by policy and budget on recorded agent traffic."""
    for file in (json_file, plot_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise BadInput(f"The directory of {file} does not exist; create it first.")
    scale = (20, 16) if quick else (conversations, 1)
    tasks = [Task(p, b // scale[1], *scale) for b in BUDGETS for p in CACHES]
    results = replay_all(tasks, processes)
    Console().print(table(results))
    if json_file is not None:
        command = "python -m benchmarks.traces" + " --quick" * quick
        json_file.write_text(json.dumps(as_json(results, command), indent=1) + "\n")
    if plot_file is not None:
        plot(results, plot_file)


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeepwarmError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
