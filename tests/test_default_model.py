"""The default model answers, and answers the same from a saved cache in a new process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keepwarm.engine.generate import LiveCache, generate
from keepwarm.engine.prompt import tokenize
from keepwarm.kv.files import export_prompt_cache

ROOT = Path(__file__).parent.parent
QUESTION = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
NEXT = {"role": "user", "content": "And of Italy?"}

# Keepwarm comes before MLX, so that the new process has the fast BLAS too.
NEW_PROCESS = """
import json, sys
from dataclasses import replace
import keepwarm
from keepwarm.engine.generate import LiveCache, generate
from keepwarm.kv.files import import_prompt_cache
from tests.kit.runs import FedCounter

file, prompts = sys.argv[1], json.load(sys.stdin)
model = keepwarm.load("smollm2")
answers = []
for prompt in prompts:
    counted = replace(model, module=FedCounter(model.module))
    cache = LiveCache(counted)
    found = import_prompt_cache(file)
    cache.layers, cache.tokens = found.caches, json.loads(found.metadata["tokens"])
    made = [step.token for step in generate(counted, prompt, cache=cache, max_tokens=32)]
    answers.append([made, counted.module.fed - (len(made) - 1)])
print(json.dumps(answers))
"""


def answer(model, prompt, cache=None):
    """The greedy answer: its tokens and its text."""
    steps = list(generate(model, prompt, cache=cache, max_tokens=32))
    return [step.token for step in steps], "".join(step.text for step in steps)


@pytest.fixture(scope="module")
def first(smollm2):
    """The prompt, the answer and the cache that they left."""
    prompt = tokenize(smollm2.tokenizer, [QUESTION])
    cache = LiveCache(smollm2)
    return prompt, *answer(smollm2, prompt, cache), cache


def test_the_capital_of_france(first):
    _, _, text, _ = first
    assert text == "The capital of France is Paris."


def test_the_same_answer_from_a_saved_cache_in_a_new_process(smollm2, first, tmp_path):
    """The question again prefills one token, the next question only what is new."""
    prompt, tokens, text, cache = first
    said = {"role": "assistant", "content": text}
    longer = tokenize(smollm2.tokenizer, [QUESTION, said, NEXT])
    held = cache.tokens
    assert longer[: len(held)] == held
    file = tmp_path / "france.safetensors"
    export_prompt_cache(file, cache.layers, {"tokens": json.dumps(held)})
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, file],
        input=json.dumps([prompt, longer]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    again, following = json.loads(done.stdout)
    assert again == [tokens, 1]
    assert following == [answer(smollm2, longer)[0], len(longer) - len(held)]
