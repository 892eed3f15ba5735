"""`python -m benchmarks.mutation`: sampled mutants of three rooms, each against its room's tests.

Stopped and started again it goes on where it was; what is known lies under `.mutants`. mutmut and
cosmic-ray were looked at: the one does not change decorated functions and runs a copy of the tree,
which the tests of the sources do not stand, the other starts an interpreter for each mutant, which
takes longer here than the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib import import_module
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.mutation.running import Judgement, failing, judge, record
from benchmarks.mutation.sites import Mutant, mutants_of
from keepwarm import blas

ROOT = Path(__file__).parents[2]
KNOWN = ROOT / ".mutants"
ROOMS = ("kv", "cache", "engine")
SLACK = 5  # times the CPU time of the tests without the change, after 20 s for the start
UNSEEN = ("survived", "not called")  # tried again when there are more tests


def main(  # noqa: PLR0917 (options of a command)
    count: Annotated[int, typer.Option(help="Mutants in all.")] = 300,
    seed: int = 1,
    modules: Annotated[str, typer.Option(help="Or modules, as kv.batch.")] = ",".join(ROOMS),
    tests: Annotated[str, typer.Option(help="Test files; else all of a mutant's room.")] = "",
    seconds: Annotated[float, typer.Option(help="Of tests for a mutant, quickest first.")] = 1e6,
    minutes: Annotated[float, typer.Option(help="Stop after so many.")] = 1e6,
    jobs: Annotated[int, typer.Option(help="Mutants at a time.")] = 1,
    write: Annotated[Path | None, typer.Option("--json", help="Write the verdicts here.")] = None,
) -> None:
    """Exit code 1 if a mutant survived, or if not all could be tried."""
    os.chdir(ROOT)
    deadline = time.monotonic() + 60 * minutes
    every = [m for path in _sources(modules.split(",")) for m in mutants_of(_name(path), path)]
    # By hash, so that a change elsewhere leaves the sample as it is.
    drawn = sorted(every, key=lambda m: hashlib.sha256(f"{seed} {m.mark}".encode()).digest())
    sample = sorted(drawn[:count], key=every.index)
    _import_much()
    verdicts: list[dict[str, Any]] = []
    # Workers are forked before this process has threads; they fork for every mutant.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        list(pool.map(partial(_record, deadline=deadline), _unrecorded(tests)))
        attempt = partial(_verdict, tests=tests, seconds=seconds, deadline=deadline)
        for mutant, verdict in zip(sample, pool.map(attempt, sample), strict=True):
            if verdict is None:
                continue
            verdicts.append(verdict)
            print(f"{verdict['verdict']:>12}  {mutant.key}", flush=True)
            if write is not None:
                lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in verdicts)
                write.write_text(f"[\n{lines}\n]\n")
    found = Counter(verdict["verdict"] for verdict in verdicts)
    print(f"{len(verdicts)} of {len(every)} mutants: {dict(found)}")
    unsteady = failing(sorted({v["by"] for v in verdicts if v["by"]}))
    if unsteady:
        print(f"fail without any change, so what they killed is not known: {unsteady}")
    sys.exit(bool(found["survived"] or unsteady) or len(verdicts) < len(sample))


def _sources(modules: list[str]) -> list[Path]:
    package = ROOT / "src" / "keepwarm"
    named = [package / name.replace(".", os.sep) for name in modules]
    found = [p for n in named for p in (sorted(n.rglob("*.py")) or [n.with_suffix(".py")])]
    if absent := [path for path in found if not path.exists()]:
        sys.exit(f"{absent[0]} does not exist; name rooms or modules, as kv or kv.batch.")
    return found


def _import_much() -> None:
    """What tests need, once for all forks. Nothing here may compute: MLX cannot be forked then."""
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    blas.start()
    for name in (
        "keepwarm.engine.engine",
        "tests.kit.engines",
        "_hypothesis_pytestplugin",
        "transformers",
    ):
        import_module(name)


def _name(path: Path) -> str:
    relative = path.relative_to(ROOT / "src").with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def _files(room: str, files: str) -> list[str]:
    every = sorted((ROOT / "tests" / room).rglob("test_*.py"))
    relative = [str(file.relative_to(ROOT)) for file in every]
    return [file for file in relative if not files or file in files.split(",")]


def _record_of(file: str) -> Path:
    """Where it is noted what the tests of a file call; a file that changed has another place."""
    digest = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]
    return KNOWN / f"{file.replace(os.sep, '.')}.{digest}.json"


def _unrecorded(files: str) -> list[str]:
    """Large files first: they tend to take longest."""
    every = [file for room in ROOMS for file in _files(room, files)]
    absent = [file for file in every if not _record_of(file).exists()]
    return sorted(absent, key=lambda file: -(ROOT / file).stat().st_size)


def _record(file: str, deadline: float) -> None:
    if time.monotonic() < deadline:
        KNOWN.mkdir(exist_ok=True)
        print(f"     records  {file}", flush=True)
        record(ROOT, file, _record_of(file))


@cache
def _recorded(room: str, files: str) -> dict[str, Any]:
    """What each test of a room calls."""
    known = [path for file in _files(room, files) if (path := _record_of(file)).exists()]
    return {name: t for path in known for name, t in json.loads(path.read_text())["tests"].items()}


def _callers(mutant: Mutant, files: str) -> list[tuple[float, str]]:
    """The tests of its room that call the function, quick ones first; of a later room if none."""
    called = f"{mutant.module}:{mutant.function}"
    for room in ROOMS[ROOMS.index(mutant.module.split(".")[1]) :]:
        tests = _recorded(room, files)
        if found := [(t["seconds"], name) for name, t in tests.items() if called in t["calls"]]:
            return sorted(found)
    return []


def _verdict(mutant: Mutant, tests: str, seconds: float, deadline: float) -> dict[str, Any] | None:
    """Known already, or tried now: quick tests first, so that most end soon."""
    if time.monotonic() > deadline:
        return None
    meet = _callers(mutant, tests)
    before = accumulate((cost for cost, _ in meet), initial=0.0)
    met = [test for spent, test in zip(before, meet, strict=False) if spent < seconds]
    known = KNOWN / f"{mutant.mark}.json"
    if known.exists():
        verdict: dict[str, Any] = json.loads(known.read_text())
        if verdict["verdict"] not in UNSEEN or len(met) <= verdict["tests"]:
            return verdict | {"mutant": mutant.key}
    limit, start = 20 + SLACK * sum(cost for cost, _ in met), time.monotonic()
    outcome = judge(mutant, [name for _, name in met], limit) if met else Judgement("not called")
    verdict = {
        "mutant": mutant.key,
        "verdict": outcome.verdict,
        "by": outcome.by,
        "tests": len(met),
        "of": len(meet),
        "seconds": round(time.monotonic() - start, 1),
    }
    known.parent.mkdir(exist_ok=True)
    known.write_text(json.dumps(verdict))
    return verdict


if __name__ == "__main__":
    typer.run(main)
