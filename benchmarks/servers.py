"""`python -m benchmarks.servers`: Keepwarm and mlx_lm.server, asked in turn.

    start    seconds from the start of the process to its first answer, of one token; and its
             processor time, which other programs disturb least. The first start is apart: bytecode
             is written, and on a new CUDA machine kernels are compiled. There mlx_lm.server
             goes first, and alone meets cold files of weights and libraries
    turns    time to first token of a conversation's turns, with the cache of each
    restart  time to first token of a long conversation's last prompt, asked again by the first
             client after a restart; and after another one a minute later
    streams  seconds that answers take together; time to first token of a long cold prompt beside
             four of them, and the gaps of these meanwhile
    agents   the last first token of eight that share a long prompt and ask at once; the first time
             is apart
    faults   not in `all`: Keepwarm alone does `agents`; if it fails, again without our kernels; if
             that fails too, with one more thing changed at a time. Errors are printed. With
             `--samples 1` three minutes on a GPU, one if nothing fails

`--shape llama-8b` takes random weights of that shape, prompts of 8,192 tokens and, on a GPU, four
bits; `--shape tiny` is a check that everything runs.

Both meet the same load; only ratios within one run count. Both get the same weights, on a CPU in
fp32, and the same BLAS. mlx_lm.server calls itself healthy before its model is loaded, so what is
compared is the first answer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from benchmarks.requests import files
from benchmarks.requests.client import gaps_between
from benchmarks.requests.measure import describe_machine
from benchmarks.requests.prompts import system, user, with_answer
from benchmarks.requests.run import QUICK, Sizes, WorkloadRun, ask_together
from benchmarks.requests.suite import run_factory
from benchmarks.requests.targets import (
    ServerProcess,
    keepwarm_server,
    mlx_lm_server,
    unwound_by_signals,
    wait_for_kernels,
)
from benchmarks.requests.workloads.streams import background_streams
from benchmarks.requests.workloads.turns import RESTARTED, after_restart, long_conversation
from benchmarks.shapes import config_of, write_checkpoint
from keepwarm import config
from keepwarm.device import kernels
from keepwarm.errors import KeepwarmError, Unreachable
from keepwarm.state_file import MACHINE, StateFile

N_BESIDE = 4  # streams beside a cold prompt
KEPT_S = 6.0  # until an idle server has kept the kernels of its first answer
Runs: TypeAlias = Sequence[WorkloadRun]  # one for each server
Seconds: TypeAlias = dict[str, list[float]]  # of every sample, by server


class Sample(NamedTuple):
    what: str
    server: str
    seconds: float | None  # None: it was asked, and failed


def start(runs: Runs) -> Iterator[Sample]:
    for number in range(runs[0].sizes.samples + 1):
        for run in _in_turn(runs, number + 1):  # Keepwarm is second on the first start
            run.target.kill()
            seconds, name, cpu_s = run.target.start(), run.target.name, run.target.cpu_s()
            if number:
                yield Sample("start to first answer", name, seconds)
                yield Sample("its processor time", name, cpu_s)
            else:
                yield Sample("first start", name, seconds)
                time.sleep(KEPT_S)
            run.target.kill()


def turns(runs: Runs) -> Iterator[Sample]:
    """Each server has its own conversation, of the same texts, and both go on together."""
    for run in runs:
        run.target.start()
    for number in range(runs[0].sizes.samples):
        yield from _conversations(runs, number)


def _conversations(runs: Runs, number: int) -> Iterator[Sample]:
    sizes, seed = runs[0].sizes, next(runs[0].seeds)
    messages = {
        run.target.name: run.prompts.chat(sizes.first_turn, run.template_tokens, seed)
        for run in runs
    }
    total = dict.fromkeys(messages, 0.0)
    for turn in range(sizes.turns):
        question = runs[0].text(sizes.next_turn)
        for run in _in_turn(runs, number + turn):
            name = run.target.name
            reply = run.ask(messages[name])
            messages[name] = with_answer(messages[name], reply.text, question)
            total[name] += reply.total_s
            yield Sample(f"turn {turn + 1}", name, reply.ttft_s)
    yield from (Sample("whole conversation", name, seconds) for name, seconds in total.items())


def restart(runs: Runs) -> Iterator[Sample]:
    """Both have the same conversation; mlx_lm.server computes it again."""
    for run in runs:
        run.target.start()
    prompts = [long_conversation(run) for run in runs]
    for _ in range(runs[0].sizes.samples):
        for what, wait_s in ((RESTARTED, 0.0), ("the same, later", runs[0].sizes.later_s)):
            for run, messages in zip(runs, prompts, strict=True):
                reply = after_restart(run, messages, wait_s if run.target.is_ours else 0.0)
                run.target.kill()
                yield Sample(what, run.target.name, reply.ttft_s)


def streams(runs: Runs) -> Iterator[Sample]:
    for run in runs:
        run.target.start()
        wait_for_kernels(run.target)
    for number in range(runs[0].sizes.samples + 1):
        for run in _in_turn(runs, number):
            for what, seconds in {**_together(run), **_beside_streams(run)}.items():
                if number:  # the first meets kernels for batches of this size
                    yield Sample(what, run.target.name, seconds)


def _together(run: WorkloadRun) -> dict[str, float]:
    """Seconds of so many answers of equal length, asked at once."""
    found = {}
    for n_streams in run.sizes.streams:
        asks = [partial(run.ask, run.fresh(64), run.sizes.stream) for _ in range(n_streams)]
        began = time.perf_counter()
        ask_together(asks)
        found[f"{n_streams} answers together"] = time.perf_counter() - began
    return found


def _beside_streams(run: WorkloadRun) -> dict[str, float]:
    """A long cold prompt alone, and beside streams."""
    alone = run.ask(run.fresh(run.sizes.long), policy="no-store").ttft_s
    with background_streams(run, N_BESIDE) as running:
        began = time.perf_counter()
        reply = run.ask(run.fresh(run.sizes.long), policy="no-store")
        ended = time.perf_counter()
        gaps = sorted(gap for each in running for gap in gaps_between(each.times, began, ended))
    what = f"{run.sizes.long:,} cold"
    return {
        f"{what}, alone": alone,
        f"{what}, beside {N_BESIDE}": reply.ttft_s,
        "their gaps, p50": gaps[len(gaps) // 2],
        "their gaps, p95": gaps[len(gaps) * 95 // 100],
    }


def agents(runs: Runs) -> Iterator[Sample]:
    """The first round is apart: it meets kernels for batches of this size.

    One server after the other: eight long prompts take what memory a GPU has left.
    """
    for run in runs:
        run.target.start()
        wait_for_kernels(run.target)
        for number in range(run.sizes.samples + 1):
            what = f"last of {run.sizes.n_agents} agents" + ", at first" * (not number)
            yield Sample(what, run.target.name, _last_of_agents(run))
        run.target.kill()


def _last_of_agents(run: WorkloadRun, policy: str | None = None) -> float | None:
    """None when another server fails at it; ours must not."""
    shared, sizes = run.text(run.sizes.shared), run.sizes
    prompts = [[system(shared), user(run.text(sizes.own))] for _ in range(sizes.n_agents)]
    try:
        replies = ask_together([partial(run.ask, each, policy=policy) for each in prompts])
    except Unreachable as error:
        if run.target.is_ours:
            raise
        print(f"{run.target.name} failed: {error}", flush=True)
        return None
    return max(reply.ttft_s for reply in replies)


class Variant(NamedTuple):
    """What is changed to see whether a fault goes with it."""

    what: str
    environ: Mapping[str, str] = {}
    policy: str | None = None
    has_kernels: bool = False  # whether rows are multiplied by kernels of ours, once compiled


USUAL = Variant("as it is", has_kernels=True)
PLAIN = Variant("none of our kernels")
MANY_SHAPES = {kernels.CHECK: "1", "MLX_CUDA_GRAPH_CACHE_SIZE": "40"}
SUSPECTED = Variant("MLX fails at many shapes", MANY_SHAPES)
CHANGED = (
    Variant("nothing kept", policy="no-store"),
    Variant("no CUDA graphs", {"MLX_USE_CUDA_GRAPHS": "0"}),
    Variant("no cuDNN", {"MLX_CUDA_USE_CUDNN_SDPA": "0"}),
    Variant("one kernel after the other", {"CUDA_LAUNCH_BLOCKING": "1"}),
)


def faults(runs: Runs) -> Iterator[Sample]:
    """What lives shows what a fault goes with. If none is met, one that was suspected is forced."""
    run = next(run for run in runs if run.target.is_ours)
    if (yield from _rounds(run, USUAL)):
        yield from _rounds(run, SUSPECTED)
    elif not (yield from _rounds(run, PLAIN)):
        for variant in CHANGED:
            yield from _rounds(run, variant)


def _rounds(run: WorkloadRun, variant: Variant) -> Generator[Sample, None, bool]:
    """Seconds of each round until the server fails; whether it did not."""
    target = cast("ServerProcess", run.target)
    what, usual = f"{run.sizes.n_agents} agents, {variant.what}", target.environ
    with tempfile.TemporaryDirectory() as home:
        target.environ = {**usual, **variant.environ}
        if not variant.has_kernels:
            target.environ["KEEPWARM_HOME"] = str(_home_without_kernels(Path(home)))
        try:
            target.start()
            wait_for_kernels(run.target)
            for _ in range(run.sizes.samples + 1):
                yield Sample(what, target.name, _last_of_agents(run, variant.policy))
        except KeepwarmError as error:
            print(f"{variant.what}: failed: {error}", flush=True)
            yield Sample(what, target.name, None)
            return False
        finally:
            target.kill()
            target.environ = usual
    return True


def _home_without_kernels(home: Path) -> Path:
    """A copy of what is known of this machine, but that MLX's own products are the fastest."""
    usual = config.load().home
    for kept in ("kernels", MACHINE):
        if (usual / kept).exists():
            copy = shutil.copytree if (usual / kept).is_dir() else shutil.copy
            copy(usual / kept, home / kept)
    file = StateFile[dict[str, Any]](home / MACHINE, "products", dict)
    file.change(lambda kept: {**kept, "names": _plain(kept.get("names", {}))})
    return home


