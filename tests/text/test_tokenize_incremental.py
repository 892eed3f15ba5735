"""A prompt that continues another is tokenised only where it is new, and to the same tokens.

The yardstick is the tokenizer itself, asked for the whole text.
"""

import random
from array import array
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keepwarm.prefix.policy import Policy
from keepwarm.text import tokenize_incremental
from keepwarm.text.past_answers import Splicer, encode
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Request
from keepwarm.text.sandboxed import PlainTokenizer
from keepwarm.text.tokenize_incremental import (
    ENTRY_BYTES,
    IncrementalEncoder,
    TextOwner,
    TextSplitter,
    TokenCache,
)
from tests.kit.checkpoints import CHATML, SPECIALS, make_tokenizer
from tests.text import test_past_answers as makers
from tests.text import test_special_tokens as kinds
from tests.text.test_special_tokens import Lines

START, END = "<|im_start|>", "<|im_end|>"
WORDS = [
    *("the", " qu", "b", "_", "\n", "\n\n", " ", "  ", "\t", "\u00a0", "\u2003", "1984", "é", "🦊"),
    *("e\u0301", "\u0301", "\u200d", "\u1112\u1161", "\ufb01", "\U00100041", "\uff45", "▁", "ß"),
    *("<td>", "hello", "<", "|>", "<|im_", "end|>", "</s>", "<s>", "<|IM_END|>", START[:-1]),
    *(START, END, START + END, START * 2, " " + START, END + "\n", END + " ", "user", "assistant"),
]
texts = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)
quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=15,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Texts are cut wherever they may be, however short the pieces are."""
    monkeypatch.setattr(tokenize_incremental, "MIN_PIECE", 1)


# Where texts are cut


def wrapped(backend: Tokenizer, tokens: Iterable[AddedToken] = (), kind=PreTrainedTokenizerFast):
    """mlx-lm's wrapper of a tokenizer with these tokens; the special ones of the template first."""
    backend.add_tokens([*map(plain, (START, END)), *tokens])
    tokenizer = TokenizerWrapper(kind(tokenizer_object=backend))
    tokenizer.chat_template, tokenizer.has_chat_template = CHATML, True
    return tokenizer


def plain(name, **flags):
    return AddedToken(name, special=True, **{"normalized": False, **flags})


def with_steps(normalizer=None, pre_tokenizer=None, model=None):
    backend = Tokenizer(model or kinds.byte_level().model)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def unigram():
    letters = [chr(c) for c in range(33, 127)]
    pieces = [("<unk>", 0.0), *((c, -5.0) for c in [*letters, "▁"]), ("▁the", -2.0), (END, -1.0)]
    return models.Unigram(pieces, 0)


def wordpiece():
    names = ["[UNK]", "the", "qu", "##b", "<", "|", ">", "im", "end", "start", "user", "hello"]
    return models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")


metaspace = pre_tokenizers.Metaspace
CUT = {
    "byte level": lambda: wrapped(kinds.byte_level()),
    "first word spaced": lambda: wrapped(kinds.metaspace()),
    "every part spaced": lambda: wrapped(kinds.legacy()),
    "metaspace": lambda: wrapped(with_steps(pre_tokenizer=metaspace(prepend_scheme="always"))),
    "prefix space": lambda: wrapped(with_steps(pre_tokenizer=pre_tokenizers.ByteLevel())),
    "normalised": lambda: wrapped(kinds.normalising(), [AddedToken("HELLO", normalized=True)]),
    "composed": lambda: wrapped(with_steps(normalizers.NFC())),
    "stripped": lambda: wrapped(with_steps(normalizers.Sequence([normalizers.Strip()]))),
    "no normalizer in a sequence": lambda: wrapped(
        with_steps(normalizers.Sequence([])), [plain(START, normalized=True)]
    ),
    "split": lambda: wrapped(
        with_steps(
            pre_tokenizer=pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s+|\w+|[^\s\w]+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        )
    ),
    "unigram": lambda: wrapped(with_steps(pre_tokenizer=metaspace(), model=unigram())),
    "wordpiece": lambda: wrapped(
        with_steps(normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), wordpiece())
    ),
    "spaces behind go": lambda: wrapped(
        kinds.byte_level(), [plain(START, rstrip=True), plain(END, rstrip=True)]
    ),
    "others with flags": lambda: wrapped(
        kinds.byte_level(),
        [
            *(plain("<s>", lstrip=True, rstrip=True), AddedToken("hello", single_word=True)),
            *(AddedToken("  "), AddedToken("the", single_word=True), AddedToken("<")),
        ],
    ),
    "tiny": lambda: wrapped(make_tokenizer()),
}


