"""Answers that a client sends back become the tokens that were generated."""

import json
import random
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from keepwarm import config
from keepwarm.engine.preparation import stored_continuations
from keepwarm.models.catalog import locate
from keepwarm.prefix.blocks import chain, common_prefix
from keepwarm.prefix.policy import Policy
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from keepwarm.text.detokenize import decode
from keepwarm.text.parsing import AnswerReader, Markup, message_of
from keepwarm.text.past_answers import ENTRY_BYTES, SPAN_BYTES, Splicer, StoredAnswers, decode_after
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Request
from keepwarm.text.template import Template
from keepwarm.text.tools import CallReader
from tests.kit.checkpoints import CHATML, SPECIALS, tokenizer_config
from tests.kit.tokenizers import make
from tests.store.kit import NAMESPACE, record
from tests.text.formats import CALLS, LINES, WEATHER

ASK = {"role": "user", "content": "What is the quick brown fox?"}
NEXT = {"role": "user", "content": "And the lazy one?"}
ROLES = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
ROLES += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
STRIPS_THINKING = CHATML.replace(
    "message['content'] +", "message['content'].split('</think>')[-1] +"
)


def random_merges(directory, seed=7):
    """Byte-level tokens merged at random: most texts have several tokenisations."""
    pick = random.Random(seed)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    while len(merges) < 600:
        merged = ["".join(pair) for pair in merges[-60:]]
        pair = (pick.choice([*"etaoinsrhldcu", *merged]), pick.choice("etaoinsrhldcuĠ"))
        if "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return saved(tokenizer, directory)


def with_dummy_prefix(directory):
    """As in Llama 2: encoding puts a space before every text, decoding removes it."""
    letters = [chr(c) for c in range(32, 127)] + ["▁", "\n"]
    vocabulary = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    for letter in [*letters, "th", "he", "the", "▁t", "▁th", "▁the"]:
        vocabulary.setdefault(letter, len(vocabulary))
    merges = [("t", "h"), ("h", "e"), ("th", "e"), ("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback()),
            *(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
        ]
    )
    return saved(tokenizer, directory)


def saved(tokenizer, directory):
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(1 << 20)))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(directory)


def smollm2(_directory):
    """The default model's own tokenizer, without its weights."""
    return load_tokenizer(locate("smollm2", config.load()))


def tiny(directory):
    return make(directory, template=CHATML)


MAKERS = {f.__name__: f for f in (tiny, smollm2, random_merges, with_dummy_prefix)}


