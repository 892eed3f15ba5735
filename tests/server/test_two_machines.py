"""Two processes with homes of their own and a place they share."""

import json

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from keepwarm.remote.opening import compute_class
from tests.kit.checkpoints import write_checkpoint
from tests.kit.models import COMMON, CONFIGS, tiny
from tests.kit.places import KINDS
from tests.kit.runs import prompt_of
from tests.server.processes import PATIENT, served

WAIT_S = 600.0
WHOLE, OPEN_END, OTHER = prompt_of(2048), prompt_of(2100, seed=2), prompt_of(2236, seed=3)
PROMPTS = [WHOLE, OPEN_END, [*OTHER[:2136], *prompt_of(20, seed=4)]]  # parts inside a block
N_NEW = [1, 1, 20]
N_USES = 2  # at the second it is learned where windows and states are needed


def post(server, path, prompt, **options):
    body = {"prompt": list(prompt), **options}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=WAIT_S)
    assert answer.is_success, answer.text
    return answer.json()


def answers(server):
    """The text of each prompt's answer, and how many tokens were computed for it."""
    said = [post(server, "/v1/completions", p, max_tokens=6, temperature=0) for p in PROMPTS]
    texts = [one["choices"][0]["text"] for one in said]
    return texts, [one["keepwarm"]["recomputed"] for one in said]


def checkpoint_of(architecture, directory):
    """A tiny model that `keepwarm serve` loads."""
    write_checkpoint(directory)
    words = json.loads((directory / "config.json").read_text())
    kept = {name: words[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = {"model_type": architecture, **COMMON, **CONFIGS[architecture], **kept}
    (directory / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(tiny(architecture, **kept).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory


def flip_a_byte_of_each(place, home):
    """In the last tensor of every record."""
    for path in (place / compute_class(home)).rglob("*.*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mamba"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_computes_only_what_is_new(places, tmp_path, kind, architecture):
    """On a window and on a state model: as little as the first would, from its disk."""
    checkpoint, place = checkpoint_of(architecture, tmp_path / "model"), tmp_path / "shared"
    place.mkdir()
    with served(checkpoint, tmp_path / "cold", command=PATIENT) as cold:
        expected, _ = answers(cold)
    with places[kind](place) as url:
        with served(checkpoint, tmp_path / "a", command=PATIENT, KEEPWARM_REMOTE=url) as a:
            for prompt in (WHOLE, OPEN_END, OTHER):
                for _ in range(N_USES):
                    post(a, "/v1/completions", prompt, max_tokens=1)
                told = post(a, "/v1/cache/prefill/completions", prompt)
                assert told["shared"] == told["kept"] > 0
        with served(checkpoint, tmp_path / "a", command=PATIENT) as a:
            texts, from_disk = answers(a)
            assert texts == expected
        with served(checkpoint, tmp_path / "b", command=PATIENT, KEEPWARM_REMOTE=url) as b:
            texts, from_afar = answers(b)
        if kind == "directory":
            flip_a_byte_of_each(place, tmp_path)
            with served(checkpoint, tmp_path / "c", command=PATIENT, KEEPWARM_REMOTE=url) as c:
                assert answers(c) == (expected, [len(prompt) for prompt in PROMPTS])
    assert texts == expected
    assert from_afar == from_disk
    assert architecture != "llama" or from_afar == N_NEW
