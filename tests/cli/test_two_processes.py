"""A second process restores the prompt from disk: same text, one token prefilled."""

import json
import random

import pytest

from tests.cli import keepwarm, keepwarm_here
from tests.kit.checkpoints import write_checkpoint
from tests.store.kit import files_under

WORDS = ("the", "of", "agent", "cache", "block", "token", "store", "answer", "river", "city")


def prompt_of_words(n_words, seed=0):
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(n_words))


def run(home, model, prompt, *options, start=keepwarm_here):
    done = start(
        "run", "-", "--model", model, "--max-tokens", "8", "--json", *options,
        home=home, stdin=prompt.encode(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    answer = json.loads(done.stdout)
    return answer["text"], answer["usage"]


def check_two_processes(home, model, prompt, n_at_least):
    """The first in a process of its own, the others in this one."""
    text, cold = run(home, model, prompt, start=keepwarm)
    assert cold["prompt_tokens"] >= n_at_least
    assert (cold["cached_tokens"], cold["prefilled_tokens"]) == (0, cold["prompt_tokens"])
    warm_text, warm = run(home, model, prompt)
    assert warm["cached_tokens"] == cold["prompt_tokens"] - 1
    assert warm["prefilled_tokens"] == 1
    assert warm["exact"]
    assert warm_text == text == run(home, model, prompt, "--no-cache")[0]

    records = sorted(files_under(home / "store" / "blocks"))
    victim = random.Random(1).choice(records)
    data = bytearray(victim.read_bytes())
    data[random.Random(2).randrange(len(data))] ^= 0x10
    victim.write_bytes(data)
    mended_text, mended = run(home, model, prompt)
    assert mended_text == text
    assert mended["cached_tokens"] < warm["cached_tokens"]
    assert run(home, model, prompt)[1]["cached_tokens"] == warm["cached_tokens"], "it was kept anew"


def test_a_tiny_model(tmp_path):
    model = write_checkpoint(tmp_path / "model", n_context=4096)
    check_two_processes(tmp_path, model, prompt_of_words(400), 1500)


@pytest.mark.soak
def test_the_default_model(tmp_path):
    check_two_processes(tmp_path, "smollm2", prompt_of_words(1450), 1400)


def test_prompts_that_share_628_tokens(tmp_path):
    """Reuse is exact to the token, not rounded to 256-token blocks."""
    from keepwarm.models.load import load
    from keepwarm.prefix.blocks import common_prefix
    from keepwarm.text.prompt import Prompter
    from keepwarm.text.request import Request

    model = write_checkpoint(tmp_path / "model", n_context=4096)
    shared = prompt_of_words(150)
    prompts = [
        f"{shared} first {prompt_of_words(20, 1)}",
        f"{shared} second {prompt_of_words(25, 2)}",
    ]
    prompter = Prompter(load(str(model)).tokenizer)
    asked = [Request(messages=[{"role": "user", "content": p}]) for p in prompts]
    n_shared = common_prefix(*(prompter.render(request).tokens for request in asked))
    assert n_shared % 256
    assert n_shared > 512
    run(tmp_path, model, prompts[0])
    assert run(tmp_path, model, prompts[1])[1]["cached_tokens"] == n_shared
