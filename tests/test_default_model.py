"""The default model answers, and answers the same from a saved cache in a new process."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import keepwarm
from keepwarm import config
from keepwarm.cache.store import Budgets
from keepwarm.kv.files.prompt_cache import export_prompt_cache
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Choice
from tests.kit.engines import tokens_of

ROOT = Path(__file__).parent.parent
QUESTION = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
NEXT = {"role": "user", "content": "And of Italy?"}

# Keepwarm comes before MLX, so that the new process has the fast BLAS too.
NEW_PROCESS = """
import json, sys
from dataclasses import replace
import keepwarm
from keepwarm.kv.files.prompt_cache import import_prompt_cache
from tests.kit.runs import FedCounter
from tests.test_default_model import ask, memory_store, tokens_of

home, file = sys.argv[1:]
model = keepwarm.load("smollm2")
model = replace(model, module=FedCounter(model.module))
prompts, answers = json.load(sys.stdin), []
with memory_store(home) as store:
    found = import_prompt_cache(file)
    kw = store.attach(model.module, source=model.path)
    kw.commit(json.loads(found.metadata["tokens"]), found.caches)
    with keepwarm.Engine(model, store) as engine:
        engine.prepare(keepwarm.Request(prompt=prompts[0]))  # the first looks at the caches
        for prompt in prompts:
            before = model.module.fed
            made = tokens_of(ask(engine, prompt))
            answers.append([made, model.module.fed - before - len(made)])
print(json.dumps(answers))
"""


def memory_store(home: Path | str) -> keepwarm.Store:
    """A store without files; the home is for the digest of the weights."""
    settings = config.load({"KEEPWARM_HOME": str(home)})
    return keepwarm.Store(budgets=Budgets(disk=False), settings=settings)


def ask(engine: keepwarm.Engine, prompt: Sequence[int], **wishes: Any) -> Choice:
    """The greedy answer to these tokens."""
    sampling = keepwarm.Sampling(max_tokens=32, temperature=0)
    request = keepwarm.Request(prompt=prompt, sampling=sampling, **wishes)
    return engine.submit(request).result().choices[0]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def engine(smollm2, home):
    with memory_store(home) as store, keepwarm.Engine(smollm2, store) as engine:
        yield engine


@pytest.fixture(scope="module")
def first(engine):
    """The prompt and its answer."""
    prompt = engine.prepare(keepwarm.Request(messages=[QUESTION])).tokens
    return prompt, ask(engine, prompt)


def test_the_capital_of_france(first):
    _, choice = first
    assert choice.text == "The capital of France is Paris."


def test_the_same_answer_from_a_saved_cache_in_a_new_process(engine, first, home, tmp_path):
    """The question again prefills one token, the next question only what is new."""
    prompt, choice = first
    said = {"role": "assistant", "content": choice.text}
    plain = Prompter(engine.model.tokenizer)  # it knows nothing of the answer but its text
    longer = plain.render(keepwarm.Request(messages=[QUESTION, said, NEXT])).tokens
    held = [*prompt, *tokens_of(choice)]
    kw = engine.store.attach(engine.model.module, source=engine.model.path)
    caches, rest = kw.restore(longer)
    assert longer == held + rest
    file = tmp_path / "france.safetensors"
    export_prompt_cache(file, caches, {"tokens": json.dumps(held)})
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, home, file],
        input=json.dumps([prompt, longer]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    again, following = json.loads(done.stdout)
    assert again == [tokens_of(choice), 1]
    cold = ask(engine, longer, policy=keepwarm.Policy.NO_STORE)
    assert following == [tokens_of(cold), len(rest)]
