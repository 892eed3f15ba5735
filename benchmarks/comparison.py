"""`python -m benchmarks.comparison`: every MLX server that starts here, asked the same in turn.

Each has an environment below FOLDER, named like it. All get the same weights, on a CPU in fp32,
and the same BLAS; each has a folder of its own for what it stores. Every situation goes to one
server after the other, and whoever was first is last the next time, so that other work on the
machine disturbs all alike. One that does not start is named with its reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import mlx.core as mx

from benchmarks.requests import files
from benchmarks.requests.client import Message, TimedReply
from benchmarks.requests.measure import describe_machine
from benchmarks.requests.prompts import system, user, with_answer
from benchmarks.requests.run import Sizes, WorkloadRun, ask_together
from benchmarks.requests.suite import run_factory
from benchmarks.requests.targets import (
    ServerProcess,
    error_line,
    keepwarm_server,
    mlx_lm_server,
    unwound_by_signals,
)
from keepwarm import blas
from keepwarm.errors import KeepwarmError

T = TypeVar("T")

ROOT = Path(__file__).parent
OURS, REFERENCE = "keepwarm", "mlx-lm"
SIZES = Sizes(first_turn=1024, next_turn=100, turns=6, n_agents=8, shared=1000, own=16, samples=3)
N_SAID = 24  # tokens of answers that are compared
NAME = "default_model"  # of the model, as requests have it
PAYLOAD = 16 << 10  # files of fewer bytes are an index, and left alone
EVERY = 257  # bytes; odd, so that every byte of a number is hit somewhere

COLD, REPEAT, OTHER = "cold", "repeat", "another agent"
TURNS, AGENTS, RESTARTED = "turns 2 to 6", "eight at once", "after kill -9"


@dataclass(frozen=True)
class Rival:
    """A published server. `{bin}`, `{model}` and `{store}` stand for folders."""

    package: str
    command: str
    model: str = NAME  # what requests name


LOCAL = f"--host 127.0.0.1 --served-model-name {NAME}"
RIVALS = {
    "mlx-vlm": Rival(
        "mlx-vlm==0.7.10",
        "env APC_ENABLED=1 APC_DISK_PATH={store} {bin}/mlx_vlm.server --model {model}",
        model="{model}",
    ),
    "vllm-mlx": Rival(
        "vllm-mlx==0.6.0",
        f"{{bin}}/vllm-mlx serve {{model}} {LOCAL} --continuous-batching --ssd-cache-dir {{store}}",
    ),
    "rapid-mlx": Rival(
        "rapid-mlx==0.16.10",
        f"{{bin}}/rapid-mlx serve {{model}} {LOCAL} --shared-prefix-wait-tokens 256",
    ),
    "vmlx": Rival(
        "vmlx==1.6.81", f"{{bin}}/vmlx serve {{model}} {LOCAL} --enable-block-disk-cache"
    ),
    "mlx-openai-server": Rival(
        "mlx-openai-server==1.8.1",
        "{bin}/mlx-openai-server launch --model-path {model} --model-type lm --no-log-file "
        f"{LOCAL} --prompt-cache-dir {{store}}",
    ),
}

Figures: TypeAlias = dict[str, Any]


class Step(NamedTuple):
    """What a situation took: seconds to its first tokens, and the tokens of its prompts."""

    first_s: float
    n_prompt: int
    n_cached: int

    @property
    def n_computed(self) -> int:
        return self.n_prompt - self.n_cached


def step_of(replies: Sequence[TimedReply], seconds: float) -> Step:
    n_prompt = sum(reply.prompt_tokens for reply in replies)
    return Step(seconds, n_prompt, sum(reply.cached_tokens for reply in replies))


@dataclass
class Visit:
    """One server, the conversation that it is asked to go on with, and what was found."""

    run: WorkloadRun
    found: Figures
    messages: list[Message] = field(default_factory=list)
    said: str = ""

    @property
    def name(self) -> str:
        return self.run.target.name

    def attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """A server that fails has no further part."""
        if "failure" in self.found:
            return None
        try:
            return work()
        except KeepwarmError as error:
            self.found["failure"] = f"{what}: {error_line(error)}"
            print(f"{self.name}: {self.found['failure']}", flush=True)
            self.run.target.kill()
            return None

    def begin(self) -> None:
        self.messages = self.run.fresh(self.run.sizes.first_turn)

    def cold(self) -> Step:
        self.begin()
        return self.again()

    def again(self) -> Step:
        reply = self.run.ask(self.messages)
        self.said = reply.text
        return step_of([reply], reply.ttft_s)

    def other_agent(self) -> Step:
        reply = self.run.ask([self.messages[0], user(self.run.text(16))])
        return step_of([reply], reply.ttft_s)

    def turns(self) -> Step:
        steps = []
        for _ in range(self.run.sizes.turns - 1):
            question = self.run.text(self.run.sizes.next_turn)
            self.messages = with_answer(self.messages, self.said, question)
            steps.append(self.again())
        return Step(*(sum(column) for column in zip(*steps, strict=True)))

    def agents(self) -> Step:
        sizes = self.run.sizes
        shared = system(self.run.text(sizes.shared))
        prompts = [[shared, user(self.run.text(sizes.own))] for _ in range(sizes.n_agents)]
        replies = ask_together([partial(self.run.ask, messages) for messages in prompts])
        return step_of(replies, max(reply.ttft_s for reply in replies))

    def answer(self) -> TimedReply:
        return self.run.ask(self.messages, N_SAID)


STEPS: dict[str, Callable[[Visit], Step]] = {
    COLD: Visit.cold,
    REPEAT: Visit.again,
    OTHER: Visit.other_agent,
    TURNS: Visit.turns,
    AGENTS: Visit.agents,
    RESTARTED: Visit.again,
}


def sample(visits: Sequence[Visit], number: int) -> None:
    """Each situation at one server after the other; whoever was first is last the next time."""
    for each in visits:
        each.found["samples"].append({})
    for place, (what, work) in enumerate(STEPS.items()):
        if what == RESTARTED:
            restart(visits)
        for each in visits if (number + place) % 2 == 0 else visits[::-1]:
            if step := each.attempt(what, partial(work, each)):
                each.found["samples"][-1][what] = step
                print(f"{number + 1}  {each.name:18} {what:15} {step}", flush=True)


def restart(visits: Sequence[Visit], between: Callable[[Visit], object] | None = None) -> None:
    """All at once: most of a start is imports."""
    going = [each for each in visits if "failure" not in each.found]
    for each in going:
        each.run.target.settle()
        each.run.target.kill()
        if between is not None:
            between(each)
    ask_together([partial(each.attempt, "start", each.run.target.start) for each in going])


# What a damaged or outdated cache does to an answer.


def flipped(visits: Sequence[Visit]) -> None:
    """The answer before, after a restart alone, and after bytes of its stored state were flipped.

    Only where the restart alone restores something does a miss after it say that damage was seen.
    """
    for each in visits:
        each.attempt("prompt", each.begin)
    before = answers(visits)
    restart(visits)
    undamaged = answers(visits)
    n_files: dict[str, int] = {}
    restart(visits, lambda each: n_files.update({each.name: flip(each.run.target.store)}))
    after = answers(visits)
    for each in visits:
        _compare(each, "undamaged", undamaged, before)
        _compare(each, "flipped", after, before)
        each.found.get("flipped", {})["files"] = n_files.get(each.name, 0)


def changed(visits: Sequence[Visit]) -> None:
    """The answer of other weights under the same path, and theirs with nothing stored."""
    for each in visits:
        each.attempt("prompt", each.begin)
    answers(visits)
    with other_weights(visits[0].run.model):
        restart(visits)
        after = answers(visits)
        restart(visits, lambda each: empty(each.run.target.store))
        cold = answers(visits)
    for each in visits:
        _compare(each, "weights", after, cold)


def answers(visits: Sequence[Visit]) -> dict[str, TimedReply]:
    found = {each.name: each.attempt("answer", each.answer) for each in visits}
    return {name: reply for name, reply in found.items() if reply}


def _compare(
    each: Visit, what: str, after: dict[str, TimedReply], wanted: dict[str, TimedReply]
) -> None:
    if each.name in after and each.name in wanted:
        reply, right = after[each.name], wanted[each.name]
        same = reply.text == right.text
        each.found[what] = {"cached": reply.cached_tokens, "same": same}
        print(f"   {each.name:18} {what:15} {each.found[what]}", flush=True)


def flip(store: Path | None) -> int:
    """Flip a bit of every so many bytes, behind the header; how many files that were."""
    found = [] if store is None else [path for path in store.rglob("*") if _is_payload(path)]
    for path in found:
        content = bytearray(path.read_bytes())
        for place in range(_header_bytes(path, content), len(content), EVERY):
            content[place] ^= 0x40
        path.write_bytes(content)
    return len(found)


def _header_bytes(path: Path, content: bytearray) -> int:
    if path.suffix == ".safetensors":
        return 8 + int.from_bytes(content[:8], "little")
    return len(content) // 4


def _is_payload(path: Path) -> bool:
    is_index = any(word in path.name for word in ("sqlite", ".db", "json", "log", "index"))
    return path.is_file() and not is_index and path.stat().st_size >= PAYLOAD


def empty(store: Path | None) -> None:
    if store is not None:
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)


@contextmanager
def other_weights(model: Path) -> Iterator[None]:
    """Other weights of the same shapes under the same path, for a while."""
    path, kept = model / "model.safetensors", model / "kept"
    path.rename(kept)
    weights: Any = mx.load(str(kept), format="safetensors")
    noise = {name: 1 + 0.3 * mx.random.normal(array.shape) for name, array in weights.items()}
    other = {name: array * noise[name] for name, array in weights.items()}
    mx.save_safetensors(str(path), other, {"format": "mlx"})
    try:
        yield
    finally:
        kept.replace(path)


# Servers.


class RivalServer(ServerProcess):
    """Started from an environment of its own, with the BLAS that Keepwarm chose."""

    def __init__(self, name: str, rival: Rival, model: Path, folder: Path, place: Path) -> None:
        store = folder / f"store-{name}"
        store.mkdir()
        named = {"bin": place / name / "bin", "model": model, "store": store}
        super().__init__(
            name,
            rival.package,
            shlex.split(rival.command.format(**named)),
            health="/v1/models",
            log=folder / f"{name}.log",
            store=store,
            environ={"HOME": str(store), "DO_NOT_TRACK": "1", **same_blas()},
            model=rival.model.format(**named),
        )
        self.is_ours = False

    def kill(self) -> None:
        """With its children, which some servers have for the model."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(self._process.pid, signal.SIGKILL)
        super().kill()


