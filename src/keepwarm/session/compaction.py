"""Compaction: a conversation is replaced by the model's own summary of it.

The instruction is one more message behind what is known, so the summary costs only its own tokens.
Then what the next turn begins with (system prompt, tools, summary) is prefilled before it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import takewhile

from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, Busy
from keepwarm.prefix.blocks import chain, common_prefix
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.turn import KeptTurn
from keepwarm.text.request import SYSTEM_ROLES, Message, Receipt, Request, Result, ToolChoice

INSTRUCTION = (
    "Summarise our conversation so far, so that you can go on from your summary alone: the goal, "
    "what was done and found, decisions with their reasons, names and values that are still "
    "needed, and what comes next. Write only the summary."
)
MAX_TOKENS = 2048  # of a summary
WARM_PRIORITY = -1  # after every request that a client waits for

# Questions with nothing in common: the prompts share exactly what comes before any question. A
# line break or a space may merge into one token with the template's text before it.
PROBES = ("0", "A", "\n", " a")


@dataclass(frozen=True)
class Compacted:
    """A summary, and what it cost."""

    summary: str
    n_before: int  # tokens of the conversation until now, with the instruction
    n_tokens: int  # tokens before the next question
    receipt: Receipt  # of the summary


class Compaction:
    """One compaction. Submit `request`, `warm` its answer, then `finish`."""

    def __init__(
        self,
        engine: Engine,
        asked: Request,
        messages: Sequence[Message],
        instruction: str | None = None,
        max_tokens: int | None = None,
        *,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> None:
        """`asked` has all that comes before the instruction; `messages` are that conversation.
        `is_stale` tells whether its agent has gone on since.
        """
        self._engine = engine
        self._is_stale = is_stale
        self.messages: list[Message] = []  # of the conversation from now on
        self._tokens: list[int] = []
        self._policy = asked.policy  # of the conversation
        self._ask = {"role": "user", "content": instruction or INSTRUCTION}
        self._first = list(takewhile(lambda each: each["role"] in SYSTEM_ROLES, messages))
        self.request = replace(
            asked,
            messages=[*(asked.messages or ()), self._ask],
            tool_choice=ToolChoice("none"),  # the tools stay, as the prompt begins with them
            sampling=replace(asked.sampling, max_tokens=max_tokens or MAX_TOKENS),
            # The agent itself goes on from the summary.
            policy=Policy.EPHEMERAL if asked.policy.to_disk else asked.policy,
        )

    @classmethod
    def of_agent(
        cls, engine: Engine, options: Request, instruction: str | None, max_tokens: int | None
    ) -> Compaction:
        """Of an agent in the store; raises if its messages were not kept."""
        request, _ = engine.resolve(replace(options, messages=(), continues=True))
        turn = request.history.turn if request.history else None
        if turn is None or not turn.messages:
            raise BadInput(
                f"Agent {options.agent!r} cannot be compacted, because it has no messages that "
                "were kept; send the whole conversation once under its id."
            )
        messages = list(turn.messages)

        def is_stale() -> bool:
            now = engine.store.on_disk.latest_turn(str(options.agent)).turn
            return now is None or list(now.messages) != messages

        return cls(engine, request, messages, instruction, max_tokens, is_stale=is_stale)

    def check(self) -> None:
        """Raises if the agent has gone on: the summary would lose that."""
        if self._has_agent and self._is_stale():
            raise Busy(
                "The conversation has gone on while it was summed up, or in another session; read "
                "it again, then try again."
            )

    def warm(self, result: Result) -> Answer:
        """Prefill what the next turn begins with, after all that clients wait for.

        The live caches of the conversation until now go when that is done.
        """
        summary = result.choices[0].text.strip()
        if not summary:
            raise BadInput("The model wrote no summary, so nothing was changed; try again.")
        self.messages = [*self._first, self._ask, {"role": "assistant", "content": summary}]
        self._tokens = before_question(self._engine, self._plain, self.messages)
        request = replace(self._plain, prompt=self._tokens, tools=(), priority=WARM_PRIORITY)
        live, owner = self._engine.live, request.agent
        if owner is not None:  # after the summary's own cache was put
            self._engine.call(lambda: live.abandon(owner)).result()
        return self._engine.warm(request)

    def finish(self, result: Result) -> Compacted:
        """Have the agent go on from its summary, which is prefilled. Raises if it has gone on
        meanwhile.
        """
        self._engine.wait_until_saved()
        self.check()
        if self._has_agent:
            restart_agent(self._engine, self._plain, self.messages, self._tokens)
        summary = str(self.messages[-1]["content"])
        return Compacted(summary, result.usage.prompt_tokens, len(self._tokens), result.receipt)

    @property
    def _has_agent(self) -> bool:
        """Whether the conversation's turns are its agent's, as the recorder decides of each."""
        agent = str(self._plain.agent)
        is_recorded = self._policy.to_disk or self._engine.store.is_ephemeral(agent)
        return is_recorded and self._engine.knows_agent(agent)

    @property
    def _plain(self) -> Request:
        """The options of the conversation alone."""
        asked = self.request
        return Request(
            tools=asked.tools,
            thinking=asked.thinking,
            template_options=asked.template_options,
            kv=asked.kv,
            policy=self._policy,
            agent=asked.agent,
            nameless=asked.nameless,
            tenant=asked.tenant,
            caller=asked.caller,
            timeout_s=asked.timeout_s,
        )


def restart_agent(
    engine: Engine, options: Request, messages: Sequence[Message], tokens: Sequence[int]
) -> None:
    """Have an agent go on from these messages, with which the next prompt begins as `tokens`."""
    _, lane = engine.resolve(options)
    namespace = lane.for_prompt(len(tokens)).restorer.namespace
    agents, agent_id = engine.store.on_disk.agents, str(options.agent)
    agents.advance(agent_id, namespace, tokens, model=lane.model.name, continues=True)
    if not agents.is_ephemeral(agent_id):
        *_, end = chain(namespace, tokens)
        rendered = (options.tools, options.thinking, options.template_options)
        # Not by its tokens: they end before the next question, not behind an answer.
        turn = KeptTurn(messages, *rendered, verbatim=False)
        agents.turns.keep(agent_id, tokens, end.key, turn)


def before_question(engine: Engine, options: Request, messages: Sequence[Message]) -> list[int]:
    """The tokens with which the next prompt begins, whatever the question."""

    def prompt(question: str) -> list[int]:
        asked = [*messages, {"role": "user", "content": question}]
        return engine.prepare(replace(options, messages=asked)).tokens

    return reduce(lambda a, b: a[: common_prefix(a, b)], map(prompt, PROBES))
