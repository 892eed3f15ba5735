"""Conversations through a router to several servers, and what they had to compute.

python examples/fleet.py http://127.0.0.1:30000 [--sessions 16] [--turns 6]

The API key of the servers, if they need one, is that of the variable OPENAI_API_KEY.
A stock router answers 500 for a server that has just died; such a request is sent again, and
counted.
How to start the servers and the router: examples/fleet/compose.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TOPICS = ("foxes", "bridges", "tides", "violins", "glaciers", "bread", "comets", "locks")
RULES = "You answer questions about {topic}, briefly, and never about anything else. "
QUESTIONS = ("What is the most important thing?", "And what comes after that?", "Why is it so?")
RETRIES = 8
PAUSE_S = 0.5


@dataclass
class Talk:
    """One conversation, and what each of its turns cost."""

    messages: list[dict[str, str]]
    turns: list[Turn] = field(default_factory=list)

    @property
    def n_known(self) -> int:
        """Tokens of the latest prompt and its answer, which the next prompt begins with."""
        return self.turns[-1].n_prompt + self.turns[-1].n_answer if self.turns else 0


@dataclass(frozen=True)
class Turn:
    """Tokens of one turn."""

    n_prompt: int
    n_answer: int
    n_new: int
    reused: Mapping[str, int]
    recomputed: int
    n_retries: int


def begun(number: int, n_rules: int = 12) -> Talk:
    """A conversation like no other from its first words on."""
    rules = RULES.format(topic=f"{TOPICS[number % len(TOPICS)]} {number}") * n_rules
    return Talk([{"role": "system", "content": rules}])


async def turn(client: httpx.AsyncClient, talk: Talk, **options: Any) -> None:
    """Ask the next question and keep the answer."""
    question = QUESTIONS[len(talk.turns) % len(QUESTIONS)]
    talk.messages.append({"role": "user", "content": question})
    answer, n_retries = await _post(client, {"messages": talk.messages, **options})
    n_prompt = answer["usage"]["prompt_tokens"]
    receipt = answer["keepwarm"]
    talk.turns.append(
        Turn(
            n_prompt=n_prompt,
            n_answer=answer["usage"]["completion_tokens"],
            n_new=n_prompt - talk.n_known,
            reused=receipt["reused"],
            recomputed=receipt["recomputed"],
            n_retries=n_retries,
        )
    )
    said = answer["choices"][0]["message"]["content"]
    talk.messages.append({"role": "assistant", "content": said})


async def _post(client: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[Any, int]:
    """The answer, and how often it was asked for again."""
    n_retries = 0
    while True:
        answer = await client.post("/v1/chat/completions", json={"model": "any", **body})
        if answer.status_code < 500 or n_retries == RETRIES:
            answer.raise_for_status()
            return answer.json(), n_retries
        await asyncio.sleep(PAUSE_S * n_retries)
        n_retries += 1


async def run(url: str, talks: Sequence[Talk], n_turns: int, **options: Any) -> None:
    """All conversations at once, each by some turns."""

    async def talk_on(talk: Talk) -> None:
        for _ in range(n_turns):
            await turn(client, talk, **options)

    key = os.environ.get("OPENAI_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as client:
        await asyncio.gather(*map(talk_on, talks))


def summary(talks: Sequence[Talk]) -> str:
    turns = [turn for talk in talks for turn in talk.turns]
    n_new, recomputed = sum(t.n_new for t in turns), sum(t.recomputed for t in turns)
    shared = sum(t.reused.get("shared", 0) for t in turns)
    return (
        f"{len(turns)} turns of {len(talks)} conversations: {n_new} new tokens, "
        f"{recomputed} computed ({recomputed / n_new:.3f}), {shared} from shared tiers, "
        f"{sum(t.n_retries for t in turns)} requests sent again"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the router, or of one server")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    given = parser.parse_args()
    talks = [begun(number) for number in range(given.sessions)]
    asyncio.run(run(given.url, talks, given.turns, max_tokens=given.max_tokens, temperature=0))
    print(summary(talks))


if __name__ == "__main__":
    main()