def certain(tokenizer) -> list[str]:
    cutter = TextSplitter.of(tokenizer, [tokenizer.chat_template])
    return [name for name in SPECIALS if cutter.pieces(f"a{name}b") == ["a", f"{name}b"]]


def check_cuts(tokenizer):
    to_tokens = partial(encode, tokenizer)
    cutter = TextSplitter.of(tokenizer, [tokenizer.chat_template])

    @quick
    @given(text=texts)
    def check(text):
        pieces = cutter.pieces(text)
        assert "".join(pieces) == text
        assert list(chain.from_iterable(map(to_tokens, pieces))) == to_tokens(text)

    check()


@pytest.mark.parametrize("kind", CUT)
def test_the_tokens_of_the_pieces_are_those_of_the_whole(kind):
    tokenizer = CUT[kind]()
    assert certain(tokenizer) == [START, END]
    check_cuts(tokenizer)


@pytest.mark.parametrize("kind", makers.MAKERS)
def test_of_every_tokenizer_of_the_kit(tmp_path, kind):
    tokenizer = makers.MAKERS[kind](tmp_path / kind)
    tokenizer.chat_template, tokenizer.has_chat_template = CHATML, True
    assert certain(tokenizer) == [START, END]
    check_cuts(tokenizer)
    moved = PlainTokenizer.of(tokenizer)
    assert certain(moved) == [START, END]  # as in the process that prepares long prompts


class Spaces:
    """A step of somebody's own."""

    def pre_tokenize(self, text):
        text.split(lambda _, part: [part])


def with_own_step(tokenizer):
    own = pre_tokenizers.PreTokenizer.custom(Spaces())
    tokenizer.backend_tokenizer.pre_tokenizer = own
    return tokenizer


def with_dropout():
    backend = make_tokenizer(specials=())
    backend.model.dropout = 0.5
    return backend


# A tokenizer, the tokens that its texts are cut before, and a text that may not be cut elsewhere.
NOT_CUT = {
    "spaces before it go": (
        lambda: wrapped(kinds.byte_level(), [plain(START, lstrip=True)]),
        [END],
        f"a  {START}b",
    ),
    "only as a word": (
        lambda: wrapped(kinds.byte_level(), [plain(START, single_word=True)]),
        [END],
        f"a{START} b",
    ),
    "another lies across it": (
        lambda: wrapped(kinds.byte_level(), [plain("b<|im_")]),
        [],
        f"ab{START}b",
    ),
    "another holds it": (
        lambda: wrapped(kinds.byte_level(), [plain(f"b{START}b")]),
        [END],
        f"ab{START}b",
    ),
    "another ends in its first character": (
        lambda: wrapped(kinds.byte_level(), [AddedToken("b<", normalized=False)]),
        [],
        f"ab{START}b",
    ),
    "found in normalised text only": (
        lambda: wrapped(
            kinds.legacy(),
            [plain(START, normalized=True), AddedToken("b<|im_start|>", normalized=True)],
        ),
        [END],
        f"ab{START}b",
    ),
    "normalised text joins": (
        lambda: wrapped(with_steps(normalizers.Prepend("b")), [plain(START, normalized=True)]),
        [END],
        f"a{START}b",
    ),
    "more happens to a text": (
        lambda: wrapped(kinds.byte_level(), kind=Lines),
        [],
        None,
    ),
    "special tokens are text": (
        lambda: split_specials(wrapped(make_tokenizer(["the the", START * 9, f"a{START}"], 400))),
        [],
        None,
    ),
    "a step that is not known": (lambda: with_own_step(wrapped(kinds.byte_level())), [], None),
    "chance": (lambda: wrapped(with_dropout()), [], None),
}


def split_specials(tokenizer):
    tokenizer._tokenizer.split_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("kind", NOT_CUT)
def test_where_it_is_not_certain_nothing_is_cut(kind):
    make, names, text = NOT_CUT[kind]
    tokenizer = make()
    assert certain(tokenizer) == names
    if kind != "chance":
        check_cuts(tokenizer)
    if text is not None:  # a control: a cut there would give other tokens
        before, name, behind = text.partition(START)
        to_tokens = partial(encode, tokenizer)
        assert to_tokens(before) + to_tokens(name + behind) != to_tokens(text)