def version(name: str) -> str:
    if name in RIVALS:
        return RIVALS[name].package.partition("==")[2]
    return importlib.metadata.version(name)


def same_blas() -> dict[str, str]:
    """Variables by which another program loads the BLAS of this process."""
    used = blas.in_use()
    if used is None:
        return {}
    chosen = [s for s in blas.settings({}) if (s.name, s.threads) == (used.name, used.threads)]
    libraries = [library for setting in chosen[:1] for library in setting.libraries]
    threads = {"OMP_NUM_THREADS": str(used.threads), "OMP_WAIT_POLICY": "passive"}
    return {"LD_PRELOAD": ":".join(libraries), **threads}


def measure(names: Sequence[str], place: Path, source: Path, sizes: Sizes) -> Iterator[Figures]:
    """Samples and findings by server, so far; some refuse `logit_bias`, so all may end early."""
    with tempfile.TemporaryDirectory(prefix="keepwarm-bench-") as temporary:
        folder = Path(temporary)
        model = files.full_precision(source, folder / "model")
        servers = [_server(name, model, folder, place) for name in names]
        make_run = run_factory(model, folder, sizes)
        runs = [make_run("comparison", server, lambda _: None) for server in servers]
        try:
            yield from _found([replace(run, stop_tokens=()) for run in runs])
        finally:
            for server in servers:
                server.close()


