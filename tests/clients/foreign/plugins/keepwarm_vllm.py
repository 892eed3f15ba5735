"""A pytest plugin for vLLM's server tests, without vLLM: another address, another model.

What it changes:

- the class that starts a server, in `tests.utils`, is one of ours that names a server of ours; its
  clients do not try again
- tests with `function_call`, `structured`, `json`, `n_param`, `parallel`, `cancel` or `max_tokens`
  in their names go to a server whose words are random, the others to one with scripted answers
- `vllm.tokenizers.get_tokenizer` gives our model's tokenizer, and `vllm.config.ModelConfig` the
  size of its vocabulary
- everything else of `vllm`, `torch`, `tests.utils` and `tests.conftest` is a stand-in that does
  nothing, so that a test that needs it cannot pass
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType, TracebackType
from typing import Any, Self
from unittest.mock import MagicMock

import openai

URL = os.environ["KEEPWARM_LARGE_URL"]
RANDOM_URL = os.environ["KEEPWARM_RANDOM_URL"]
# Parts of the names of tests whose answers no script can give: forced, many, or without an end.
UNSCRIPTED = ("function_call", "structured", "json", "n_param", "parallel", "cancel", "max_tokens")
MODEL = os.environ["KEEPWARM_LARGE_MODEL"]
KEY = "token-abc123"
ABSENT = ("vllm", "torch", "tests.utils", "tests.conftest")


class RemoteOpenAIServer:
    """The parts of vLLM's class that tests call."""

    DUMMY_API_KEY = KEY

    def __init__(self, model: str, *arguments: Any, **options: Any) -> None:
        self.model = model

    @property
    def url_root(self) -> str:
        """That of the server for the running test."""
        running = os.environ["PYTEST_CURRENT_TEST"]
        return RANDOM_URL if any(part in running for part in UNSCRIPTED) else URL

    @property
    def host(self) -> str:
        return self.url_root.removeprefix("http://").split(":")[0]

    @property
    def port(self) -> str:
        return self.url_root.rpartition(":")[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """The server goes on."""

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        url = self.url_for("v1")
        return openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url_root, api_key=KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url=self.url_root, api_key=KEY, max_retries=0, **options
        )


class ModelConfig:
    """What tests ask of vLLM's: the size of the vocabulary."""

    def __init__(self, **options: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(get_tokenizer())


def get_tokenizer(*arguments: Any, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


GIVEN = {
    ("vllm.tokenizers", "get_tokenizer"): get_tokenizer,
    ("vllm.config", "ModelConfig"): ModelConfig,
}


class StandIn(ModuleType):
    """A module of which every name is there and none does anything."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "pytest")):
            raise AttributeError(name)
        if (self.__name__, name) in GIVEN:
            return GIVEN[self.__name__, name]
        is_server = name.startswith("Remote") and name.endswith(("Server", "ServerCustom"))
        return RemoteOpenAIServer if is_server else MagicMock(name=f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_absent = any(name == each or name.startswith(f"{each}.") for each in ABSENT)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = module.__name__  # pytest asks a conftest for it


sys.meta_path.insert(0, Finder())