def _plain(names: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    return {shape: dict.fromkeys(by_rows, "plain") for shape, by_rows in names.items()}


def _in_turn(runs: Runs, number: int) -> Runs:
    """Whoever was first is last the next time."""
    return runs if number % 2 == 0 else runs[::-1]


MEASURES: dict[str, Callable[[Runs], Iterator[Sample]]] = {
    "start": start,
    "turns": turns,
    "restart": restart,
    "streams": streams,
    "agents": agents,
    "faults": faults,
}
ALL = [name for name in MEASURES if name != "faults"]
LONG_PROMPTS = Sizes(
    long=8192,
    shared=8192,
    own=2048,
    n_agents=8,
    streams=(4, 16),
    first_turn=2000,
    next_turn=500,
)


def measure(
    names: Sequence[str], model: str, shape: str | None, sizes: Sizes
) -> Generator[tuple[str, dict[str, Seconds]]]:
    """What is known of each after every sample: a time limit loses none."""
    with tempfile.TemporaryDirectory(prefix="keepwarm-bench-") as temporary:
        folder = Path(temporary)
        shared = files.model_directory(model)
        if shape:
            shared = write_checkpoint(shape, shared, folder / shape)
        shared = files.full_precision(shared, folder / "model")
        servers = [keepwarm_server(shared, folder), mlx_lm_server(shared, folder)]
        make_run = run_factory(shared, folder, sizes)
        runs = [make_run("servers", server, lambda _: None) for server in servers]
        try:
            for name in names:
                for found in collected(MEASURES[name](runs)):
                    yield name, found
                show(found)
                for server in servers:
                    server.kill()  # the next measure starts its own
        finally:
            for server in servers:
                server.close()


def collected(samples: Iterable[Sample]) -> Iterator[dict[str, Seconds]]:
    found: dict[str, Seconds] = {}
    for what, server, seconds in samples:
        known = found.setdefault(what, {}).setdefault(server, [])
        if seconds is not None:
            known.append(seconds)
            print(f"{what:30} {server:10} {seconds:6.3f} s", flush=True)
        yield found


def ratios(found: Seconds) -> list[float]:
    """Keepwarm's seconds over mlx_lm.server's, sample by sample; none where it failed."""
    if len(found["keepwarm"]) != len(found.get("mlx-lm", ())):
        return []
    return [ours / theirs for ours, theirs in zip(found["keepwarm"], found["mlx-lm"], strict=True)]


def show(measured: Mapping[str, Seconds]) -> None:
    for what, seconds in measured.items():
        line = f"{what:22} " + "  ".join(
            f"{name} {statistics.median(samples):6.3f} s"
            for name, samples in seconds.items()
            if samples
        )
        if shares := sorted(ratios(seconds)):
            spread = f"{shares[0]:.3f} to {shares[-1]:.3f}"
            line += f"  ratio {statistics.median(shares):.3f} ({spread})"
        print(line, flush=True)


def _sizes(shape: str | None) -> Sizes:
    if not shape:
        return Sizes()
    is_tiny = config_of(shape)["max_position_embeddings"] <= LONG_PROMPTS.long
    return QUICK if is_tiny else LONG_PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("what", nargs="+", choices=[*MEASURES, "all"])
    parser.add_argument("--model", default=config.load().model)
    parser.add_argument("--shape", help="random weights in this shape, as llama-8b or tiny")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write machine, versions and all samples here")
    asked = parser.parse_args()
    names = ALL if "all" in asked.what else asked.what
    sizes = replace(_sizes(asked.shape), samples=asked.samples)
    words = [*asked.what, f"--model {files.as_published(asked.model)}"]
    words += [f"--shape {asked.shape}"] * bool(asked.shape) + [f"--samples {asked.samples}"]
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.servers", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "seconds": {},
    }
    measured = measure(names, asked.model, asked.shape, sizes)
    with unwound_by_signals(), closing(measured):
        for name, found in measured:
            report["seconds"][name] = found
            if asked.json is not None:
                asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