@pytest.fixture(scope="module", params=MAKERS)
def any_tokenizer(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tokenizer"))


def prefixes(tokenizer):
    token = tokenizer.convert_tokens_to_ids("▁")
    return token is not None and tokenizer.convert_ids_to_tokens(token) == "▁"


def spelled(tokenizer, text):
    """The text letter by letter, or byte by byte: not as the tokenizer would encode it."""
    if prefixes(tokenizer):
        known = {letter: letter.replace(" ", "▁") for letter in text if letter.isascii()}
        unknown = {c: [f"<0x{byte:02X}>" for byte in c.encode()] for c in text if c not in known}
        names = [name for letter in text for name in known.get(letter) or unknown[letter]]
    else:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        names = [name for piece, _ in level.pre_tokenize_str(text) for name in piece]
    return tokenizer.convert_tokens_to_ids(names)


def ask(prompter, *messages, **wishes):
    return prompter.render(Request(messages=messages, **wishes))


def said(text):
    return {"role": "assistant", "content": text}


def pair(tokenizer):
    """A prompter that splices, its splicer, and one that does not."""
    template = Template.of(tokenizer)
    splicer = Splicer(tokenizer, template)
    return Prompter(tokenizer, template, splicer), splicer, Prompter(tokenizer, template)


def answer(splicer, rendering, tokens, tenant=""):
    splicer.remember(tenant, rendering.text, rendering.tokens, tokens, rendering.spans)


def test_an_answer_comes_back_as_it_was_generated(any_tokenizer):
    prompter, splicer, plain = pair(any_tokenizer)
    text = "the nation is in the tree"
    first = ask(prompter, ASK)
    tokens = spelled(any_tokenizer, text)
    answer(splicer, first, tokens)
    second = ask(prompter, ASK, said(text), NEXT)
    held = first.tokens + tokens
    assert second.tokens[: len(held)] == held
    assert second.spliced == len(tokens)
    cold = ask(plain, ASK, said(text), NEXT)
    assert cold.tokens[: len(held)] != held
    assert second.text == cold.text
    assert decode(any_tokenizer, second.tokens) == decode(any_tokenizer, cold.tokens)


def test_an_answer_that_begins_with_a_space_has_it_in_its_text(any_tokenizer):
    """Decoded alone, some tokenizers would remove it."""
    prompter, splicer, _ = pair(any_tokenizer)
    answer(splicer, ask(prompter, ASK), spelled(any_tokenizer, " the tree"))
    assert ask(prompter, ASK, said("the tree"), NEXT).spliced == 0
    assert ask(prompter, ASK, said(" the tree"), NEXT).spliced == len(" the tree")


def test_the_stop_token_belongs_to_the_template(tokenizer):
    """Generated or not, the next prompt has it once."""
    prompter, splicer, _ = pair(tokenizer)
    first = ask(prompter, ASK)
    tokens = spelled(tokenizer, "the tree")
    answer(splicer, first, [*tokens, tokenizer.eos_token_id])
    second = ask(prompter, ASK, said("the tree"), NEXT)
    assert second.tokens[len(first.tokens) :][: len(tokens) + 1] == [
        *tokens,
        tokenizer.eos_token_id,
    ]
    assert second.tokens.count(tokenizer.eos_token_id) == 3


@pytest.mark.parametrize("text", ["the trees", "the tre", "The tree", "", "the tree ", " the tree"])
def test_another_text_is_never_taken_for_the_answer(tokenizer, text):
    prompter, splicer, plain = pair(tokenizer)
    answer(splicer, ask(prompter, ASK), spelled(tokenizer, "the tree"))
    assert ask(prompter, ASK, said(text), NEXT).spliced == 0
    assert ask(prompter, ASK, said(text), NEXT).tokens == ask(plain, ASK, said(text), NEXT).tokens


def test_the_same_words_after_another_prompt_are_not_that_answer(tokenizer):
    prompter, splicer, _ = pair(tokenizer)
    answer(splicer, ask(prompter, ASK), spelled(tokenizer, "the tree"))
    assert ask(prompter, NEXT, said("the tree"), ASK).spliced == 0


def test_of_several_answers_the_one_that_came_back(tokenizer):
    """n > 1, or asked again: the longest one that matches."""
    prompter, splicer, _ = pair(tokenizer)
    first = ask(prompter, ASK)
    for text in ("the", "the tree", "the tree and the dog"):
        answer(splicer, first, spelled(tokenizer, text))
    for text in ("the", "the tree", "the tree and the dog"):
        again = ask(prompter, ASK, said(text), NEXT)
        assert again.spliced == len(spelled(tokenizer, text))
    assert ask(prompter, ASK, said("the tree and"), NEXT).spliced == 0


def test_another_tenant_has_answers_of_its_own(tokenizer):
    prompter, splicer, _ = pair(tokenizer)
    answer(splicer, ask(prompter, ASK), spelled(tokenizer, "the tree"), tenant="a")
    back = (ASK, said("the tree"), NEXT)
    assert ask(prompter, *back, tenant="a").spliced
    assert not ask(prompter, *back, tenant="b").spliced
    assert not ask(prompter, *back, tenant="a", policy=Policy.NO_STORE).spliced


def test_an_answer_that_breaks_off_inside_a_character_is_not_kept(tokenizer):
    """Its text would not encode to its bytes."""
    prompter, splicer, _ = pair(tokenizer)
    first = ask(prompter, ASK)
    answer(splicer, first, tokenizer.encode("the 🦊", add_special_tokens=False)[:-1])
    answer(splicer, first, [])
    answer(splicer, first, [tokenizer.eos_token_id])
    assert len(splicer) == 0
    assert not ask(prompter, ASK, said("the \N{REPLACEMENT CHARACTER}"), NEXT).spliced


@pytest.mark.parametrize("template", [CHATML, LINES])
@pytest.mark.parametrize("said", ["", "Hm.\n", "Hm.\n\n"])
def test_a_call_behind_text_comes_back_as_it_was_generated(tmp_path, template, said):
    """In the model's own format and in Keepwarm's."""
    tokens = ["<tool_call>", "</tool_call>"]
    tokenizer = make(tmp_path, template=template, tokens=tokens, parser="json_tools")
    prompter, splicer, _ = pair(tokenizer)
    first = ask(prompter, ASK, tools=[WEATHER])
    generated = tokenizer.encode(said + CALLS["json_tools"], add_special_tokens=False)
    answer(splicer, first, generated)
    markup = Markup.of(tokenizer)
    reader = AnswerReader(markup, calls=CallReader(markup.tool_format, [WEATHER]))
    message = message_of([p for token in generated for p in reader.add(token)] + reader.finish())
    second = ask(prompter, ASK, message, NEXT, tools=[WEATHER])
    assert message["tool_calls"]
    assert second.tokens[: len(first.tokens) + len(generated)] == first.tokens + generated


@pytest.mark.parametrize("whole", [True, False])
def test_a_replacement_character_inside_an_answer_is_text_like_any_other(tokenizer, whole):
    """Be it written as such, or what is left of another character."""
    prompter, splicer, _ = pair(tokenizer)
    first = ask(prompter, ASK)
    strange = "\N{REPLACEMENT CHARACTER}" if whole else "🦊"
    begun = tokenizer.encode(f"the {strange}", add_special_tokens=False)
    tokens = [*(begun if whole else begun[:-1]), *spelled(tokenizer, " tree")]
    answer(splicer, first, tokens)
    text = decode(tokenizer, tokens)
    again = ask(prompter, ASK, said(text), NEXT)
    assert "\N{REPLACEMENT CHARACTER}" in text
    assert again.spliced == len(tokens)
    assert decode(tokenizer, again.tokens) == again.text


def test_a_template_that_strips_thinking_loses_only_what_it_changed(tmp_path):
    tokenizer = make(tmp_path / "t", template=STRIPS_THINKING, tokens=("<think>", "</think>"))
    prompter, splicer, _ = pair(tokenizer)
    thought = "<think>the dog</think>the tree"
    first = ask(prompter, ASK)
    answer(splicer, first, tokenizer.encode(thought, add_special_tokens=False))
    second = ask(prompter, ASK, said(thought), NEXT)
    assert second.spliced == 0
    assert common_prefix(first.tokens, second.tokens) == len(first.tokens)
    third = ask(prompter, ASK, said(thought), NEXT, said("the dog"), ASK)
    assert common_prefix(second.tokens, third.tokens) == len(second.tokens)


words = st.lists(
    st.sampled_from(["the", " qu", "ick", "\n", "🦊", " ", "<|im_end|>", "1984", "é"]), max_size=6
).map("".join)


@pytest.mark.parametrize("template", [CHATML, ROLES, MISTRAL])
def test_splicing_changes_tokens_and_nothing_else(any_tokenizer, template):
    """Any tokens as answers, any texts as questions: the text and the cuts stay correct."""
    before, any_tokenizer.chat_template = any_tokenizer.chat_template, template
    n_spliced = []
    any_tokens = st.lists(st.integers(0, len(any_tokenizer) - 1), max_size=12)
    answers = st.one_of(any_tokens, words.map(partial(spelled, any_tokenizer)))
    edits = st.sampled_from([None, None, None, None, "", "the", " tree"])

    @settings(deadline=None, derandomize=True, database=None, max_examples=10)
    @given(st.lists(st.tuples(words, answers, edits), min_size=1, max_size=4))
    def check(turns):
        prompter, splicer, plain = pair(any_tokenizer)
        talk = []
        for question, tokens, edit in turns:
            talk.append({"role": "user", "content": question})
            rendering, cold = ask(prompter, *talk), ask(plain, *talk)
            assert rendering.text == cold.text
            assert reads(any_tokenizer, rendering) == reads(any_tokenizer, cold)
            check_cuts(prompter, rendering, talk)
            if rendering.spliced == 0:
                assert rendering.tokens == cold.tokens
            n_spliced.append(rendering.spliced)
            answer(splicer, rendering, tokens)
            text = decode_after(any_tokenizer, rendering.tokens[-8:], tokens) or ""
            talk.append(said(text if edit is None else text + edit))

    try:
        check()
    finally:
        any_tokenizer.chat_template = before
    refused = template is ROLES and prefixes(any_tokenizer)  # no text there decodes to the same
    assert refused or sum(map(bool, n_spliced)) > 3


def reads(tokenizer, rendering):
    """The decoded tokens; a dummy prefix shows as a space after special tokens."""
    text = decode(tokenizer, rendering.tokens)
    return text.replace(" ", "") if prefixes(tokenizer) else text


def check_cuts(prompter, rendering, talk):
    """Up to a cut the shorter conversation has the same tokens."""
    for message in range(len(talk)):
        end = rendering.end_of(message)
        part = prompter.render(
            Request(messages=talk[: message + 1], template_options={"unused": message})
        )
        assert part.tokens[:end] == rendering.tokens[:end]
    assert rendering.cuts == sorted({rendering.end_of(m) for m in range(len(talk))} - {0})


def test_memory_is_bounded_and_the_oldest_goes_first(tokenizer):
    splicer = Splicer(tokenizer, max_bytes=20_000)
    prompter = Prompter(tokenizer, splicer=splicer)
    asked = [{"role": "user", "content": f"the question {i}"} for i in range(60)]
    for question in asked:
        answer(splicer, ask(prompter, question), spelled(tokenizer, "the tree"))
        assert ask(prompter, asked[0], said("the tree"), NEXT).spliced  # in use, so it stays
        each = ENTRY_BYTES + SPAN_BYTES + 4 * len("the tree")
        assert splicer.n_bytes == len(splicer) * each + 4 * len("the tree") <= 20_000
    assert 10 < len(splicer) < 40
    assert ask(prompter, asked[-1], said("the tree"), NEXT).spliced
    assert not ask(prompter, asked[1], said("the tree"), NEXT).spliced


def test_one_prompt_does_not_keep_answers_without_end(tokenizer):
    splicer = Splicer(tokenizer)
    first = ask(Prompter(tokenizer), ASK)
    for i in range(100):
        answer(splicer, first, spelled(tokenizer, f"the {i}"))
        answer(splicer, first, spelled(tokenizer, "again"))
    assert len(splicer) == 16
    each, n_letters = ENTRY_BYTES + SPAN_BYTES, 15 * len("the 99") + len("again")
    assert splicer.n_bytes == 16 * each + 8 * n_letters
    splicer.clear()
    assert (len(splicer), splicer.n_bytes) == (0, 0)
    Splicer(tokenizer, max_bytes=1).remember("", "x", [5], [6], ())  # too large to keep: no error


# After a restart nothing is remembered, but the tokens are in the block store.


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier(1 << 28)
    yield made
    made.close()


def store(tier, tokens):
    for ref in chain(NAMESPACE, tokens):
        tier.put(record(ref, n_bytes=16))


def stored(tier):
    follow = partial(stored_continuations, NAMESPACE, Tiers([("memory", tier)]))
    return StoredAnswers(follow)


def restarted(tokenizer, tier, talk):
    """The prompt as a new process renders it, and its splicer."""
    splicer = Splicer(tokenizer)
    request = Request(messages=talk)
    return Prompter(tokenizer, splicer=splicer).render(request, stored(tier)), splicer


@pytest.mark.parametrize("n_words", [2, 400])
def test_an_answer_from_before_a_restart_is_read_back_from_the_store(any_tokenizer, tier, n_words):
    """One block, or several: the ids in their headers are those that were generated."""
    prompter, splicer, _ = pair(any_tokenizer)
    text = " ".join(f"the{i % 7}" for i in range(n_words))
    first = ask(prompter, ASK)
    tokens = spelled(any_tokenizer, text)
    answer(splicer, first, tokens)
    store(tier, first.tokens + tokens)
    talk = [ASK, said(text), NEXT]
    warm = ask(prompter, *talk)
    assert warm.spliced == len(tokens)
    again, remembering = restarted(any_tokenizer, tier, talk)
    assert again.tokens == warm.tokens
    assert again.spliced == warm.spliced
    assert again.cuts == warm.cuts
    assert len(remembering) == 1  # so the store is not asked again


def test_a_conversation_of_many_turns_is_read_back(tokenizer, tier):
    prompter, splicer, _ = pair(tokenizer)
    talk = []
    for turn in range(8):
        talk.append({"role": "user", "content": f"the question {turn} " * 9})
        rendering = ask(prompter, *talk)
        tokens = spelled(tokenizer, f"the other {turn} " * 9)
        answer(splicer, rendering, tokens)
        store(tier, rendering.tokens + tokens)
        talk.append(said(f"the other {turn} " * 9))
    talk.append(NEXT)
    warm = ask(prompter, *talk)
    again, _ = restarted(tokenizer, tier, talk)
    assert again.tokens == warm.tokens
    assert again.spliced == warm.spliced > 256


def test_what_is_stored_is_not_taken_for_another_text(tokenizer, tier):
    prompter, _, plain = pair(tokenizer)
    first = ask(prompter, ASK)
    store(tier, first.tokens + spelled(tokenizer, "the tree"))
    for text in ("the trees", "the tre", "a dog", ""):
        talk = [ASK, said(text), NEXT]
        again, _ = restarted(tokenizer, tier, talk)
        assert again.spliced == 0
        assert again.tokens == ask(plain, *talk).tokens


class Asked:
    """A store, or none, that counts its lookups."""

    def __init__(self, answers=None):
        self.times = 0
        self._answers = answers

    def __call__(self, tokens, guesses):
        self.times += 1
        return self._answers.follow(tokens, guesses) if self._answers else []


def test_a_store_that_knows_nothing_is_asked_once(tokenizer):
    nothing = Asked()
    request = Request(messages=[ASK, said("a dog")] * 20 + [NEXT])
    again = Prompter(tokenizer, splicer=Splicer(tokenizer)).render(request, StoredAnswers(nothing))
    assert again.spliced == 0
    assert nothing.times == 1


def test_what_was_read_back_is_remembered(tokenizer, tier):
    first = ask(Prompter(tokenizer), ASK)
    store(tier, first.tokens + spelled(tokenizer, "the tree"))
    prompter = Prompter(tokenizer, splicer=Splicer(tokenizer))
    request = Request(messages=[ASK, said("the tree"), NEXT])
    asked = Asked(stored(tier))
    renderings = [prompter.render(request, StoredAnswers(asked)) for _ in range(3)]
    assert asked.times == 1
    assert all(rendering.tokens == renderings[0].tokens for rendering in renderings)
    assert renderings[0].spliced == renderings[2].spliced == len("the tree")


def test_an_answer_that_is_not_stored_does_not_hide_later_remembered_ones(tokenizer):
    prompter, splicer, _ = pair(tokenizer)
    theirs = [ASK, said("a dog"), NEXT]
    answer(splicer, ask(prompter, *theirs), spelled(tokenizer, "the tree"))
    request = Request(messages=[*theirs, said("the tree"), ASK])
    warm = prompter.render(request)
    assert warm.spliced == len("the tree")
    assert prompter.render(request, StoredAnswers(Asked())).tokens == warm.tokens


# Answers of other machines


def walk_with(tokenizer):
    """What one machine knows after two answers, and the conversation."""
    prompter, splicer, _ = pair(tokenizer)
    first = ask(prompter, ASK)
    answer(splicer, first, spelled(tokenizer, "the tree"))
    talk = [ASK, said("the tree"), NEXT]
    second = ask(prompter, *talk)
    answer(splicer, second, spelled(tokenizer, "the fox"))
    talk += [said("the fox"), ASK]
    return ask(prompter, *talk), talk, splicer


def told(tokenizer, talk, *spans, splicer=None):
    """The prompt of a machine that is told these answers, and the texts that it asks about."""
    asked = []

    def elsewhere(texts):
        asked.extend(texts)
        return spans

    prompter = Prompter(tokenizer, splicer=splicer or Splicer(tokenizer))
    stored = StoredAnswers(lambda *_: [], elsewhere)
    return prompter.render(Request(messages=talk), stored), asked


def test_another_machine_has_the_tokens_that_it_is_told(any_tokenizer):
    there, talk, _ = walk_with(any_tokenizer)
    here, asked = told(any_tokenizer, talk, there.spans)
    assert here.tokens == there.tokens
    assert asked == [there.text[: span.start] for span in reversed(there.spans)], "the last first"
    assert told(any_tokenizer, talk)[0].spliced == 0


def test_what_was_decided_for_a_conversation_holds_whoever_remembers_otherwise(tokenizer):
    """A machine that could not be told has tokenised the first answer, and has told so."""
    there, talk, _ = walk_with(tokenizer)
    prompter, splicer, plain = pair(tokenizer)
    answer(splicer, ask(prompter, ASK), spelled(tokenizer, "the tree"))
    here, _ = told(tokenizer, talk, there.spans[1:], splicer=splicer)
    assert here.spans == there.spans[1:]
    later = [*talk, said("the quick"), NEXT]
    answer(splicer, here, spelled(tokenizer, "the quick"))
    assert [span.start for span in ask(prompter, *later).spans][:1] == [there.spans[1].start]
    assert ask(plain, *later).spliced == 0


@pytest.mark.parametrize(
    "forge",
    [
        lambda spans: [spans[0]._replace(tokens=spans[1].tokens), spans[1]],
        lambda spans: [spans[1], spans[0]],
        lambda spans: [spans[0]._replace(start=-1), spans[1]],
        lambda spans: [spans[0], spans[1]._replace(end=10**6)],
        lambda spans: [spans[0]._replace(tokens=[*spans[0].tokens, 2**31]), spans[1]],
        lambda spans: [spans[0]._replace(end=spans[0].end - 1, tokens=spans[0].tokens[:-1])],
    ],
)
def test_what_is_told_and_is_not_this_text_is_not_used(tokenizer, forge):
    there, talk, _ = walk_with(tokenizer)
    here, _ = told(tokenizer, talk, forge(list(there.spans)))
    assert here.spliced == 0
    here, _ = told(tokenizer, talk, forge(list(there.spans)), there.spans)
    assert here.tokens == there.tokens, "the next one is"
