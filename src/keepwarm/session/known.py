"""What is known of a session's conversation: tokens behind which its new messages are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from keepwarm.engine.engine import Engine
from keepwarm.errors import UnknownAgent
from keepwarm.prefix.turn import KeptTurn
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import KnownHistory, Message, Request, Result


@dataclass(frozen=True)
class KnownConversation:
    """Nothing, for most sessions: then every request has all messages."""

    history: KnownHistory | None = None
    n_messages: int = 0  # of the session, that are in the history

    @classmethod
    def of_agent(cls, engine: Engine, options: Request) -> Self:
        """What the store has of a session's agent."""
        if not engine.store.knows_agent(str(options.agent)):
            return cls()
        try:
            request, _ = engine.resolve(replace(options, messages=(), continues=True))
        except UnknownAgent:  # of another model, or with other KV options
            return cls()
        return cls(request.history)

    def request(self, options: Request, system: str | None, messages: Sequence[Message]) -> Request:
        """A request that has all these messages, or only the new ones."""
        if self.history is None:
            first = [{"role": "system", "content": system}] if system else []
            return replace(options, messages=[*first, *messages])
        new = messages[self.n_messages :]
        return replace(options, messages=new, continues=True, history=self.history)

    def after(
        self, prepared: PreparedRequest | None, result: Result, messages: Sequence[Message]
    ) -> KnownConversation:
        """What is known after an answer, the last of the messages."""
        if self.history is None or prepared is None:
            return self
        (choice, *_), request, past = result.choices, prepared.request, self.history.turn
        turn = past and KeptTurn(
            [*past.messages, *messages[self.n_messages :]],
            *(request.tools, request.thinking, request.template_options),
            verbatim=choice.stop is None,
        )
        tokens = [*prepared.tokens, *(info.token for info in choice.tokens)]
        return KnownConversation(KnownHistory(tokens, turn), len(messages))