def _server(name: str, model: Path, folder: Path, place: Path) -> ServerProcess:
    if name == OURS:
        return keepwarm_server(model, folder)
    if name == REFERENCE:
        return mlx_lm_server(model, folder)
    return RivalServer(name, RIVALS[name], model, folder, place)


def _found(runs: Sequence[WorkloadRun]) -> Iterator[Figures]:
    visits = [Visit(run, {"version": version(run.target.name), "samples": []}) for run in runs]
    found = {each.name: each.found for each in visits}
    restart(visits)
    sample(visits, 0)
    yield found
    flipped(visits)
    changed(visits)
    yield found
    for number in range(1, runs[0].sizes.samples):
        restart(visits)
        sample(visits, number)
        yield found


# The page.


def table(results: Figures) -> str:
    """Each situation as a part of the server's own cold prompt, with the tokens it computed."""
    rows = [["server", *list(STEPS)[1:]], ["---", *["--:"] * (len(STEPS) - 1)]]
    for name, server in results["servers"].items():
        if server["samples"] and "failure" not in server:
            rows.append([f"{name} {server['version']}", *_cells(server)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(server: Figures) -> Iterator[str]:
    samples = [sample for sample in server["samples"] if len(sample) == len(STEPS)]
    reports = any(Step(*step).n_cached for sample in samples for step in sample.values())
    for what in list(STEPS)[1:]:
        parts = [Step(*sample[what]).first_s / Step(*sample[COLD]).first_s for sample in samples]
        computed = [Step(*sample[what]).n_computed for sample in samples]
        yield spread(parts) + (f" ({statistics.median(computed):,.0f})" if reports else "")


def spread(samples: Sequence[float]) -> str:
    """The median, or the range where samples are more than 10 % from it; of one a single digit."""
    middle, low, high = statistics.median(samples), min(samples), max(samples)
    if len(samples) == 1:
        return f"{float(f'{middle:.1g}'):g}"
    if low >= 0.9 * middle and high <= 1.1 * middle:
        return f"{middle:.2g}"
    return f"{low:.2g} to {high:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    parser.add_argument("folder", type=Path, help="with an environment for each other server")
    parser.add_argument("--only", action="append", choices=[OURS, REFERENCE, *RIVALS])
    parser.add_argument("--model", default=str(ROOT / "models" / "attention"))
    parser.add_argument("--samples", type=int, default=SIZES.samples)
    parser.add_argument("--json", type=Path, help="write machine, versions and all samples here")
    asked = parser.parse_args()
    names = asked.only or [OURS, REFERENCE, *RIVALS]
    sizes = replace(SIZES, samples=asked.samples)
    today = datetime.now(UTC).date().isoformat()
    results = {"date": today, "model": Path(asked.model).name, "machine": describe_machine()}
    with unwound_by_signals():
        for found in measure(names, asked.folder, Path(asked.model), sizes):
            results["servers"] = found
            if asked.json is not None:
                asked.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
