"""During a long prefill, streams report progress, and the official clients skip it."""

import re
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from keepwarm import config
from tests.server.conftest import serve

TOKEN_S = 0.0007
WORDS = "The quick brown fox jumps over the lazy dog. " * 75
PROGRESS = re.compile(r'\{"prompt_tokens_done":(\d+),"prompt_tokens":(\d+)\}')


class Slowly:
    """A model that takes its time for every token of a prompt; all else is the model's."""

    def __init__(self, module, token_s=TOKEN_S):
        self._module = module
        self.token_s = token_s

    def __call__(self, tokens, *arguments, **options):
        if tokens.shape[1] > 1:
            time.sleep(self.token_s * tokens.size)
        return self._module(tokens, *arguments, **options)

    def __getattr__(self, name):
        return getattr(self._module, name)


class Overhearing:
    """Notes the bytes of every answer on their way to the client, by path."""

    def __init__(self, app, heard):
        self._app = app
        self._heard = heard

    async def __call__(self, scope, receive, send):
        async def noting(message):
            self._heard[scope.get("path")] += message.get("body", b"")
            await send(message)

        await self._app(scope, receive, noting)


@pytest.fixture(scope="module")
def heard():
    return defaultdict(bytes)


@pytest.fixture(scope="module")
def slow(served_model, tmp_path_factory, heard):
    settings = config.load({"KEEPWARM_HOME": str(tmp_path_factory.mktemp("slow"))})
    model = replace(served_model, module=Slowly(served_model.module))
    with serve(
        model, settings, around=lambda app: app.add_middleware(Overhearing, heard=heard)
    ) as live:
        yield live


def chat(url, prompt):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        return list(chunks)[-1].usage.prompt_tokens


def responses(url, prompt):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        events = client.responses.create(model="m", input=prompt, max_output_tokens=16, stream=True)
        return list(events)[-1].response.usage.input_tokens


def messages(url, prompt):
    import anthropic

    with (
        anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client,
        client.messages.stream(
            model="m", max_tokens=4, messages=[{"role": "user", "content": prompt}]
        ) as stream,
    ):
        usage = stream.get_final_message().usage
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


FRAMES = {  # how each API writes it, and a part of its first word
    "/v1/chat/completions": (chat, ": ", '"delta":{"content":'),
    "/v1/responses": (responses, "event: response.in_progress\n", "output_text.delta"),
    "/v1/messages": (messages, "event: ping\n", "content_block_delta"),
}


def test_stream_of_a_long_prompt_says_how_far_it_is_in_every_api(slow, heard):
    """All at once, so that they are slow together."""
    with ThreadPoolExecutor() as threads:
        asked = {
            path: threads.submit(ask, slow.url, f"{uuid.uuid4()} {WORDS}")
            for path, (ask, *_) in FRAMES.items()
        }
    for path, (_, begins, word) in FRAMES.items():
        before, _, after = heard[path].decode().partition(word)
        assert after
        signs = [frame for frame in before.split("\n\n") if PROGRESS.search(frame)]
        assert all(frame.startswith(begins) for frame in signs)
        told = [tuple(map(int, PROGRESS.search(frame).groups())) for frame in signs]
        n_tokens = asked[path].result()
        assert {total for _, total in told} == {n_tokens}
        done = [n for n, _ in told]
        assert done == sorted(done)
        assert 0 <= done[0] < done[-1] <= n_tokens
