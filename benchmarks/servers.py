"""`python -m benchmarks.servers`: Keepwarm and mlx_lm.server, asked in turn.

    start    seconds from the start of the process to its first answer, of one token; and its
             processor time, which other programs disturb least
    turns    time to first token of a conversation's turns, with the cache of each
    restart  time to first token of a long conversation's last prompt, asked again by the first
             client after a restart; and after another one a minute later

So both meet the same load; only ratios within one run count. Both get the same weights in fp32 and
the same BLAS. mlx_lm.server calls itself healthy before its model is loaded, so what is compared is
the first answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.requests import files
from benchmarks.requests.measure import describe_machine
from benchmarks.requests.prompts import with_answer
from benchmarks.requests.run import Sizes, WorkloadRun
from benchmarks.requests.suite import run_factory
from benchmarks.requests.targets import keepwarm_server, mlx_lm_server
from benchmarks.requests.workloads.turns import RESTARTED, after_restart, long_conversation
from keepwarm import config

Runs: TypeAlias = Sequence[WorkloadRun]  # one for each server
Seconds: TypeAlias = dict[str, list[float]]  # of every sample, by server


def start(runs: Runs) -> dict[str, Seconds]:
    """The first start of each is not counted: files may be cold, and bytecode is written."""
    wall: Seconds = {run.target.name: [] for run in runs}
    processor: Seconds = {run.target.name: [] for run in runs}
    for number in range(runs[0].sizes.samples + 1):
        for run in _in_turn(runs, number):
            run.target.kill()
            seconds = run.target.start()
            if number:
                wall[run.target.name].append(seconds)
                processor[run.target.name].append(run.target.cpu_s() or 0.0)
            run.target.kill()
    return {"start to first answer": wall, "its processor time": processor}


def turns(runs: Runs) -> dict[str, Seconds]:
    """Each server has its own conversation, of the same texts, and both go on together."""
    for run in runs:
        run.target.start()
    found: dict[str, Seconds] = {}
    for number in range(runs[0].sizes.samples):
        for what, name, seconds in _conversations(runs, number):
            found.setdefault(what, {}).setdefault(name, []).append(seconds)
    return found


def _conversations(runs: Runs, number: int) -> Iterator[tuple[str, str, float]]:
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
            yield f"turn {turn + 1}", name, reply.ttft_s
    yield from (("whole conversation", name, seconds) for name, seconds in total.items())


def restart(runs: Runs) -> dict[str, Seconds]:
    """Both have the same conversation; mlx_lm.server computes it again."""
    for run in runs:
        run.target.start()
    prompts = [long_conversation(run) for run in runs]
    found: dict[str, Seconds] = {}
    for _ in range(runs[0].sizes.samples):
        for what, wait_s in ((RESTARTED, 0.0), ("the same, later", runs[0].sizes.later_s)):
            for run, messages in zip(runs, prompts, strict=True):
                reply = after_restart(run, messages, wait_s if run.target.is_ours else 0.0)
                run.target.kill()
                found.setdefault(what, {}).setdefault(run.target.name, []).append(reply.ttft_s)
    return found


def _in_turn(runs: Runs, number: int) -> Runs:
    """Whoever was first is last the next time."""
    return runs if number % 2 == 0 else runs[::-1]


MEASURES: dict[str, Callable[[Runs], dict[str, Seconds]]] = {
    "start": start,
    "turns": turns,
    "restart": restart,
}


def measure(names: Sequence[str], model: str, sizes: Sizes) -> dict[str, dict[str, Seconds]]:
    with tempfile.TemporaryDirectory(prefix="keepwarm-bench-") as temporary:
        folder = Path(temporary)
        shared = files.full_precision(files.model_directory(model), folder / "model")
        servers = [keepwarm_server(shared, folder), mlx_lm_server(shared, folder)]
        make_run = run_factory(shared, folder, sizes)
        runs = [make_run("servers", server, lambda _: None) for server in servers]
        try:
            return {name: MEASURES[name](runs) for name in names}
        finally:
            for server in servers:
                server.close()


def ratios(found: Seconds) -> list[float]:
    """Keepwarm's seconds over mlx_lm.server's, sample by sample."""
    return [ours / theirs for ours, theirs in zip(found["keepwarm"], found["mlx-lm"], strict=True)]


def show(found: Mapping[str, Mapping[str, Seconds]]) -> None:
    for measured in found.values():
        for what, seconds in measured.items():
            medians = "  ".join(
                f"{name} {statistics.median(samples):6.3f} s" for name, samples in seconds.items()
            )
            shares = sorted(ratios(seconds))
            middle = statistics.median(shares)
            print(f"{what:22} {medians}  ratio {middle:.3f} ({shares[0]:.3f} to {shares[-1]:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("what", choices=[*MEASURES, "all"])
    parser.add_argument("--model", default=config.load().model)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write machine, versions and all samples here")
    asked = parser.parse_args()
    machine = describe_machine()
    names = list(MEASURES) if asked.what == "all" else [asked.what]
    found = measure(names, asked.model, Sizes(samples=asked.samples))
    show(found)
    if asked.json is not None:
        command = f"python -m benchmarks.servers {asked.what} --samples {asked.samples}"
        today = datetime.now(UTC).date().isoformat()
        report: dict[str, Any] = {"command": command, "date": today, "machine": machine}
        asked.json.write_text(json.dumps(report | {"seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
