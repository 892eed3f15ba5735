"""Messages to tokens: tokenised whole, cut where another conversation may part from this one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from keepwarm.engine.prompt import common_prefix, render, tokenize
from keepwarm.errors import BadInput
from tests.kit.checkpoints import CHATML, EOS, write_checkpoint

TALK = [
    {"role": "system", "content": "Answer the question."},
    {"role": "user", "content": "What is the quick brown fox?"},
    {"role": "assistant", "content": "A dog 🦊."},
    {"role": "user", "content": "And the lazy one?"},
]


@pytest.fixture
def with_template(tmp_path):
    """A function: the tiny tokenizer with another chat template, or with none."""

    def make(template: str | None):
        config = write_checkpoint(tmp_path / "model") / "tokenizer_config.json"
        settings = {**json.loads(config.read_text()), "chat_template": template}
        config.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
        return load_tokenizer(config.parent)

    return make


def test_the_model_template_renders_the_messages(with_template):
    tokenizer = with_template(CHATML)
    text = tokenizer.decode(render(tokenizer, TALK[:2]).tokens)
    assert text == (
        "<|im_start|>system\nAnswer the question.<|im_end|>\n"
        "<|im_start|>user\nWhat is the quick brown fox?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    closed = tokenizer.decode(render(tokenizer, TALK[:2], add_generation_prompt=False).tokens)
    assert text == closed + "<|im_start|>assistant\n"


def test_tokens_are_plain_ints_of_the_whole_text(with_template):
    tokenizer = with_template(CHATML)
    tokens = render(tokenizer, TALK).tokens
    assert tokens == tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False)
    assert all(type(token) is int for token in tokens)


def test_cuts_stand_at_the_end_of_each_message(with_template):
    tokenizer = with_template(CHATML)
    prompt = render(tokenizer, TALK)
    parts = [tokenize(tokenizer, TALK[:n], add_generation_prompt=False) for n in (1, 2, 3, 4)]
    assert prompt.cuts == [len(part) for part in parts]
    assert all(prompt.tokens[:cut] == part for cut, part in zip(prompt.cuts, parts, strict=True))


words = st.lists(st.sampled_from(["the", " qu", "ick", "\n", "🦊", " ", EOS, "1984"]), max_size=5)
talks = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": words.map("".join)}
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] if loop.last else '<|im_start|>' }}{% endfor %}!",
    ],
)
def test_a_cut_is_the_common_token_prefix(with_template, template):
    """Whatever is said, special tokens included: the quick way gives what the plain one gives."""
    tokenizer = with_template(template)

    @settings(deadline=None, derandomize=True, database=None)
    @given(messages=talks)
    def check(messages):
        prompt = render(tokenizer, messages)
        ends = range(1, len(messages) + 1)
        parts = [tokenize(tokenizer, messages[:n], add_generation_prompt=False) for n in ends]
        assert prompt.tokens == tokenize(tokenizer, messages)
        assert prompt.cuts == sorted({common_prefix(prompt.tokens, part) for part in parts} - {0})

    check()


def test_a_conversation_that_goes_on_otherwise_shares_the_cut(with_template):
    tokenizer = with_template(CHATML)
    other = [*TALK[:3], {"role": "user", "content": "Something else."}]
    ours, theirs = render(tokenizer, TALK), render(tokenizer, other)
    assert common_prefix(ours.tokens, theirs.tokens) >= ours.cuts[2] == theirs.cuts[2]


def test_a_cut_moves_back_where_tokens_merge_across_messages(with_template):
    """Without separators "while th" + "e" reads as other tokens than its parts."""
    tokenizer = with_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    messages = [{"role": "user", "content": "while th"}, {"role": "user", "content": "e"}]
    prompt = render(tokenizer, messages)
    part = tokenize(tokenizer, messages[:1], add_generation_prompt=False)
    assert prompt.tokens == tokenizer.encode("while the", add_special_tokens=False)
    assert prompt.tokens[: len(part)] != part
    assert prompt.cuts == [common_prefix(prompt.tokens, part), len(prompt.tokens)]


def test_a_template_that_rewrites_earlier_turns_cuts_before_them(with_template):
    """Thinking templates drop earlier answers' thoughts: only what stays the same is a prefix."""
    shown = "{{ m['content'] if loop.last or m['role'] != 'assistant' else '(gone)' }}"
    tokenizer = with_template("{% for m in messages %}|" + shown + "{% endfor %}")
    prompt = render(tokenizer, TALK)
    answered = tokenize(tokenizer, TALK[:3], add_generation_prompt=False)
    assert prompt.cuts[1] <= prompt.cuts[2] < len(answered)


def test_a_template_that_refuses_a_short_conversation_gives_no_cut_there(with_template):
    guard = "{% if messages | length < 2 %}{{ raise_exception('no user') }}{% endif %}"
    tokenizer = with_template(guard + CHATML)
    assert len(render(tokenizer, TALK).cuts) == len(TALK) - 1
    with pytest.raises(BadInput, match=r"chat template refuses .*no user"):
        render(tokenizer, TALK[:1])


def test_tools_reach_the_template(with_template):
    tokenizer = with_template("{{ tools[0]['function']['name'] if tools else 'none' }}")
    tool = {"type": "function", "function": {"name": "search"}}
    assert tokenizer.decode(render(tokenizer, TALK, tools=[tool]).tokens) == "search"
    assert tokenizer.decode(render(tokenizer, TALK).tokens) == "none"


def test_a_model_without_a_template_reads_the_contents(with_template):
    tokenizer = with_template(None)
    assert tokenizer.decode(render(tokenizer, TALK[1:2]).tokens) == TALK[1]["content"]
    whole = render(tokenizer, TALK)
    assert tokenizer.decode(whole.tokens) == "\n\n".join(m["content"] for m in TALK)
    assert len(whole.cuts) == len(TALK)


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2)],
)
def test_common_prefix(a, b, n):
    assert common_prefix(a, b) == common_prefix(b, a) == n
