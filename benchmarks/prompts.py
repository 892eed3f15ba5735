"""`python -m benchmarks.prompts`: what preparing the next turn of a long conversation costs.

Every turn is prepared twice in turn, so that a busy machine slows down both: tokenised whole, and
only where it is new. First in this process, by processor time; then in a fork, as the server
prepares long prompts, by the clock. The tokens are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from mlx_lm.tokenizer_utils import load as load_tokenizer

from keepwarm import config
from keepwarm.models.catalog import locate
from keepwarm.prefix.policy import Policy
from keepwarm.text.bounds.deadline import PrepareDeadline
from keepwarm.text.bounds.isolation import BenchRecipe, Isolation
from keepwarm.text.past_answers import Splicer, encode
from keepwarm.text.prompt import Prompter
from keepwarm.text.rendering.cutting import Cutter
from keepwarm.text.rendering.pieces import KnownPieces, PieceEncoder, PieceOwner
from keepwarm.text.rendering.tokenised import tokenise
from keepwarm.text.request import Message, Request
from keepwarm.text.template import Template, write
from keepwarm.text.tools import tool_format

SOURCE = Path(__file__).parent  # the texts are code and prose, as in an agent's conversation
QUESTION, ANSWER = 1_500, 500  # characters


class Costs(NamedTuple):
    """Milliseconds."""

    whole: float
    new: float


def talk(n_characters: int, dice: np.random.Generator) -> list[Message]:
    """Questions and answers of about this length in all, a question last."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.glob("*.py")))

    def some(n: int) -> str:
        start = int(dice.integers(len(text) - n))
        return text[start : start + n]

    n_turns = max(1, n_characters // (QUESTION + ANSWER))
    asked = [{"role": "user", "content": some(QUESTION)} for _ in range(n_turns + 1)]
    said = [{"role": "assistant", "content": some(ANSWER)} for _ in range(n_turns)]
    pairs = zip(asked, said, strict=False)
    return [*(message for pair in pairs for message in pair), asked[-1]]


def compare(
    whole: Callable[[], Sequence[int]],
    new: Callable[[], Sequence[int]],
    clock: Callable[[], float] = time.process_time,
) -> Costs:
    """The same tokens in two ways."""
    (first, first_ms), (second, second_ms) = _timed(whole, clock), _timed(new, clock)
    assert list(first) == list(second), "the tokens differ"
    return Costs(first_ms, second_ms)


def _timed(work: Callable[[], Any], clock: Callable[[], float]) -> tuple[Any, float]:
    began = clock()
    return work(), (clock() - began) * 1e3


class Turns:
    """One conversation, prepared in all the ways that are compared."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = Template.of(tokenizer)
        splicer, known = Splicer(tokenizer, template), KnownPieces()
        cutter = Cutter.of(tokenizer, [tokenizer.chat_template])
        owner = PieceOwner("", is_masked=False)
        by_itself = partial(PieceEncoder, partial(encode, tokenizer), cutter)
        self._whole = by_itself(None, owner, keeps=False)
        self._new = by_itself(KnownPieces(), owner, keeps=True)
        self._prompter = Prompter(tokenizer, template, splicer, known=KnownPieces())
        calls = tool_format(tokenizer, template).markers
        recipe = BenchRecipe(tokenizer, template, calls, True, len(tokenizer), ())
        isolation = Isolation.of(recipe, splicer, known)
        assert isolation is not None
        self.isolation = isolation

    def rendering(self, messages: Sequence[Message]) -> float:
        return _timed(lambda: write(self._tokenizer, messages), time.process_time)[1]

    def tokenising(self, messages: Sequence[Message]) -> Costs:
        text = write(self._tokenizer, messages)

        def tokens(way: PieceEncoder) -> Sequence[int]:
            return tokenise(self._tokenizer, way.all, text).tokens

        return compare(lambda: tokens(self._whole), lambda: tokens(self._new))

    def here(self, messages: Sequence[Message]) -> Costs:
        """Masking, rendering and tokenising."""
        return self._compared(lambda request: self._prompter.render(request).tokens, messages)

    def in_a_fork(self, messages: Sequence[Message]) -> Costs:
        def render(request: Request) -> Sequence[int]:
            deadline = PrepareDeadline()
            return self.isolation.render(request, None, None, deadline, wants_cuts=False).tokens

        return self._compared(render, messages, time.perf_counter)

    def _compared(
        self,
        render: Callable[[Request], Sequence[int]],
        messages: Sequence[Message],
        clock: Callable[[], float] = time.process_time,
    ) -> Costs:
        request, all_new = (
            Request(messages=messages, policy=policy)
            for policy in (Policy.READ_WRITE, Policy.NO_STORE)
        )
        return compare(lambda: render(all_new), lambda: render(request), clock)

    def measure(self, messages: Sequence[Message]) -> dict[str, Costs]:
        return {
            "tokenising": self.tokenising(messages),
            "rendering and tokenising": self.here(messages),
            "the same in a fork, by the clock": self.in_a_fork(messages),
        }


def main(
    model: Annotated[str, typer.Option(help="Its tokenizer is used.")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=1_000, help="Of the conversation, about.")] = 100_000,
    turns: Annotated[int, typer.Option(min=2, help="Each a question and an answer more.")] = 9,
) -> None:
    """Compare tokenising a conversation whole and only where it is new."""
    tokenizer = load_tokenizer(locate(model, config.load()))
    sample = talk(50_000, np.random.default_rng(1))
    per_token = 50_000 / len(encode(tokenizer, write(tokenizer, sample)))
    messages = talk(int(tokens * per_token), np.random.default_rng(0))
    parts = [messages[: len(messages) - 2 * n_more] for n_more in range(turns, -1, -1)]
    prepared = Turns(tokenizer)
    try:
        prepared.in_a_fork(messages[:1])  # starts the process
        costs = [prepared.measure(part) for part in parts]
        rendering = median(prepared.rendering(messages) for _ in range(turns))
    finally:
        prepared.isolation.close()
    n_tokens = len(encode(tokenizer, write(tokenizer, messages)))
    n_new = len(encode(tokenizer, write(tokenizer, messages[-2:])))
    typer.echo(f"{model}: {n_tokens:,} tokens, {len(messages)} messages, {n_new} new tokens a turn")
    typer.echo("ms of processor time, medians\n")
    show("the first turn, nothing is known", costs[:1])
    show(f"{turns} turns that continue it", costs[1:])
    typer.echo(f"rendering, which is in all but the first row of each: {rendering:.1f} ms")


def show(title: str, costs: Sequence[dict[str, Costs]]) -> None:
    typer.echo(f"{title:36}{'whole':>9}{'new':>9}{'ratio':>9}")
    for name in costs[0]:
        whole, new = (median(times) for times in zip(*(c[name] for c in costs), strict=True))
        typer.echo(f"  {name:34}{whole:9.1f}{new:9.1f}{new / whole:9.3f}")
    typer.echo()


if __name__ == "__main__":
    typer.run(main)
