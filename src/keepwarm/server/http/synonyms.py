"""What clients of other servers ask for by other names, on every API; and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AliasChoices, BeforeValidator, Field

from keepwarm.errors import BadField
from keepwarm.server.http.body import MAX_MEMBERS, Checked, JsonInput, Refused, TextOnly, TopP
from keepwarm.text.request import Format
from keepwarm.text.sampling_rules import MAX_STOPS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
NOT_THINKING = frozenset({"none", "minimal"})
SWITCHED = {"enabled": True, "disabled": False}  # otherwise the template decides
MAX_TOKENS = ("max_tokens", "n_predict", "max_new_tokens")
STOP = AliasChoices("stop", "stop_sequences")
REPETITION_PENALTY = AliasChoices("repetition_penalty", "repeat_penalty")
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Stops: TypeAlias = str | Annotated[Checked[str], Field(max_length=MAX_STOPS)]


class UnsupportedFields(JsonInput):
    """What other servers take to constrain an answer, and this one cannot do."""

    stop_token_ids: Refused = None
    min_tokens: Refused = None
    bad_words: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    modalities: TextOnly = None


# Sampling


class SamplingFields(JsonInput):
    """How an answer is drawn, as OpenAI's and Anthropic's APIs take it."""

    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 is greedy. Default: see `/v1/models`."
    )
    top_p: TopP | None = None
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=10, validation_alias=REPETITION_PENALTY
    )
    ignore_eos: bool | None = Field(
        default=None, description="The answer goes on up to its limit, as benchmarks want it."
    )


class OpenAISampling(SamplingFields):
    stop: Stops | None = Field(default=None, validation_alias=STOP)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


# Formats


class JsonSchema(JsonInput):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="An answer always follows the schema.")


class ResponseFormat(JsonInput):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="The same without a name, as llama.cpp takes it."
    )

    def ignored(self) -> Iterable[str]:
        schemas = {"json_schema": self.json_schema, "schema": self.schema_}
        return [name for name, given in schemas.items() if given and self.type == "text"]


class StructuredOutputs(JsonInput):
    """vLLM's: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[Checked[str], Field(min_length=1, max_length=MAX_MEMBERS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GuidedOutputs(JsonInput):
    """vLLM's fields before `structured_outputs`."""

    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Checked[str], Field(min_length=1, max_length=MAX_MEMBERS)] | None = (
        None
    )
    guided_grammar: str | None = None


class FormatFields(GuidedOutputs):
    """The fields by which any server takes the format of an answer."""

    response_format: ResponseFormat | None = Field(default=None, description="As OpenAI takes it.")
    grammar: str | None = Field(default=None, description="Grammar of the answer, in GBNF or Lark.")
    json_schema: dict[str, Any] | None = Field(default=None, description="As llama.cpp takes it.")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="As vLLM takes it."
    )
    format: Literal["json", ""] | dict[str, Any] | None = Field(
        default=None, description="`json`, or a JSON schema, as Ollama takes it."
    )


def format_of(body: FormatFields, **own: Format | None) -> Format | None:
    """The one format that a request asks for, by any of these fields or the API's `own`."""
    wanted = {
        "grammar": Format(grammar=body.grammar) if body.grammar else None,
        "json_schema": None if body.json_schema is None else Format(schema=body.json_schema),
        "structured_outputs": _structured(body.structured_outputs),
        "guided_json": _structured(_guided(body)),
        "format": _ollama_format(body.format),
        "response_format": _response_format(body.response_format),
        **own,
    }
    present = {name: each for name, each in wanted.items() if each is not None}
    if len(present) > 1:
        names = " and ".join(present)
        raise BadField(f"{names} cannot be combined; send one.", next(iter(present)))
    return next(iter(present.values()), None)


def _response_format(wanted: ResponseFormat | None) -> Format | None:
    if wanted is None or wanted.type == "text":
        return None
    named = wanted.json_schema or JsonSchema()
    schema = wanted.schema_ if named.schema_ is None else named.schema_
    if schema is None and wanted.type == "json_schema":
        where = "response_format.json_schema.schema"
        raise BadField(f"{where} is missing; the format json_schema needs it.", where)
    return Format(json=True, schema=schema, strict=bool(named.strict))


def _guided(body: GuidedOutputs) -> StructuredOutputs | None:
    given = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    if all(each is None for each in given.values()):
        return None
    return StructuredOutputs.model_validate(given)


def _ollama_format(given: str | dict[str, Any] | None) -> Format | None:
    if not given:
        return None
    return Format(json=True, schema=given if isinstance(given, dict) else None)


def _structured(wanted: StructuredOutputs | None) -> Format | None:
    if wanted is None:
        return None
    forms = {
        "json": None if wanted.json_ is None else Format(schema=_schema(wanted.json_)),
        "regex": None if wanted.regex is None else Format(grammar=_matching(wanted.regex)),
        "choice": None if wanted.choice is None else Format(grammar=_one_of(wanted.choice)),
        "grammar": None if wanted.grammar is None else Format(grammar=wanted.grammar),
        "json_object": Format(json=True) if wanted.json_object else None,
    }
    present = [each for each in forms.values() if each is not None]
    if len(present) != 1:
        raise BadField(
            f"structured_outputs needs exactly one of {', '.join(forms)}.", "structured_outputs"
        )
    return present[0]


def _schema(schema: dict[str, object] | str) -> dict[str, object]:
    if isinstance(schema, dict):
        return schema
    where = "structured_outputs.json"
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise BadField(f"{where} is not a JSON schema ({error}); change it.", where) from error
    if not isinstance(parsed, dict):
        raise BadField(f"{where} is not a JSON schema; send an object.", where)
    return parsed


def _matching(regex: str) -> str:
    """A grammar of the texts that match a regular expression from end to end."""
    plain = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(r"(?s)\\.|[/\n]", lambda found: plain.get(found[0], found[0]), regex)
    return f"start: /{escaped}/"


def _one_of(texts: list[str]) -> str:
    return f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"


# Thinking


def _effort_alone(given: object) -> object:
    return {"effort": given} if isinstance(given, str) else given


class ReasoningOptions(JsonInput):
    effort: str | None = None


class ThinkingOptions(JsonInput):
    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]


class ThinkingFields(JsonInput):
    """The fields by which any server lets a model think, and how hard."""

    reasoning_effort: str | None = None
    reasoning: Annotated[ReasoningOptions | None, BeforeValidator(_effort_alone)] = Field(
        default=None, description="`effort`, or that alone, is another `reasoning_effort`."
    )
    think: bool | Effort | None = Field(
        default=None, validation_alias=AliasChoices("think", "enable_thinking")
    )
    thinking: bool | Effort | ThinkingOptions | None = None


class WantedThinking(NamedTuple):
    switch: bool | None  # None: the template decides
    effort: str | None

    @property
    def options(self) -> dict[str, Any]:
        """For the chat template."""
        return {} if self.effort is None else {"reasoning_effort": self.effort}


def thinking_of(body: ThinkingFields) -> WantedThinking:
    """What switches thinking counts before how hard it is to be."""
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    switch: bool | None = None
    for given in (body.think, body.thinking):
        if isinstance(given, str):
            effort = effort or ("high" if given == "max" else given)
        elif switch is None:
            switch = SWITCHED.get(given.type) if isinstance(given, ThinkingOptions) else given
    if switch is None and effort is not None:
        switch = effort not in NOT_THINKING
    return WantedThinking(switch, effort)
