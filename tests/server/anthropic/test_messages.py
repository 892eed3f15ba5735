"""What is special to Anthropic's messages: sessions, breakpoints, usage, betas, scrubbing."""

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.server.anthropic.request import session_of
from keepwarm.server.anthropic.routes import CachedPrefix, usage_of
from keepwarm.text.request import Receipt

USER = [{"role": "user", "content": "What is the answer to the question?"}]
LONG = "The other dog sleeps under the tree while the quick fox jumps. " * 10
BREAKPOINT = {"cache_control": {"type": "ephemeral"}}
SESSION = "0f8b9c1e-1111-2222-3333-444455556666"


@pytest.fixture(scope="module")
def client(live):
    return live.anthropic()


def ask(client, messages=USER, **options):
    asked = {"model": "claude-any", "max_tokens": 8, "messages": messages, **options}
    return client.messages.create(**asked)


@pytest.mark.parametrize(
    ("user_id", "wanted"),
    [
        *((None, None), ("", None), ("me", "me"), ("17", "17")),
        ('{"device_id": "d", "session_id": "s-1"}', "s-1"),
        ('{"device_id": "d"}', '{"device_id": "d"}'),
        (f"user_ab_account__session_{SESSION}", SESSION),
    ],
)
def test_session_is_found_in_a_user_id(user_id, wanted):
    assert session_of(user_id) == wanted


# Usage


def receipt(prompt, cached):
    return Receipt(prompt, {"live": cached} if cached else {}, prompt - cached, 1.0)


@given(
    prompt=st.integers(1, 500),
    cached=st.integers(0, 500),
    kept=st.lists(
        st.builds(CachedPrefix, st.integers(0, 500), st.sampled_from([300.0, 3600.0])), max_size=4
    ),
)
def test_parts_of_a_prompt_add_up(prompt, cached, kept):
    cached = min(cached, prompt)
    kept = [mark._replace(n_tokens=min(mark.n_tokens, prompt)) for mark in kept]
    usage = usage_of(receipt(prompt, cached), kept)
    created = usage["cache_creation_input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + created == prompt
    assert sum(usage["cache_creation"].values()) == created
    assert created == max(0, max([k.n_tokens for k in kept], default=0) - cached)
    assert usage["cache_read_input_tokens"] == cached


def test_newly_kept_tokens_are_told_by_their_time():
    usage = usage_of(receipt(100, 10), [CachedPrefix(60, 300.0), CachedPrefix(40, 3600.0)])
    assert usage["input_tokens"] == 40
    assert usage["cache_creation"] == {
        "ephemeral_1h_input_tokens": 30,
        "ephemeral_5m_input_tokens": 20,
    }


def test_prompt_up_to_a_breakpoint_is_told_as_kept(client):
    """What is read, what is newly kept up to the last breakpoint, and the rest add up."""
    system = [{"type": "text", "text": f"Breakpoints. {LONG}", **BREAKPOINT}]
    usage = ask(client, system=system).usage
    alone = client.messages.count_tokens(model="x", messages=USER, system=system)
    kept = usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert kept > 100
    assert 0 < usage.input_tokens < 60
    assert usage.input_tokens + kept == alone.input_tokens
    again = ask(client, system=system).usage
    assert (again.input_tokens, again.cache_creation_input_tokens) == (1, 0)
    assert again.cache_read_input_tokens == alone.input_tokens - 1
    without = ask(client, system=f"None. {LONG}").usage
    assert without.cache_creation_input_tokens == 0
    assert without.input_tokens > 100


# Requests


def test_betas_and_a_budget_for_thinking_are_taken(client):
    """What bounds an answer, thoughts included, is max_tokens."""
    asked = {"model": "x", "max_tokens": 4, "messages": USER}
    answer = client.beta.messages.create(
        **asked,
        betas=["context-management-2025-06-27"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        output_config={"effort": "high"},
    )
    assert answer.usage.output_tokens <= 4


def test_tool_of_anthropics_servers_is_left_out_and_named(client):
    answer = ask(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert answer.model_extra["keepwarm"]["ignored_tools"] == ["web_search"]


def test_empty_beginning_of_an_answer_is_none(client):
    empty = [*USER, {"role": "assistant", "content": " "}]
    assert ask(client, empty).content == ask(client).content


def test_parts_of_a_prompt_that_are_moved_are_named(client):
    """Known blocks, and what is behind a `cache_control` mark; nothing where no tool is offered."""
    environment = "The user likes tea.\n<env>\n  Working directory: /a\n</env>"
    system = [
        {"type": "text", "text": "Be brief.", **BREAKPOINT},
        {"type": "text", "text": environment},
    ]
    tool = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
    moved = ask(client, system=system, tools=[tool]).model_extra["keepwarm"]
    assert moved["reordered"] == ["tools", "environment", "uncached"]
    assert "reordered" not in ask(client, system=system).model_extra["keepwarm"]


def test_scrubbing_is_switched_off_by_setting_and_by_header(serving):
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]

    def scrubbed(client, **options):
        answer = ask(client, system=system, max_tokens=1, **options)
        return answer.model_extra["keepwarm"]["scrubbed"]

    with serving(scrub="-billing-header") as live:
        client = live.anthropic()
        assert scrubbed(client) == []
        headers = {"X-Keepwarm-Scrub": "billing-header"}
        assert scrubbed(client, extra_headers=headers) == ["billing-header"]
        with pytest.raises(anthropic.BadRequestError, match="scrubbing rule"):
            scrubbed(client, extra_headers={"X-Keepwarm-Scrub": "everything"})
