"""16 conversations over two server processes behind a stock router, one of them killed.

python -m tests.server.router_soak     writes docs/results/router.md
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.kit.redis_server import redis_server
from tests.kit.router import fleet, router
from tests.server.processes import PROGRAM, ROOT, served

N_SESSIONS, N_TURNS = 16, 3  # before and after the kill
MOST_COMPUTED = 1.3  # tokens for each new one, after the kill
WAIT_S = 600.0
PAGE = ROOT / "docs" / "results" / "router.md"


class RouterRun(NamedTuple):
    talks: list[Any]
    served_turns: list[int]  # by each server, before one was killed
    before: str
    after: str

    @property
    def moved(self) -> list[Any]:
        """The first turns after the kill, of conversations that have changed their server."""
        return [
            talk.turns[N_TURNS] for talk in self.talks if "shared" in talk.turns[N_TURNS].reused
        ]

    @property
    def n_new(self) -> int:
        return sum(turn.n_new for turn in self.moved)

    @property
    def n_computed(self) -> int:
        """For these."""
        return sum(turn.recomputed for turn in self.moved)


def measure(
    directory: Path, model: str = "smollm2", command: tuple[str, ...] = PROGRAM
) -> RouterRun:
    example = fleet()
    talks = [example.begun(number, n_rules=24) for number in range(N_SESSIONS)]
    options = {"max_tokens": 8, "temperature": 0}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(directory))
        names = {"KEEPWARM_REMOTE": redis.url, "KEEPWARM_SHARE_AT_ONCE": "1"}
        servers = [
            stack.enter_context(served(Path(model), directory / home, command=command, **names))
            for home in ("a", "b")
        ]
        url = stack.enter_context(router([each.url for each in servers], directory / "log"))
        asyncio.run(example.run(url, talks, N_TURNS, **options))
        for server in servers:
            _wait_until_shared(server.url)
        before, served_turns = example.summary(talks), [_n_answers(each.url) for each in servers]
        busier = servers[served_turns.index(max(served_turns))]
        busier.process.kill()
        asyncio.run(example.run(url, talks, N_TURNS, **options))
    return RouterRun(talks, served_turns, before, example.summary(talks))


def _n_answers(url: str) -> int:
    """Turns of conversations that a server has answered."""
    lines = httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines()
    name = 'keepwarm_answers_total{outcome="finished"} '
    (found,) = [float(line.removeprefix(name)) for line in lines if line.startswith(name)]
    return int(found) - 1  # the prompt that `_wait_until_shared` sends


def _wait_until_shared(url: str) -> None:
    """Blocks are shared in order, so these come after all that were offered before."""
    path = "/v1/cache/prefill/completions"
    answer = httpx.post(f"{url}{path}", json={"prompt": f"The end of {url}"}, timeout=WAIT_S)
    assert answer.json()["shared"], answer.text


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = measure(Path(directory), *sys.argv[1:])
    shared = sum(turn.reused["shared"] for turn in run.moved)
    lines = [
        "# Two servers behind a stock router",
        "",
        f"`python -m tests.server.router_soak`: {N_SESSIONS} conversations of SmolLM2-135M, "
        f"{2 * N_TURNS} turns each, over two server processes with homes of their own and one "
        "Redis, behind sglang-router as in `examples/fleet/compose.yaml`, with `share_at_once`. "
        f"After turn {N_TURNS} the server that has answered more is killed with SIGKILL.",
        "",
        f"- before the kill, {run.served_turns} turns by server: {run.before}",
        f"- in all: {run.after}",
        f"- at the next turn of the {len(run.moved)} conversations that had to move: {run.n_new} "
        f"new tokens, {run.n_computed} computed ({run.n_computed / run.n_new:.2f}; the goal is "
        f"{MOST_COMPUTED}), {shared} from the shared tier",
        "",
        "`tests/server/test_router.py` holds it with `--soak`.",
        "",
    ]
    PAGE.write_text("\n".join(lines))
    sys.stdout.write(PAGE.read_text())


if __name__ == "__main__":
    main()
