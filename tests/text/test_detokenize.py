"""Streamed pieces, joined, are byte for byte what decoding all ids at once gives."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from keepwarm.text.detokenize import DelimiterMatch, Detokenizer, Pieces, find_first, held_back
from tests.kit.checkpoints import write_checkpoint

REPEATABLE = settings(deadline=None, derandomize=True, database=None)
FAMILY = "👩‍👩‍👧‍👦"  # seven code points, twenty-five bytes
PAST_VOCABULARY = 5000  # models pad their vocabulary: such an id has no text


def byte_fallback() -> TokenizerWrapper:
    """A tokenizer of the SentencePiece family: spaces as ▁, unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁a", "cat", "é", "\n", "", "<drop>", "<0xZZ>", *"abcdefgh.,'"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("<drop>", ""),
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> TokenizerWrapper:
    """A tokenizer of the GPT family, in which every byte is a token."""
    directory: Path = write_checkpoint(tmp_path_factory.mktemp("model"))
    return load_tokenizer(directory)


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def tokenizer(request, byte_level) -> TokenizerWrapper:
    return byte_level if request.param == "byte level" else byte_fallback()


def pieces_of(tokenizer, tokens) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


ids = st.lists(st.integers(0, 330) | st.just(PAST_VOCABULARY), max_size=40)


@REPEATABLE
@given(tokens=ids)
@example(
    tokens=[3 + 0xC3, 3 + 0xA9, 3 + 0xFF, 263]
)  # é, then a byte that makes the whole run invalid
@example(tokens=[3 + 0xC3, PAST_VOCABULARY, 3 + 0xA9, 3 + 0xFF])
@example(tokens=[261, 266, 262])  # an empty token between two words
@example(tokens=[261, 267, 262])  # a token that the decoder drops between two words
def test_any_ids_stream_to_what_decode_gives(tokenizer, tokens):
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


def byte_token(tokenizer, byte) -> int:
    """A single byte as a token."""
    pieces = Pieces(tokenizer)
    return next(token for token in range(330) if pieces.of(token).numbers == [byte])


@pytest.mark.parametrize(
    "tail", [b"\xc3\xa9", b"\xf0\x9f\xa6\x8a", b"\xef\xbf\xbd", b"\xf0\x9f\xa9"]
)
@pytest.mark.parametrize("between", [[], [PAST_VOCABULARY], [261], [266], [267]])
def test_long_runs_of_bytes_stream_to_what_decode_gives(tokenizer, tail, between):
    """Be what comes behind them a whole character or not, or interrupted."""
    wrong, end = ([byte_token(tokenizer, byte) for byte in some] for some in (b"\x80", tail))
    for n in range(24):
        for at in range(len(end) + 1):
            tokens = [261, *wrong * n, *end[:at], *between, *end[at:], *wrong * 3, *end, 262]
            assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.n_decoded = 0
        self._tokenizer = tokenizer
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def decode(self, tokens, **options):
        self.n_decoded += len(tokens)
        return self._tokenizer.decode(tokens, **options)


@pytest.mark.parametrize(
    "run", [b"\x80", b"\xc3", b"\xef\xbf\xbd", b"\xf0\x9f\xa6", b"\xc3\xa9\x80"]
)
def test_no_run_of_bytes_is_decoded_again_for_every_token(byte_level, run):
    tokens = [byte_token(byte_level, byte) for byte in run] * 400
    counting = Counting(byte_level)
    pieces = pieces_of(counting, tokens)
    assert "".join(pieces) == byte_level.decode(tokens)
    assert counting.n_decoded < 100 * len(tokens)
    assert sum(map(bool, pieces[:-1])) > len(tokens) / 20


@REPEATABLE
@given(text=st.text("az09 <|>\n\t\x00éß漢字🦊👩\u200d\ufffd", max_size=60))
@example(text=FAMILY)
@example(text="   two   runs of    spaces  ")
@example(text=" starts with a space")
@example(text="a real \N{REPLACEMENT CHARACTER} in the text")
@example(text="\x00 and \r\n")
def test_text_survives_the_round_trip(byte_level, text):
    pieces = pieces_of(byte_level, byte_level.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    whole = "\N{REPLACEMENT CHARACTER}" not in text
    assert not (whole and any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces))


def test_pieces_appear_with_their_last_byte(byte_level):
    tokens = byte_level.encode("a🦊!<|im_end|>", add_special_tokens=False)
    assert pieces_of(byte_level, tokens) == ["a", "", "", "", "🦊", "!", "<|im_end|>", ""]


def test_an_incomplete_last_character_becomes_a_replacement_character(byte_level):
    tokens = byte_level.encode("🦊", add_special_tokens=False)[:-1]
    assert pieces_of(byte_level, tokens) == ["", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_mlx_lm_streams_another_text(byte_level):
    """Why Keepwarm has its own detokenizer; when this test fails, it can be deleted."""
    theirs = byte_level.detokenizer
    tokens = byte_level.encode(" fox", add_special_tokens=False)
    for token in tokens:
        theirs.add_token(token)
    theirs.finalize()
    assert theirs.text != byte_level.decode(tokens) == " fox"


@pytest.mark.parametrize(
    ("text", "delimiters", "found"),
    [
        ("abc", [], None),
        ("abc", ["x"], None),
        ("abc", ["c", "b"], DelimiterMatch(1, 1)),
        ("abcd", ["abcd", "bc"], DelimiterMatch(1, 1)),
        ("abc", ["c", "bc", "abc"], DelimiterMatch(0, 2)),
        ("abab", ["ab", "ab"], DelimiterMatch(0, 0)),
    ],
)
def test_the_delimiter_that_ends_first_is_found(text, delimiters, found):
    assert find_first(text, delimiters) == found


@pytest.mark.parametrize(
    ("text", "delimiters", "n"),
    [
        ("", ["ab"], 0),
        ("x", [], 0),
        ("xa", ["ab"], 1),
        ("xab", ["abc", "bx"], 2),
        ("abb", ["ab"], 0),
    ],
)
def test_text_that_may_become_a_delimiter_is_held_back(text, delimiters, n):
    assert held_back(text, delimiters) == n
