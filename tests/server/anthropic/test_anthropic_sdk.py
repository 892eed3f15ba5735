"""Anthropic's messages as the official client sees them, on a real engine with a tiny model."""

import asyncio

import anthropic
import pytest

USER = [{"role": "user", "content": "What is the answer to the question?"}]
LONG = "The other dog sleeps under the tree while the quick fox jumps. " * 30
BREAKPOINT = {"cache_control": {"type": "ephemeral"}}


def connect(live, kind=anthropic.Anthropic, **options):
    return kind(base_url=live.url, max_retries=0, timeout=300, **{"api_key": "any", **options})


@pytest.fixture(scope="module")
def client(live):
    with connect(live) as client:
        yield client


def ask(client, messages=USER, **options):
    return client.messages.create(
        **{"model": "claude-any", "max_tokens": 8, "messages": messages, **options}
    )


def prompt_tokens(usage):
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(parts)


def test_asynchronously(live):
    async def both():
        async with connect(live, anthropic.AsyncAnthropic) as client:
            whole = await ask(client)
            async with client.messages.stream(model="x", max_tokens=8, messages=USER) as stream:
                return whole, await stream.get_final_message()

    whole, streamed = asyncio.run(both())
    assert [b.model_dump() for b in whole.content] == [
        b.model_dump(exclude={"parsed_output"}) for b in streamed.content
    ]


def test_the_beta_address_is_the_same(client):
    answer = client.beta.messages.create(
        model="x",
        max_tokens=4,
        messages=USER,
        betas=["context-management-2025-06-27"],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        output_config={"effort": "high"},
    )
    assert answer.usage.output_tokens <= 4


# Tools and formats.


def test_a_tool_of_anthropics_servers_is_left_out_and_named(client):
    answer = ask(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert answer.model_extra["keepwarm"]["ignored_tools"] == ["web_search"]


def test_a_stop_sequence_is_named(client):
    text = ask(client, max_tokens=12).content[0].text
    stop = text[2:4]
    answer = ask(client, max_tokens=12, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


# The cache.


def test_breakpoints_are_told_exactly(live):
    """What is read, what is newly kept up to the last breakpoint, and the rest add up."""
    with connect(live) as client:
        system = [{"type": "text", "text": f"Breakpoints. {LONG}", **BREAKPOINT}]
        first = ask(client, system=system)
        usage = first.usage
        alone = client.messages.count_tokens(model="x", messages=USER, system=system)
        assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens > 300
        assert 0 < usage.input_tokens < 60
        assert prompt_tokens(usage) == alone.input_tokens
        again = ask(client, system=system).usage
        assert (again.input_tokens, again.cache_creation_input_tokens) == (1, 0)
        assert again.cache_read_input_tokens == alone.input_tokens - 1


def test_without_breakpoints_nothing_is_told_as_newly_kept(client):
    usage = ask(client, system=f"None. {LONG}").usage
    assert usage.cache_creation_input_tokens == 0
    assert usage.input_tokens > 300


# What is wrong.


def test_switching_scrubbing_off_by_header_and_by_setting(serving):
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]

    def scrubbed(client, **options):
        answer = ask(client, system=system, max_tokens=1, **options)
        return answer.model_extra["keepwarm"]["scrubbed"]

    with serving(scrub="-billing-header") as live, connect(live) as client:
        assert scrubbed(client) == []
        headers = {"X-Keepwarm-Scrub": "billing-header"}
        assert scrubbed(client, extra_headers=headers) == ["billing-header"]
        with pytest.raises(anthropic.BadRequestError, match="scrubbing rule"):
            scrubbed(client, extra_headers={"X-Keepwarm-Scrub": "everything"})