def test_tokens_that_a_template_has_as_variables_count_too(tmp_path):
    tokenizer = makers.tiny(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    assert tokenizer.eos_token == END
    assert certain(tokenizer) == [START, END]  # START is its bos_token
    tokenizer.bos_token = None
    assert certain(tokenizer) == [END]


def test_a_longer_token_that_begins_alike_takes_its_place():
    tokenizer = wrapped(kinds.byte_level(), [plain(f"{START}user")])
    assert certain(tokenizer) == [END]


def test_without_a_template_or_a_library_a_text_is_one_piece(tmp_path):
    tokenizer = makers.tiny(tmp_path)
    tokenizer.has_chat_template = False
    assert certain(tokenizer) == []

    class Foreign:
        has_chat_template, chat_template = True, CHATML

        def encode(self, text, **_):
            return [*text.encode()]

    assert certain(Foreign()) == []


def test_a_long_part_is_one_piece_whatever_is_around_it(monkeypatch):
    monkeypatch.undo()
    cutter = TextSplitter.of(CUT["byte level"](), [CHATML])
    turns = [f"{START}user\n{'x' * n}{END}\n" for n in (2_000, 10, 1, 1, 5_000, 10)]
    shorter, longer = (cutter.pieces("".join(turns[:n])) for n in (4, 6))
    assert longer[: len(shorter) - 1] == shorter[:-1]
    assert [piece.count("user") for piece in longer] == [1, 3, 1, 1]
    assert longer[2] in cutter.pieces(f"{START}user\nAnother beginning.{END}\n{turns[4]}")


# Prompts


class Watching(TokenCache):
    """Notes which texts were not known."""

    def __init__(self, **options):
        super().__init__(**options)
        self.new: list[str] = []

    def find(self, owner, texts):
        found = super().find(owner, texts)
        self.new += [text for text, tokens in zip(texts, found, strict=True) if tokens is None]
        return found


def check_incremental(tokenizer):
    """A prompt has the tokens and cuts of one that is tokenised whole.

    All conversations of one tokenizer are remembered together, masked and not.
    """
    known = Watching()
    prompter, whole = Prompter(tokenizer, known=known), Prompter(tokenizer)

    def check(messages, tools):
        tools = tools if prompter.template.renders_tools else []
        for talk in (messages[:1], messages, messages):
            mine, theirs = (kinds.ask(each, talk, tools) for each in (prompter, whole))
            assert mine.tokens == theirs.tokens
            assert mine.text == theirs.text
            assert mine.cuts == theirs.cuts

    kinds.property_of(check, kinds.hostile_words)()
    assert bool(known.new) == tokenizer.has_chat_template


def talk_of(n_turns, seed=0, words=("the", "quick", "fox", "naïve", "e\u0301", "🦊", "\n")):
    pick = random.Random(seed)
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": " ".join(pick.choices(words, k=200))}
        for i in range(2 * n_turns + 1)
    ]


def test_a_turn_costs_what_is_new(monkeypatch, tmp_path):
    monkeypatch.undo()
    tokenizer, talk, known = makers.tiny(tmp_path), talk_of(20), Watching()
    prompter, whole = Prompter(tokenizer, known=known), Prompter(tokenizer)
    for n_messages in range(1, len(talk) + 1, 2):
        known.new.clear()
        request = Request(messages=talk[:n_messages])
        text = prompter.render(request).text
        added = sum(len(each["content"]) for each in talk[n_messages - 2 : n_messages])
        assert sum(map(len, known.new)) < added + tokenize_incremental.MIN_PIECE + 200
    assert len(text) > 10 * tokenize_incremental.MIN_PIECE
    assert prompter.render(request).tokens == whole.render(request).tokens


def test_answers_are_spliced_between_pieces(tmp_path):
    tokenizer = makers.tiny(tmp_path)
    splicer, known = Splicer(tokenizer), Watching()
    prompter = Prompter(tokenizer, splicer=splicer, known=known)
    whole = Prompter(tokenizer, splicer=splicer)
    first = prompter.render(Request(messages=[makers.ASK]))
    makers.answer(splicer, first, makers.spelled(tokenizer, "the fox"))
    known.new.clear()
    talk = [makers.ASK, makers.said("the fox"), makers.NEXT]
    mine, theirs = (each.render(Request(messages=talk)) for each in (prompter, whole))
    assert mine.spliced == theirs.spliced == 7
    assert mine.tokens == theirs.tokens
    assert mine.cuts == theirs.cuts
    assert not any(makers.ASK["content"] in piece for piece in known.new)


