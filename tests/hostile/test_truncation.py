"""A conversation of thousands of turns is shortened in little memory, with few renderings, and
never on the event loop."""

import asyncio
import threading
import tracemalloc
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace

from starlette.requests import Request as HttpRequest

from keepwarm.config import Settings
from keepwarm.errors import ContextTooLong
from keepwarm.server.http.permits import PrepareSlot, prepare_threads
from keepwarm.server.models.calls import ApiCall
from keepwarm.server.models.truncation import submit_shortened, truncate
from keepwarm.server.responses.request import InputRequest, Item
from keepwarm.server.responses.routes import prepare_response
from keepwarm.text.request import Request
from keepwarm.text.sandbox.deadline import PrepareDeadline

N_ITEMS = 10_000
N_CONTEXT = 400


def conversation(n_items):
    roles = ("user", "assistant")
    return [Item(type="message", role=roles[n % 2], content="hi") for n in range(n_items)]


def test_truncating_takes_memory_in_proportion_to_the_conversation():
    items = conversation(N_ITEMS)
    tracemalloc.start()
    try:
        kept = truncate(items, len, N_CONTEXT, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < len(kept) < N_CONTEXT
    assert peak < 100 * N_ITEMS  # with all shortened lists at once it was 200 MB


def test_truncating_renders_no_more_than_ten_prompts():
    sizes = []

    def count(some):
        sizes.append(len(some))
        return len(some)

    for n_context in (N_CONTEXT, N_ITEMS - 10):  # few turns fit, or nearly all
        sizes.clear()
        kept = truncate(conversation(N_ITEMS), count, n_context, None)
        assert n_context / 2 < len(kept) < n_context
        assert len(sizes) <= 10
        assert len(set(sizes)) > 5  # they were tried


class Watched:
    """Builds requests, and notes on which threads."""

    def __init__(self):
        self.threads = set()

    def build(self, items):
        self.threads.add(threading.get_ident())
        return Request(messages=[{"role": each.role, "content": "hi"} for each in items])


class ShortHost:
    """A model whose context takes few messages."""

    def __init__(self):
        model = SimpleNamespace(n_context=N_CONTEXT)
        counted = lambda request, deadline: len(request.messages)  # noqa: E731
        self.engine = SimpleNamespace(model=model, count_tokens=counted)

    async def submit(self, request, slot):
        if len(request.messages) > N_CONTEXT:
            raise ContextTooLong("too long", len(request.messages), N_CONTEXT)
        return request


@contextmanager
def slot_of_a_short_body():
    with prepare_threads() as threads:
        permit = SimpleNamespace(working=nullcontext)
        watcher = SimpleNamespace(cancel=lambda: None)
        yield PrepareSlot(PrepareDeadline(60), threads, permit, permit, watcher, is_long=False)


def test_a_short_body_shortens_a_long_history_off_the_event_loop():
    watched, items = Watched(), conversation(1000)

    async def ask(slot):
        request = Request(messages=[{"role": "user", "content": "hi"}] * len(items))
        return await submit_shortened(ShortHost(), slot, request, watched.build, items)

    with slot_of_a_short_body() as slot:
        request, n_dropped = asyncio.run(ask(slot))
    assert len(request.messages) == len(items) - n_dropped <= N_CONTEXT
    assert watched.threads
    assert threading.get_ident() not in watched.threads


def test_a_short_body_builds_the_items_of_a_long_history_off_the_event_loop():
    """As `previous_response_id` brings them."""
    watched, items = Watched(), conversation(1000)

    class Call(SimpleNamespace):
        async def host(self, _model):
            return ShortHost()

        def fields(self, *_):
            watched.threads.add(threading.get_ident())
            raise InterruptedError

    class Answers:
        async def conversation(self, _body):
            return items

    async def ask(slot):
        body = InputRequest(input="hi", previous_response_id="resp_1")
        await prepare_response(body, Call(slot=slot), Answers())

    with slot_of_a_short_body() as slot, suppress(InterruptedError):
        asyncio.run(ask(slot))
    assert watched.threads
    assert threading.get_ident() not in watched.threads


def test_the_fields_of_a_body_are_looked_through_once(tmp_path):
    """However often its items are built: those that are ignored are sought in all of them."""
    state = SimpleNamespace(settings=Settings(tmp_path, tmp_path), models=None)
    scope = {"type": "http", "headers": [], "path_params": {}, "app": SimpleNamespace(state=state)}
    call = ApiCall(HttpRequest(scope | {"state": {"slot": None}}))
    body = InputRequest(input="hi")
    given = call.fields(body)
    assert call.fields(body) is given
