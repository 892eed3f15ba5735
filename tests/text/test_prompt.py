"""Messages to tokens: tokenised whole, cut where other conversations may diverge."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import common_prefix
from keepwarm.text.past_answers import encode
from keepwarm.text.prompt import TOOLS, Prompter
from keepwarm.text.request import Breakpoint, Request
from keepwarm.text.template import write
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
        changes = {"chat_template": template, "tool_parser_type": "json_tools"}
        settings = {**json.loads(config.read_text()), **changes}
        config.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
        return load_tokenizer(config.parent)

    return make


def render(tokenizer, messages, **wishes):
    return Prompter(tokenizer).render(Request(messages=messages, **wishes))


def plainly(tokenizer, messages, add_generation_prompt=False):
    """The tokens of a conversation, rendered and tokenised in one piece."""
    return encode(tokenizer, write(tokenizer, messages, None, add_generation_prompt))


def test_messages_are_rendered_by_the_template_and_tokenised_whole(with_template):
    tokenizer = with_template(CHATML)
    prompt = render(tokenizer, TALK[:2])
    assert prompt.text == tokenizer.decode(prompt.tokens)
    assert prompt.text == (
        "<|im_start|>system\nAnswer the question.<|im_end|>\n"
        "<|im_start|>user\nWhat is the quick brown fox?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt.tokens == plainly(tokenizer, TALK[:2], add_generation_prompt=True)
    assert (prompt.spliced, prompt.generation_prompt) == (0, "<|im_start|>assistant\n")


def said(role: str, *more: str):
    parts = st.sampled_from(["the", " qu", "ick", "\n", "🦊", " ", "1984", *more])
    content = st.lists(parts, max_size=5).map("".join)
    return st.fixed_dictionaries({"role": st.just(role), "content": content})


# Special tokens of a user are not parsed: test_special_tokens.py.
talks = st.lists(st.one_of(said("user"), said("assistant", EOS)), min_size=1, max_size=5)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] if loop.last else '<|im_start|>' }}{% endfor %}!",
    ],
)
def test_a_cut_is_the_common_token_prefix(with_template, template, monkeypatch):
    """For any text, special tokens included, the fast way gives the same as the simple one."""
    # Collecting garbage late in a long run takes more than the time that there is.
    monkeypatch.setattr("keepwarm.text.prompt.CUTS_TIMEOUT_S", 1000.0)
    tokenizer = with_template(template)
    prompter = Prompter(tokenizer)

    @settings(deadline=None, derandomize=True, database=None, max_examples=25)
    @given(messages=talks)
    def check(messages):
        prompt = prompter.render(Request(messages=messages))
        talks = [prompter.template.conform(messages[: n + 1]) for n in range(len(messages))]
        parts = [plainly(tokenizer, talk) for talk in talks]
        assert prompt.tokens == plainly(tokenizer, talks[-1], add_generation_prompt=True)
        assert prompt.cuts == sorted({common_prefix(prompt.tokens, part) for part in parts} - {0})

    check()


def test_a_cut_moves_back_where_tokens_merge_across_messages(with_template):
    """Without separators "while th" + "e" has other tokens than its parts."""
    tokenizer = with_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    messages = [{"role": "user", "content": "while th"}, {"role": "user", "content": "e"}]
    prompt = render(tokenizer, messages)
    part = plainly(tokenizer, messages[:1])
    assert prompt.tokens == tokenizer.encode("while the", add_special_tokens=False)
    assert prompt.tokens[: len(part)] != part
    assert prompt.cuts == [common_prefix(prompt.tokens, part), len(prompt.tokens)]


def test_a_template_that_rewrites_earlier_turns_cuts_before_them(with_template):
    """Some templates drop the reasoning of earlier answers: the prefix ends before it."""
    shown = "{{ m['content'] if loop.last or m['role'] != 'assistant' else '(gone)' }}"
    tokenizer = with_template("{% for m in messages %}|" + shown + "{% endfor %}")
    prompt = render(tokenizer, TALK)
    answered = plainly(tokenizer, TALK[:3])
    assert prompt.cuts[1] <= prompt.cuts[2] < len(answered)


def test_a_message_that_the_template_refuses_to_end_with_has_no_end_of_its_own(with_template):
    guard = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = with_template(guard + CHATML)
    rendering = render(tokenizer, TALK)
    assert rendering.end_of(2) is None
    assert len(rendering.cuts) == 3
    assert rendering.message_at(rendering.end_of(1)) == 3
    assert rendering.message_at(rendering.end_of(1) - 1) == 1
    with pytest.raises(BadInput, match=r"chat template refuses .*no"):
        render(tokenizer, TALK[:3])


def test_a_model_without_a_template_reads_the_contents(with_template):
    tokenizer = with_template(None)
    assert tokenizer.decode(render(tokenizer, TALK[1:2]).tokens) == TALK[1]["content"]
    whole = render(tokenizer, TALK)
    assert tokenizer.decode(whole.tokens) == "\n\n".join(m["content"] for m in TALK)
    assert len(whole.cuts) == len(TALK)


SEARCH = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}
WITH_TOOLS = "{% if tools %}{{ '<|im_start|>' + (tools | tojson) + '\n' }}{% endif %}" + CHATML
LONG = [
    {"role": "assistant" if i % 2 else "user", "content": f"{i}: the quick brown fox. " * 36}
    for i in range(200)
]


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.n_characters = 0

    def encode(self, text, **options):
        self.n_characters += len(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_every_message_has_a_known_end(with_template):
    tokenizer = with_template(CHATML)
    rendering = Prompter(tokenizer).render(Request(messages=TALK))
    ends = [rendering.end_of(message) for message in range(len(TALK))]
    assert ends == rendering.cuts == [len(plainly(tokenizer, TALK[: n + 1])) for n in range(4)]
    for message, end in enumerate(ends):
        assert rendering.message_at(end - 1) == message
    assert rendering.message_at(0) == 0
    assert rendering.message_at(ends[-1]) is None


def test_a_breakpoint_is_among_the_cuts_wherever_it_is(with_template):
    prompter = Prompter(with_template(CHATML))
    plain = prompter.render(Request(messages=LONG))
    cuts = plain.cuts
    assert plain.end_of(77) not in cuts
    kept = prompter.render(Request(messages=LONG, breakpoints=[Breakpoint(77)]))
    assert kept.end_of(77) in kept.cuts
    for wrong in (-2, len(LONG)):
        with pytest.raises(BadInput, match=f"no message {wrong}"):
            prompter.render(Request(messages=LONG, breakpoints=[Breakpoint(wrong)]))


def test_a_breakpoint_after_the_tools_alone(with_template):
    """Whatever the first message is, the prompt up to there is the same, tools included."""
    prompter = Prompter(with_template(WITH_TOOLS))
    prompts = [
        prompter.render(Request(messages=talk, tools=[SEARCH], breakpoints=[Breakpoint(TOOLS)]))
        for talk in (TALK, [{"role": "system", "content": "0 system"}, *TALK[1:]])
    ]
    assert len({tuple(prompt.tokens[: prompt.end_of(TOOLS)]) for prompt in prompts}) == 1
    text = prompter._tokenizer.decode(prompts[0].tokens[: prompts[0].end_of(TOOLS)])
    assert "search" in text
    assert "Answer" not in text
    assert prompts[0].end_of(TOOLS) in prompts[0].cuts


def test_a_system_prompt_alone_is_a_prefix_of_the_first_request(with_template):
    """The warmed prompt ends before the first request diverges from it."""
    for template in (CHATML, WITH_TOOLS):
        prompter = Prompter(with_template(template))
        tools = [SEARCH] if template is WITH_TOOLS else []
        alone = prompter.render(Request(messages=TALK[:1], tools=tools))
        first = prompter.render(Request(messages=TALK[:2], tools=tools))
        end = alone.end_of(0)
        assert end == first.end_of(0)
        assert alone.tokens[:end] == first.tokens[:end]


def test_thinking_and_options_reach_the_template(with_template):
    tokenizer = with_template("{{ enable_thinking }} {{ mood }}{{ messages[-1].content }}")
    prompter = Prompter(tokenizer)

    def text(**wishes):
        return prompter.render(Request(messages=TALK[1:2], **wishes)).text.split("What")[0]

    assert text(template_options={"mood": "gay"}) == "False gay"
    assert text(thinking=True) == "True "
    assert text(thinking=False, template_options={"enable_thinking": True}) == "False "


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "truncation"])
def test_options_that_would_change_the_result_type_are_refused(with_template, name):
    request = Request(messages=TALK, template_options={name: "x"})
    with pytest.raises(BadInput, match=name):
        Prompter(with_template(CHATML)).render(request)


def test_a_partial_answer_is_continued(with_template):
    options = {"continue_final_message": True}
    request = Request(messages=TALK[:3], template_options=options)
    rendering = Prompter(with_template(CHATML)).render(request)
    assert rendering.text.endswith("<|im_start|>assistant\nA dog 🦊.")
    assert rendering.end_of(1) in rendering.cuts


def test_raw_prompts(with_template):
    tokenizer = with_template(CHATML)
    prompter = Prompter(tokenizer)
    assert prompter.render(Request(prompt="the fox")).tokens == tokenizer.encode("the fox")
    assert prompter.render(Request(prompt=[5, 6, 7])).tokens == [5, 6, 7]
    for prompt in ("the fox", [5, 6, 7]):
        rendering = prompter.render(Request(prompt=prompt))
        assert rendering.cuts == []
        assert rendering.message_at(1) is None
        assert rendering.generation_prompt == ""
        assert not rendering.opens_thinking


@pytest.mark.parametrize(
    "request_", [Request(), Request(messages=TALK, prompt="x"), Request(messages=[])]
)
def test_a_request_has_messages_or_a_prompt(with_template, request_):
    with pytest.raises(BadInput, match="one"):
        Prompter(with_template(CHATML)).render(request_)


@pytest.mark.parametrize(
    ("template", "n_times"),
    [(CHATML, 1.1), ("{% for m in messages %}{{ m.content }}{% endfor %}", 2)],
)
def test_a_long_conversation_is_tokenised_little_more_than_once(with_template, template, n_times):
    """200 messages; without special tokens to begin from, there are fewer cuts."""
    tokenizer = Counting(with_template(template))
    prompter = Prompter(tokenizer)
    tokenizer.n_characters = 0
    rendering = prompter.render(Request(messages=LONG))
    assert len(rendering.cuts) > (20 if template == CHATML else 0)
    assert tokenizer.n_characters < n_times * len(rendering.text)
    assert rendering.end_of(100) == len(plainly(tokenizer, LONG[:101]))
