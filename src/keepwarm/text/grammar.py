"""Which tokens may come next in an answer that must be JSON, or follow a schema or a grammar."""

from __future__ import annotations

import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import takewhile
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from keepwarm.errors import BadInput
from keepwarm.text.request import Format

TokenMask: TypeAlias = NDArray[np.bool_]  # (vocabulary,): the tokens that are allowed
Trial: TypeAlias = Callable[[str], None]

MAX_COMPILED = 16  # of one tenant, in the LRU cache
MAX_TENANTS = 64
MAX_CHARACTERS = 256 << 10  # of a schema or a grammar
MAX_GBNF = 16 << 10  # characters; converting a grammar four times as long takes seconds
LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
ANY_OBJECT = {"type": "object"}
# Keywords by which an object's keys are not only those of its `properties`.
OPEN_KEYS = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"),
    *("allOf", "anyOf", "oneOf", "if"),
}
JOINING = {"$ref", "allOf", "anyOf", "oneOf"}  # their parts may describe one object together
_QUOTED = re.compile(r'"([\w$-]+)"')
# Bounded: some models would write whitespace until max_tokens.
BLANKS = r"[ \n\r\t]{1,64}"


class GrammarMatcher:
    """The position of one answer in its grammar. Not thread-safe.

    The grammar applies after the tokens `after`, the end of the model's reasoning. Before them
    every token but a stop token is allowed.
    """

    def __init__(
        self, matcher: LLMatcher, free: TokenMask, after: Sequence[int] = (), begun: bool = False
    ) -> None:
        self._matcher = matcher
        self._free = free  # the mask before the grammar begins
        self._after = tuple(after)
        self._last: deque[int] = deque(maxlen=len(self._after))
        self._begun = begun or not self._after
        self._forced: list[int] = []  # what must come next, as far as it was found

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keywords of its JSON schemas that the grammar does not express."""
        warnings = " ".join(self._matcher.get_grammar_warnings())
        found = [*_QUOTED.findall(warnings), *(["format"] if "Unknown format" in warnings else ())]
        return tuple(dict.fromkeys(found))

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: only a stop token can follow."""
        return self._begun and self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, token: int) -> None:
        """Take the chosen token. If it is not allowed, the next `mask` raises."""
        if self._begun:
            self._matcher.consume_token(token)
            self._forced = self._forced[1:] if self._forced[:1] == [token] else []
            return
        self._last.append(token)
        self._begun = tuple(self._last) == self._after

    def mask(self) -> TokenMask:
        """The tokens that may come next. Raises BadInput if there are none."""
        if not self._begun:
            return self._free
        allowed = _unpack(self._matcher.compute_bitmask(), self._free.size)
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error())
            raise BadInput(
                f"The answer cannot follow its format any further ({reason}); change the format."
            )
        if not allowed.any():
            raise BadInput("The answer's format allows none of this model's tokens; change it.")
        return allowed

    def fitted(self, draft: Sequence[int]) -> Sequence[int]:
        """A draft up to its first token that is not allowed; the tokens that must come next, where
        these are more.
        """
        if not self._begun:
            return draft
        self._forced = self._forced or self._find_forced()
        n_allowed = self._matcher.validate_tokens(list(draft))
        return self._forced if len(self._forced) > n_allowed else draft[:n_allowed]

    def _find_forced(self) -> list[int]:
        """Up to a token that the model does not have. Takes long if they are many."""
        found = self._matcher.compute_ff_tokens()
        return list(takewhile(lambda token: token < self._free.size, found))

    def copy(self) -> GrammarMatcher:
        """A matcher for another answer, at the same position."""
        twin = GrammarMatcher(self._matcher.deep_copy(), self._free, self._after, self._begun)
        twin._last.extend(self._last)
        return twin


