"""A tokenizer without mlx-lm around it, for a process that must not load MLX."""

from __future__ import annotations

from typing import Any

NAMES = (
    *("has_chat_template", "has_thinking", "think_start", "think_end", "eos_token_ids"),
    *("has_tool_calling", "tool_call_start", "tool_call_end"),
)


class PlainTokenizer:
    """What rendering needs of mlx-lm's TokenizerWrapper; the rest is the inner tokenizer's."""

    def __init__(self, inner: Any, thinking_option: str, values: dict[str, Any]) -> None:
        self._inner = inner
        self._thinking_option = thinking_option
        self.__dict__.update(values)

    @classmethod
    def of(cls, wrapper: Any) -> PlainTokenizer | None:
        """None if mlx-lm itself renders the prompts of this model."""
        if wrapper._chat_template is not None:
            return None
        values = {name: getattr(wrapper, name) for name in NAMES}
        return cls(wrapper._tokenizer, wrapper._thinking_kwarg, values)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        """As TokenizerWrapper does; tests/contract compares them."""
        if "enable_thinking" in options:
            options[self._thinking_option] = options.pop("enable_thinking")
        options.setdefault(self._thinking_option, self.__dict__["has_thinking"])
        return self._inner.apply_chat_template(*arguments, **options, return_dict=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":  # not there while it is unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)