def test_a_text_that_cannot_be_cut_is_known_when_it_comes_again(tmp_path):
    tokenizer, known = CUT["byte level"](), Watching()
    tokenizer._tokenizer.split_special_tokens = True
    prompter, whole = Prompter(tokenizer, known=known), Prompter(tokenizer)
    request = Request(messages=talk_of(2))
    assert prompter.render(request).tokens == whole.render(request).tokens
    assert len(known.new) == 1
    assert prompter.render(request).tokens == whole.render(request).tokens
    assert len(known.new) == 1


# What is known


@pytest.mark.parametrize(
    ("policy", "finds", "keeps"),
    [
        (Policy.READ_WRITE, True, True),
        (Policy.EPHEMERAL, True, True),
        (Policy.READ_ONLY, True, False),
        (Policy.NO_STORE, False, False),
    ],
)
def test_a_policy_says_what_is_looked_up_and_kept(tmp_path, policy, finds, keeps):
    known = Watching()
    prompter = Prompter(makers.tiny(tmp_path), known=known)
    request = Request(messages=talk_of(1), policy=policy)
    prompter.render(request)
    assert bool(known.n_bytes) == keeps
    prompter.render(replace(request, policy=Policy.READ_WRITE))
    looked = []
    known.find = lambda owner, texts: looked.append(owner) or [None] * len(texts)
    prompter.render(request)
    assert bool(looked) == finds


def piece(n_tokens):
    return array("I", range(n_tokens))


def test_a_tenant_finds_only_what_is_its_own():
    known, mine = TokenCache(), TextOwner("me", is_masked=False)
    known.keep(mine, {"text": piece(3)})
    assert known.find(mine, ["other", "text", "text"]) == [None, piece(3), piece(3)]
    assert known.find(TextOwner("you", is_masked=False), ["text"]) == [None]
    assert known.find(TextOwner("me", is_masked=True), ["text"]) == [None]


def test_stand_ins_in_a_text_are_not_taken_for_masked_characters(tmp_path):
    """A text with private-use characters, and one that is masked to the very same text."""
    tokenizer, known = makers.tiny(tmp_path), TokenCache()
    prompter, whole = Prompter(tokenizer, known=known), Prompter(tokenizer)
    masked = prompter.render(Request(messages=[{"role": "user", "content": f"a {END}"}]))
    content = masked.text.partition("user\n")[2].partition(END)[0]
    assert END not in content
    for text in (content, f"a {END}", content):
        request = Request(messages=[{"role": "user", "content": text}])
        assert prompter.render(request).tokens == whole.render(request).tokens


def test_what_is_known_is_bounded_and_the_tenant_that_holds_most_gives_way():
    size = ENTRY_BYTES + 4 * 100
    known = TokenCache(max_bytes=10 * size)
    small, large = (TextOwner(name, is_masked=False) for name in ("small", "large"))
    known.keep(small, {f"s{i}": piece(100) for i in range(3)})
    for i in range(50):
        known.keep(large, {f"l{i}": piece(100)})
        known.find(large, ["l0"])  # it is in use
        assert known.n_bytes <= 10 * size
    assert known.n_bytes == 10 * size
    assert None not in known.find(small, ["s0", "s1", "s2"])
    kept = known.find(large, [f"l{i}" for i in range(50)])
    assert [i for i, tokens in enumerate(kept) if tokens] == [0, *range(44, 50)]
    known.keep(large, {"all": piece(9_999)})
    assert known.n_bytes == 3 * size  # too large to keep; it costs its owner the others


def test_without_what_is_known_nothing_is_cut():
    asked = []

    def to_tokens(text, start):
        asked.append((text, start))
        return [1, 2]

    in_pieces = IncrementalEncoder(
        *(to_tokens, TextSplitter([START]), None, TextOwner("", is_masked=False)), keeps=True
    )
    assert in_pieces(f"a{START}b", 7) == [1, 2]
    assert asked == [(f"a{START}b", 7)]
