"""A thinking model through the official clients: thoughts shown, sent back, turned off."""

import json

import anthropic
import mlx.core as mx
import openai
import pytest

from keepwarm import config
from tests.kit.checkpoints import make_config, make_tokenizer, make_weights, tokenizer_config
from tests.server.conftest import serve

# An answer begins inside of a thought, unless thinking is switched off; past thoughts are shown.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>' }}{% endif %}"
    "{% endif %}"
)
WORDS = "What is the answer to the question that the user asked?"
USER = {"role": "user", "content": WORDS}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    from keepwarm.models.load import load

    home = tmp_path_factory.mktemp("thinking")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    shape = make_config(tokenizer)
    mx.save_safetensors(str(home / "model.safetensors"), make_weights(shape), {"format": "mlx"})
    tokenizer.save(str(home / "tokenizer.json"))
    named = {"config": shape, "tokenizer_config": tokenizer_config() | {"chat_template": TEMPLATE}}
    for name, value in named.items():
        (home / f"{name}.json").write_text(json.dumps(value))
    settings = config.load({"KEEPWARM_HOME": str(home / "home")})
    with serve(load(str(home), settings), settings) as live:
        yield live


@pytest.fixture(scope="module")
def claude(live):
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(live):
    with live.openai() as client:
        yield client


def test_thinking_is_a_block_with_a_signature(claude):
    asked = {"model": "x", "max_tokens": 8, "messages": [USER]}
    whole = claude.messages.create(thinking={"type": "adaptive"}, **asked)
    thought = whole.content[0]
    assert (thought.type, bool(thought.thinking), bool(thought.signature)) == (
        "thinking",
        True,
        True,
    )
    assert whole.usage.output_tokens_details.thinking_tokens == whole.usage.output_tokens
    with claude.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_message().content[0] == thought
    assert {"thinking", "signature"} <= kinds


def test_thinking_can_be_switched_off(claude, gpt):
    told = {"type": "disabled"}
    asked = {"model": "x", "max_tokens": 8, "messages": [USER], "thinking": told}
    answer = claude.messages.create(**asked)
    assert [block.type for block in answer.content] == ["text"]
    other = gpt.responses.create(
        model="x", input=WORDS, max_output_tokens=8, reasoning={"effort": "none"}
    )
    assert other.output_text == answer.content[0].text


def test_thoughts_that_come_back_are_where_they_were(claude):
    """The second prompt goes on from the tokens of the first answer, its thoughts included."""
    asked = {"model": "x", "max_tokens": 8}
    first = claude.messages.create(messages=[USER], **asked)
    said = {"role": "assistant", "content": first.content}
    second = claude.messages.create(messages=[USER, said, USER], **asked).usage
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.cache_read_input_tokens >= before


def test_reasoning_is_an_item_that_comes_back(gpt):
    """As Codex does it: nothing is stored, the reasoning is sent back encoded."""
    asked = {"model": "x", "max_output_tokens": 8, "store": False}
    include = ["reasoning.encrypted_content"]
    first = gpt.responses.create(input=[USER], include=include, **asked)
    thought = first.output[0]
    assert (thought.type, thought.content[0].type) == ("reasoning", "reasoning_text")
    assert first.usage.output_tokens_details.reasoning_tokens == first.usage.output_tokens
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    counts = [
        gpt.responses.input_tokens.count(model="x", input=[USER, item, USER]).input_tokens
        for item in (sealed, thought)
    ]
    bare = gpt.responses.input_tokens.count(model="x", input=[USER, USER]).input_tokens
    assert counts[0] == counts[1] > bare


def test_reasoning_is_streamed(gpt):
    events = list(gpt.responses.create(model="x", input=WORDS, max_output_tokens=8, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert text
    assert isinstance(events[-1], openai.types.responses.ResponseIncompleteEvent)
    assert events[-1].response.output[0].content[0].text == text


def test_a_text_completion_has_one_place_for_thoughts_and_answer(live, gpt):
    """Whole and streamed alike: a thought that the model begins by itself is all there."""
    think = live.host.engine.model.tokenizer.convert_tokens_to_ids("<think>")
    asked = {"model": "x", "prompt": WORDS, "max_tokens": 8, "logit_bias": {str(think): 100}}
    whole = gpt.completions.create(**asked)
    assert whole.usage.completion_tokens_details.reasoning_tokens >= 7
    streamed = gpt.completions.create(stream=True, **asked)
    text = "".join(choice.text for chunk in streamed for choice in chunk.choices)
    assert whole.choices[0].text == text == "<think>" * 7


def test_a_thought_that_the_client_began_goes_on(gpt):
    """And an answer that it began is no thought, though the template would open one."""
    asked = {"model": "x", "max_tokens": 4, "extra_body": {"continue_final_message": True}}
    for content, is_thought in (("<think>I am", True), ("<think>No</think>It is", False)):
        messages = [USER, {"role": "assistant", "content": content}]
        message = gpt.chat.completions.create(**asked, messages=messages).choices[0].message
        assert bool((message.model_extra or {}).get("reasoning")) is is_thought
