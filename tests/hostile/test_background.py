"""Responses in the background hold no more events than their key may."""

import asyncio

from keepwarm.server.responses import background
from keepwarm.server.responses.background import BackgroundResponses
from keepwarm.text.detokenize import Piece
from keepwarm.text.request import Delta, Finished, Started, TokenInfo
from tests.server.responses.test_background import RECEIPT, Words, running, until


def test_events_of_one_key_take_no_more_than_its_bytes(monkeypatch):
    """The response fails, and what it took is free again; another key's goes on."""
    monkeypatch.setattr(background, "MAX_OWN_BYTES", 20_000)

    async def scenario():
        budget, saved = BackgroundResponses().budget, []
        mine, theirs = Words(), Words()
        attack = running(mine, budget, "mine", saved)
        other = running(theirs, budget, "theirs", saved)
        for answer in (mine, theirs):
            answer.pieces.put_nowait(Started(RECEIPT))
        theirs.pieces.put_nowait(Delta(0, "fox"))
        for _ in range(100):
            mine.pieces.put_nowait(Delta(0, "x" * 1000))
        await asyncio.wait({attack.task}, timeout=60)
        assert mine.is_cancelled
        assert [each["status"] for each in saved] == ["failed"]
        assert "fewer top_logprobs" in attack.response["error"]["message"]
        await until(lambda: 0 < budget.n_used < 4_000)
        assert not other.task.done()
        other.task.cancel()

    asyncio.run(scenario())


def test_events_of_one_that_has_ended_are_freed_when_nobody_follows():
    async def scenario():
        budget, words, saved = BackgroundResponses().budget, Words(), []
        ending = running(words, budget, "mine", saved)
        words.pieces.put_nowait(Started(RECEIPT))
        words.pieces.put_nowait(Delta(0, "fox"))
        slow = ending.follow()
        first = await anext(slow)
        words.pieces.put_nowait(None)
        await until(ending.task.done)
        assert budget.n_used > 0
        rest = [each async for each in slow]
        assert b"response.created" in first
        assert b"fox" in b"".join(rest)
        assert budget.n_used == 0
        late = [each async for each in ending.follow(1_000)]
        assert b'"sequence_number":1001' in b"".join(late)

    asyncio.run(scenario())


class NeverShown:
    """Pieces of tokens that no JSON can be made of."""

    def of(self, token):
        return Piece(object(), [])

    def shown(self, tokens):
        return tokens


def test_events_that_nobody_follows_are_never_made_into_json():
    """At the end of a long answer with log-probabilities that takes a second of the event loop."""

    async def scenario():
        words, saved = Words(), []
        budget = BackgroundResponses().budget
        unread = running(words, budget, "mine", saved, pieces=NeverShown())
        for event in (Started(RECEIPT), Delta(0, "fox", tokens=(TokenInfo(7),))):
            words.pieces.put_nowait(event)
        words.pieces.put_nowait(Finished(0, "stop"))
        words.pieces.put_nowait(None)
        await asyncio.wait({unread.task}, timeout=60)
        assert unread.task.exception() is None
        assert not saved  # as it does what fails
        assert unread.response["output"][0]["content"][0]["text"] == "fox"

    asyncio.run(scenario())