class Grammars:
    """Compiles and caches the grammars of one model. Thread-safe.

    The first call builds llguidance's view of the vocabulary, which takes up to a second.
    """

    def __init__(self, tokenizer: Any, n_vocab: int, stop_tokens: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab  # of the model, often padded beyond the tokenizer's
        self._stop_tokens = sorted(set(stop_tokens))
        self._vocabulary: tuple[LLTokenizer, TokenMask] | None = None
        self._lock = Lock()
        self._reading = Lock()  # the vocabulary, while what is compiled can be found
        self._compiled: OrderedDict[str, OrderedDict[str, LLMatcher | BadInput]] = OrderedDict()

    def compile(
        self,
        wanted: Format,
        after: Sequence[int] = (),
        preamble: str = "",
        *,
        tenant: str = "",
        trial: Trial | None = None,
    ) -> GrammarMatcher | None:
        """A matcher at the start of this format; None if any text will do.

        The grammar applies after the tokens `after`. `preamble` is a Lark grammar for what comes
        before the answer; it refers to the answer as `@answer`. Raises BadInput, with the reason,
        for a schema or grammar that cannot be compiled. `trial` is called before a grammar is
        compiled, and raises BadInput if that takes too long. Tenants share no compiled grammars.
        """
        text = _grammar_of(wanted)
        if text is None:
            return None
        text = _with_preamble(preamble, text, wanted) if preamble else text
        if len(text) > MAX_CHARACTERS:
            raise BadInput(
                f"The answer's format is {len(text):,} characters long; send at most "
                f"{MAX_CHARACTERS:,}."
            )
        found = self._cached(tenant, text)
        if found is None:
            found = self._outcome(text, trial)
            self._keep(tenant, text, found)
        if isinstance(found, BadInput):
            raise BadInput(*found.args)
        return GrammarMatcher(found.deep_copy(), self._view()[1], after)

    def load(self) -> bool:
        """Read the vocabulary now, if it can be read; False if it was before."""
        if self._vocabulary is not None:
            return False
        with suppress(BadInput):
            self._view()
        return True

    def _outcome(self, text: str, trial: Trial | None) -> LLMatcher | BadInput:
        """The compiled grammar, or why there is none: it is not tried again."""
        try:
            if trial is not None:
                trial(text)
            return self.compile_text(text)
        except BadInput as error:
            return error

    def _cached(self, tenant: str, text: str) -> LLMatcher | BadInput | None:
        with self._lock:
            own = self._compiled.get(tenant)
            if own is None or text not in own:
                return None
            self._compiled.move_to_end(tenant)
            own.move_to_end(text)
            return own[text]

    def _keep(self, tenant: str, text: str, found: LLMatcher | BadInput) -> None:
        with self._lock:
            own = self._compiled.setdefault(tenant, OrderedDict())
            own[text] = found
            if len(own) > MAX_COMPILED:
                own.popitem(last=False)
            if len(self._compiled) > MAX_TENANTS:
                self._compiled.popitem(last=False)

    def compile_text(self, text: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._view()[0], text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a schema that is nothing but itself fails only here
        if matcher.is_error():
            reason = _one_line(matcher.get_error())
            raise BadInput(f"The answer's format cannot be compiled ({reason}); change it.")
        return matcher

    def _view(self) -> tuple[LLTokenizer, TokenMask]:
        """llguidance's tokenizer, and the mask before a grammar begins."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            return self._vocabulary

    def _read_vocabulary(self) -> tuple[LLTokenizer, TokenMask]:
        backend = copy(getattr(self._tokenizer, "backend_tokenizer", None))
        if backend is None:
            raise _unusable("it is not a fast tokenizer")
        backend.no_padding()
        backend.no_truncation()
        ids = list(backend.get_vocab(with_added_tokens=True).values())
        size = max(self._n_vocab, max(ids) + 1)
        known = np.isin(np.arange(self._n_vocab), ids)
        known[[i for i in self._stop_tokens if i < self._n_vocab]] = False
        ends = [i for i in self._stop_tokens if i < size]
        try:
            return LLTokenizer(backend.to_str(), size, ends or None), known
        except ValueError as error:
            raise _unusable(_one_line(str(error))) from error


def _unusable(why: str) -> BadInput:
    return BadInput(
        f"This model's tokenizer does not support grammars ({why}); ask for plain text instead."
    )


def _grammar_of(wanted: Format) -> str | None:
    """The format as llguidance's grammar; the order of a schema's properties is kept."""
    schema = wanted.schema if wanted.schema is not None else ANY_OBJECT if wanted.json else None
    if wanted.grammar is None:
        return None if schema is None else _schema_grammar(schema, wanted.strict)
    if schema is not None:
        raise BadInput("The answer's format is both JSON and a grammar; choose one.")
    return LLMatcher.grammar_from_lark(_lark(wanted.grammar))


def _lark(grammar: str) -> str:
    """Lark as it is; GBNF, the language of llama.cpp, converted."""
    if "::=" not in grammar or LARK.search(grammar):
        return grammar
    if len(grammar) > MAX_GBNF:
        raise BadInput(
            f"The grammar is {len(grammar):,} characters of GBNF; send at most {MAX_GBNF:,}, "
            "or write it in Lark."
        )
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # it raises all kinds of errors
        reason = _one_line(str(error))
        raise BadInput(f"The GBNF grammar cannot be read ({reason}); change it.") from error


def _with_preamble(preamble: str, text: str, wanted: Format) -> str:
    """The answer's grammar nested in the preamble's, so that their rule names cannot clash."""
    is_lark = wanted.grammar is not None
    answer = {"lark_grammar": text} if is_lark else json.loads(text)["grammars"][0]
    both = [{"name": "preamble", "lark_grammar": preamble}, {**answer, "name": "answer"}]
    return json.dumps({"grammars": both})


def closed(schema: Any) -> Any:
    """The schema with no other keys than it names, where it does not say: none are invented.

    As it is if some object is joined of several parts: one that is closed fits no other. An object
    that names no keys, or requires others than it names, stays open.
    """
    return schema if _joins(schema) else _closed(schema)


def _joins(part: Any) -> bool:
    if isinstance(part, list):
        return any(map(_joins, part))
    if not isinstance(part, Mapping):
        return False
    adds = JOINING & part.keys() and {"properties", "required"} & part.keys()
    return bool(adds or "allOf" in part) or any(map(_joins, part.values()))


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """None if they are not an object, as clients may send them."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """The names that are texts, and none if they are no list."""
    found = schema.get("required")
    names = found if isinstance(found, Sequence) and not isinstance(found, str) else ()
    return [name for name in names if isinstance(name, str)]


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    own = properties_of(schema)
    kept = {key: _closed_part(key, value) for key, value in schema.items()}
    names_all = own and set(required_of(schema)) <= own.keys()
    if names_all and not OPEN_KEYS & schema.keys():
        kept["additionalProperties"] = False
    return kept


def _closed_part(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _closed(each) for name, each in value.items()}
    return _closed(value) if key in ("items", "prefixItems", "anyOf", "oneOf") else value


def _schema_grammar(schema: Any, is_strict: bool) -> str:
    try:
        text = json.dumps(closed(schema), allow_nan=False)
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": BLANKS, "lenient": not is_strict}
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"The answer's JSON schema is not valid JSON ({error}).") from error


def _unpack(bits: bytes, n_vocab: int) -> TokenMask:
    packed = np.frombuffer(bits, np.uint8)
    return np.unpackbits(packed, count=n_vocab, bitorder="little").view(np.bool_)


def _one_line(reason: str) -> str:
    """llguidance's reason without the lines that quote the grammar."""
    lines = [line.strip() for line in reason.splitlines()]
    kept = [line for line in lines if line.strip("^ ") and " | " not in line]
    return " ".join(kept)[:300].rstrip(".:")
