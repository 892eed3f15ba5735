"""`python -m benchmarks.mutation`: sampled mutants of the package, each against the nearest tests.

Stopped and started again it goes on where it was, as long as sources and tests are the same; what
is known lies under `.mutants`. mutmut and cosmic-ray were looked at: the one does not change
decorated functions and runs a copy of the tree, which the tests of the sources do not stand, the
other starts an interpreter for each mutant, which takes longer here than the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

import benchmarks
from benchmarks.mutation.nearest import Suite
from benchmarks.mutation.running import failing, judge
from benchmarks.mutation.sites import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
ROOMS = "kv,cache,engine,store,records,remote,agents,text,telemetry,server"
UNSEEN = ("survived", "not called")
IMPORTED = (
    *("keepwarm.engine.engine", "keepwarm.server.app", "tests.kit.engines", "transformers"),
    *("_hypothesis_pytestplugin", "openai", "anthropic", "httpx", "uvicorn", "boto3"),
)


def main(  # noqa: PLR0917 (options of a command)
    count: Annotated[int, typer.Option(help="Mutants in all.")] = 300,
    seed: int = 1,
    modules: Annotated[str, typer.Option(help="Rooms or modules, as kv or kv.batch.")] = ROOMS,
    only: Annotated[str, typer.Option(help="Identities, or how they begin.")] = "",
    repo: Annotated[Path, typer.Option(help="The checkout that is changed and tested.")] = ROOT,
    seconds: Annotated[float, typer.Option(help="CPU time of tests for a mutant.")] = 40,
    minutes: Annotated[float, typer.Option(help="Stop after so many.")] = 1e6,
    jobs: Annotated[int, typer.Option(help="Mutants at a time.")] = 1,
    sites: Annotated[bool, typer.Option("--sites", help="Say what is drawn; run nothing.")] = False,
    compare: Annotated[Path | None, typer.Option(help="Verdicts of an earlier run.")] = None,
    write: Annotated[Path | None, typer.Option("--json", help="Write the verdicts here.")] = None,
) -> None:
    """Exit code 1 if a mutant survived, or if not all could be tried."""
    earlier = json.loads(compare.read_text()) if compare else []
    write, deadline = write and write.resolve(), time.monotonic() + 60 * minutes
    _enter(repo.resolve())
    every = _mutants(modules)
    named = tuple(filter(None, only.split(",")))
    sample = drawn([m for m in every if not named or m.identity.startswith(named)], seed, count)
    suite = Suite(Path.cwd())
    if sites:
        for mutant in sample:
            print(mutant.identity, mutant.key, *suite.nearest(mutant)[:3])
        print(f"{len(sample)} of {len(every)} mutants")
        return
    known = ROOT / ".mutants" / _state(seconds)
    known.mkdir(parents=True, exist_ok=True)
    _import_much()
    verdicts: list[dict[str, Any]] = []
    # Workers are forked before this process has threads; they fork for every mutant.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        attempt = partial(_verdict, suite=suite, known=known, seconds=seconds, deadline=deadline)
        for verdict in filter(None, pool.map(attempt, sample)):
            verdicts.append(verdict)
            print(f"{verdict['verdict']:>12}  {verdict['mutant']}", flush=True)
            if write is not None:
                lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in verdicts)
                write.write_text(f"[\n{lines}\n]\n")
    found = Counter(verdict["verdict"] for verdict in verdicts)
    print(f"{len(verdicts)} of {len(every)} mutants: {dict(found)}")
    for before, now in escaped(earlier, verdicts):
        print(f"killed before by {before['by']}, now {now['verdict']}: {now['mutant']}")
    unsteady = failing(sorted({v["by"] for v in verdicts if v["by"]}))
    if unsteady:
        print(f"fail without any change, so what they killed is not known: {unsteady}")
    unseen = sum(found[name] for name in UNSEEN)
    sys.exit(bool(unseen or unsteady) or len(verdicts) < len(sample))


def drawn(mutants: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """By hash, so that a change elsewhere leaves the sample as it is; twins are drawn once."""
    by_identity = {mutant.identity: mutant for mutant in reversed(mutants)}

    def place(identity: str) -> bytes:
        return hashlib.sha256(f"{seed} {identity}".encode()).digest()

    return [by_identity[identity] for identity in sorted(by_identity, key=place)[:count]]


def escaped(
    earlier: list[dict[str, Any]], verdicts: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What an earlier run killed and this one does not notice, wherever the function lies now."""
    killed = {v["identity"]: v for v in earlier if v["verdict"] not in UNSEEN}
    unseen = [v for v in verdicts if v["verdict"] in UNSEEN]
    return [(killed[v["identity"]], v) for v in unseen if v["identity"] in killed]


def _enter(repo: Path) -> None:
    """Import the package, its tests and what they take from `benchmarks` from this checkout."""
    source = repo / "src"
    os.environ["PYTHONPATH"] = str(source)  # for processes that tests start, too
    if not Path(import_module("keepwarm").__file__ or "").is_relative_to(source):
        # NOTE: `benchmarks` has imported the package of its own checkout already.
        program = [sys.executable, "-m", "benchmarks.mutation", *sys.argv[1:]]
        os.execv(sys.executable, program)  # noqa: S606 (the same program)
    os.chdir(repo)
    sys.path.insert(0, str(repo))
    benchmarks.__path__.insert(0, str(repo / "benchmarks"))


def _mutants(modules: str) -> list[Mutant]:
    source = Path("src").resolve()
    named = [source / "keepwarm" / name.replace(".", os.sep) for name in modules.split(",")]
    paths = [p for n in named for p in (sorted(n.rglob("*.py")) or [n.with_suffix(".py")])]
    absent = [path for path in paths if not path.exists()]
    if absent and modules != ROOMS:  # an earlier checkout has fewer rooms
        sys.exit(f"{absent[0]} does not exist; name rooms or modules, as kv or kv.batch.")
    return [m for p in paths if p not in absent for m in mutants_of(_name(p, source), p)]


def _name(path: Path, source: Path) -> str:
    relative = path.relative_to(source).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def _state(seconds: float) -> str:
    """Another one when a source or a test changes: then a verdict may be another one too."""
    digest = hashlib.sha256(str(seconds).encode())
    for path in sorted(path for top in ("src", "tests") for path in Path(top).rglob("*.py")):
        digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _import_much() -> None:
    """What tests need, once for all forks. Nothing here may compute: MLX cannot be forked then."""
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import_module("keepwarm.blas").start()
    for name in IMPORTED:
        if find_spec(name):
            import_module(name)


def _verdict(
    mutant: Mutant, suite: Suite, known: Path, seconds: float, deadline: float
) -> dict[str, Any] | None:
    if time.monotonic() > deadline:
        return None
    noted = known / f"{mutant.identity}.json"
    if noted.exists():
        verdict: dict[str, Any] = json.loads(noted.read_text())
        return verdict
    start = time.monotonic()
    outcome = judge(mutant, suite.nearest(mutant), seconds)._asdict()
    took = round(time.monotonic() - start, 1)
    verdict = {"mutant": mutant.key, "identity": mutant.identity, **outcome, "seconds": took}
    noted.write_text(json.dumps(verdict))
    return verdict


if __name__ == "__main__":
    typer.run(main)
