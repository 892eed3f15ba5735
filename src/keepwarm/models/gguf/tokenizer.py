"""The tokenizer in a GGUF file, rebuilt exactly or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from keepwarm.errors import UnsupportedModel
from keepwarm.models.gguf.file import invalid_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,{digits}}}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerScheme(NamedTuple):
    """Pre-tokenization, and the defaults for files that do not set a value."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    whole_words_first: bool = False  # a word in the vocabulary is taken without merging
    adds_bos: bool = False
    normalizer: normalizers.Normalizer | None = None


def schemes() -> dict[str, TokenizerScheme]:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": TokenizerScheme(words),
        "smollm": TokenizerScheme(pre_tokenizers.Sequence([digits, words])),
        "llama-bpe": TokenizerScheme(_words(digits=3), whole_words_first=True, adds_bos=True),
        "qwen2": TokenizerScheme(_words(digits=1), normalizer=normalizers.NFC()),
    }


def _words(digits: int) -> pre_tokenizers.PreTokenizer:
    """Words, punctuation, and so many digits at a time."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS.format(digits=digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def write_tokenizer(path: Path, metadata: dict[str, Any], directory: Path) -> None:
    """Write the tokenizer of the file at `path`, chat template included, into `directory`."""
    tokenizer = build_tokenizer(path, metadata)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata['general.architecture']}.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "bos_token": _token(metadata, "bos"),
        "eos_token": _token(metadata, "eos"),
        "unk_token": _token(metadata, "unknown"),
        "pad_token": _token(metadata, "padding"),
    }
    given = {name: value for name, value in config.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(given, indent=2))


def build_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    scheme = find_scheme(path, metadata)
    tokens, types = _vocabulary(path, metadata)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
        bpe = models.BPE(vocabulary, merges, ignore_merges=scheme.whole_words_first)
    except Exception as error:  # the Rust library raises no specific class
        reason = str(error).partition("\n")[0]
        raise invalid_file(path, f"its tokenizer is inconsistent ({reason})") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = scheme.pre_tokenizer
    if scheme.normalizer is not None:
        tokenizer.normalizer = scheme.normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(tokens, types, {UNKNOWN, CONTROL}, special=True))
    tokenizer.add_tokens(_added(tokens, types, {USER_DEFINED}, special=False))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", scheme.adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token")  # an embedder's vector is this one's
    bos = _token(metadata, "bos") if adds_bos else None
    eos = _token(metadata, "eos") if adds_eos else None
    if bos or eos:
        tokenizer.post_processor = _template(bos, eos, vocabulary)
    return tokenizer


def _template(
    bos: str | None, eos: str | None, vocabulary: dict[str, int]
) -> processors.TemplateProcessing:
    one = " ".join(f"{part}:0" for part in (bos, "$A", eos) if part)
    other = " ".join(f"{part}:1" for part in (bos, "$B", eos) if part)
    added = [(token, vocabulary[token]) for token in {bos, eos} if token]
    return processors.TemplateProcessing(one, f"{one} {other}", added)


def find_scheme(path: Path, metadata: dict[str, Any]) -> TokenizerScheme:
    known = schemes()
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model == "gpt2" and pre in known:
        return known[pre]
    raise UnsupportedModel(
        f"{path} has a tokenizer of kind {model!r} / {pre!r}; GGUF files are supported with 'gpt2' "
        f"and {', '.join(map(repr, known))} only, so use the model's directory."
    )


def _vocabulary(path: Path, metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise invalid_file(path, "it has no vocabulary")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise invalid_file(path, "its vocabulary and its token types differ in length")
    if not tokens or len(set(tokens)) != len(tokens):
        raise invalid_file(path, "its vocabulary is empty or has duplicate tokens")
    return tokens, types


def _added(
    tokens: list[str], types: list[int], wanted: set[int], *, special: bool
) -> list[AddedToken]:
    found = (token for token, kind in zip(tokens, types, strict=True) if kind in wanted)
    return [AddedToken(token, special=special, normalized=False) for token in found]


def _token(metadata: dict[str, Any], role: str) -> str | None:
    """The text of the token with this role, if the file has a valid id for it."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
