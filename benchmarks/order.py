"""`python -m benchmarks.order MODEL`: whether a model loses by reading stable text first.

The same questions are asked in both orders, and the log-likelihood of the right answer is compared,
pair by pair. The setting `stable_first = all` is for models that lose nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx

import keepwarm
from keepwarm import config
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Message, Request

FOLDERS = ("garden", "harbour", "kitchen", "library", "orchard", "station", "theatre", "workshop")
BRANCHES = ("main", "spring", "fix-gate", "release", "draft", "tidy", "north", "v2")
MOST_LOSS = 0.01  # nats per token of an answer
RULES = """\
You are an agent that helps with the files of one project. Answer in one short sentence.
When you are asked for the password, say exactly: I do not give passwords.

# Environment
You have been invoked in the following environment:
 - Primary working directory: /home/ada/{folder}
 - Platform: linux

Use the tools to look at files, and do not guess what is in them.

gitStatus: This is the git status at the start of the conversation.
Current branch: {branch}
"""


class Question(NamedTuple):
    kind: str
    messages: Sequence[Message]
    answer: Message


class Pair(NamedTuple):
    """The log-likelihood of one answer in both orders, in nats per token."""

    kind: str
    as_sent: float
    stable_first: float

    @property
    def loss(self) -> float:
        return self.as_sent - self.stable_first


class Loss(NamedTuple):
    mean: float
    error: float  # its standard error

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Loss:
        losses = [pair.loss for pair in pairs]
        return cls(statistics.fmean(losses), statistics.stdev(losses) / math.sqrt(len(losses)))

    @property
    def is_none(self) -> bool:
        return self.mean + 2 * self.error < MOST_LOSS


def main() -> int:
    given = _arguments()
    model = keepwarm.load(given.model)
    pairs = compare(model)
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        sys.stdout.write(_line(kind, [pair for pair in pairs if pair.kind == kind]))
    sys.stdout.write(_line("all", pairs))
    sys.stdout.write("no loss\n" if Loss.of(pairs).is_none else "a loss cannot be ruled out\n")
    return 0 if Loss.of(pairs).is_none else 1


def compare(model: Any, n_projects: int = len(FOLDERS)) -> list[Pair]:
    """Every question of some projects in both orders; raises where the order cannot be changed."""
    before, after = (Prompter(model.tokenizer, stable_first=each) for each in ("off", "all"))
    pairs = []
    for question in _questions(n_projects):
        request = Request(messages=question.messages, tools=TOOLS)
        if not after.render(request).reordered:
            raise SystemExit(
                "The model's template takes no second system message behind the tools."
            )
        found = (_likelihood(model, each, request, question.answer) for each in (before, after))
        pairs.append(Pair(question.kind, *found))
    return pairs


def _likelihood(model: Any, prompter: Prompter, request: Request, answer: Message) -> float:
    asked = prompter.render(request).tokens
    messages = [*(request.messages or ()), answer]
    whole = prompter.render(replace(request, messages=messages))
    tokens = whole.tokens[: whole.end_of(len(messages) - 1)]
    if tokens[: len(asked)] != asked:
        raise SystemExit("The model's template writes an answer elsewhere than it asks for it.")
    logits = model.module(mx.array([tokens]))[0, len(asked) - 1 : -1].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(tokens[len(asked) :])[:, None], axis=-1)[:, 0]
    return float(mx.mean(chosen - mx.logsumexp(logits, axis=-1)))


def _questions(n_projects: int) -> Iterator[Question]:
    for at in range(n_projects):
        folder, branch = FOLDERS[at % len(FOLDERS)], BRANCHES[at * 3 % len(BRANCHES)]
        system = {"role": "system", "content": RULES.format(folder=folder, branch=branch)}
        path = f"/home/ada/{folder}/notes.txt"
        call = {"name": "read_file", "arguments": json.dumps({"path": path})}
        calls = [{"id": "call00001", "type": "function", "function": call}]
        asked: dict[str, tuple[str, Message]] = {
            "directory": ("Which directory are you in?", _said(f"I am in /home/ada/{folder}.")),
            "branch": ("Which branch is checked out?", _said(f"The branch is {branch}.")),
            "rule": ("What is the password?", _said("I do not give passwords.")),
            "call": (
                "Read notes.txt, please.",
                {"role": "assistant", "content": "", "tool_calls": calls},
            ),
        }
        for kind, (text, answer) in asked.items():
            yield Question(kind, [system, {"role": "user", "content": text}], answer)


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    described = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [*properties]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("read_file", "Read a file.", path="The absolute path."),
    _tool("list_files", "List the files in a directory.", path="The absolute path."),
    _tool("run", "Run a command in the working directory.", command="The command."),
    _tool("write_file", "Write a file.", path="The absolute path.", text="What to write."),
]


def _line(kind: str, pairs: Sequence[Pair]) -> str:
    loss = Loss.of(pairs)
    as_sent, first = (
        statistics.fmean(values) for values in zip(*(pair[1:] for pair in pairs), strict=True)
    )
    return (
        f"{kind:10} {len(pairs):3} answers: {as_sent:8.3f} as sent, {first:8.3f} stable first, "
        f"loss {loss.mean:+.4f} ± {loss.error:.4f} nats per token\n"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.order")
    parser.add_argument("model", nargs="?", default=config.load().model)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
