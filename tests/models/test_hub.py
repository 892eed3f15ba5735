"""Models by hub id, against a server with the hub's file protocol.

Each look runs in a process of its own: the hub's library reads its environment once, on import.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from keepwarm.models import hub
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint
from tests.kit.hub_server import serving

UNMEASURED = {"KEEPWARM_BLAS": "none", "KEEPWARM_BLAS_THREADS": "1"}  # saves seconds a process
TOKENS = [5, 17, 230, 9, 44]
PRELUDE = """
import json, sys
from keepwarm.errors import KeepwarmError
def say(**answer):
    print(json.dumps(answer))
"""
LOAD = """
import mlx.core as mx
from keepwarm.models.load import load
try:
    model = load(sys.argv[1])
    logits = model.module(mx.array([json.loads(sys.argv[2])]))
    say(path=str(model.path), sum=logits.sum().item(), eos=sorted(model.tokenizer.eos_token_ids))
except KeepwarmError as error:
    say(error=type(error).__name__, text=str(error))
"""
FETCH = """
from keepwarm.models import hub
try:
    path = str(hub.fetch(sys.argv[1]))
    say(path=path, all={name: str(path) for name, path in hub.all_cached().items()})
except KeepwarmError as error:
    say(error=type(error).__name__, text=str(error), cached=str(hub.cached(sys.argv[1])))
"""
LISTED = """
from keepwarm.models import hub
say(all={name: str(path) for name, path in hub.all_cached().items()})
"""
GGUF = LISTED.replace("all_cached", "all_gguf")


@pytest.fixture
def repo(tmp_path):
    """A model, and files that a text model does not need."""
    directory = write_checkpoint(tmp_path / "repo")
    for name in ("README.md", "pytorch_model.bin", "modeling.py", "model.Q4_0.gguf"):
        (directory / name).write_text("not needed")
    return directory


@pytest.fixture
def ask(tmp_path):
    """Runs a program with its own hub cache and returns its output."""

    def run(program, name, endpoint):
        outside = ("HF_", "HUGGING", "KEEPWARM_")
        mine = {key: value for key, value in os.environ.items() if not key.startswith(outside)}
        mine |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        mine |= {"KEEPWARM_HOME": str(tmp_path / "home"), **UNMEASURED}
        command = [sys.executable, "-c", PRELUDE + program, name, json.dumps(TOKENS)]
        done = subprocess.run(command, env=mine, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_load_by_id_then_again_without_network(repo, ask):
    with serving({"org/tiny": repo}) as server:
        first = ask(LOAD, "org/tiny", server.url)
    assert first["sum"] == pytest.approx(load(str(repo)).module(mx.array([TOKENS])).sum().item())
    needed = {"config.json", "generation_config.json", "model.safetensors"}
    assert server.downloaded() == needed | {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in Path(first["path"]).iterdir()} == server.downloaded()
    assert ask(LOAD, "org/tiny", server.url) == first  # nobody serves that address any more


def test_fetch_brings_the_newest(repo, ask):
    with serving({"org/tiny": repo}) as server:
        old = ask(FETCH, "org/tiny", server.url)
        write_checkpoint(repo, n_context=8192)
        server.requests.clear()
        new = ask(FETCH, "org/tiny", server.url)
    assert old["path"] != new["path"]
    assert new["all"] == {"org/tiny": new["path"]}
    assert (
        json.loads(Path(new["path"], "config.json").read_text())["max_position_embeddings"] == 8192
    )
    assert "model.safetensors" not in server.downloaded()  # the same as before


def test_half_a_download_is_completed(repo, ask):
    with serving({"org/tiny": repo}) as server:
        whole = ask(FETCH, "org/tiny", server.url)
        Path(whole["path"], "tokenizer.json").unlink()
        assert ask(LOAD, "org/tiny", server.url)["path"] == whole["path"]


def test_a_damaged_file_is_downloaded_again(repo, ask):
    with serving({"org/tiny": repo}) as server:
        whole = ask(LOAD, "org/tiny", server.url)
        weights = Path(whole["path"], "model.safetensors")
        weights.write_bytes(weights.read_bytes()[:5000])
        damaged = ask(LOAD, "org/tiny", server.url)
        assert (damaged["error"], "download" in damaged["text"]) == ("BadModelFile", True)
        server.requests.clear()
        assert ask(FETCH, "org/tiny", server.url)["path"] == whole["path"]
        assert server.downloaded() == {"model.safetensors"}
        assert ask(LOAD, "org/tiny", server.url) == whole
        server.requests.clear()
        ask(FETCH, "org/tiny", server.url)
        assert server.downloaded() == set()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("tiny.Q8_0.gguf", "`hf download org/tiny tiny.Q8_0.gguf`, then name it org/tiny/tiny.Q8"),
        ("pytorch_model.bin", "MLX conversion, or another model"),
    ],
)
def test_a_repository_without_weights_that_are_read_is_refused(tmp_path, ask, weights, words):
    for name in (weights, "config.json", "README.md"):
        (tmp_path / "repo").mkdir(exist_ok=True)
        (tmp_path / "repo" / name).write_text("{}")
    with serving({"org/tiny": tmp_path / "repo"}) as server:
        answer = ask(FETCH, "org/tiny", server.url)
    assert (answer["error"], answer["cached"]) == ("UnsupportedModel", "None")
    assert words in answer["text"]
    assert server.downloaded() == set()


def test_an_interrupted_update_leaves_the_model_that_was_there(repo, ask):
    with serving({"org/tiny": repo}) as server:
        old = ask(LOAD, "org/tiny", server.url)
        write_checkpoint(repo, seed=1, n_context=8192)
        new = Path(ask(FETCH, "org/tiny", server.url)["path"])
        (new / "model.safetensors").unlink()
        foreign = new.parent / ("f" * 40)  # what another program has of a third revision
        foreign.mkdir()
        (foreign / "config.json").write_text("{}")
        branch = shutil.copytree(old["path"], new.parent / ("e" * 40))
        (new.parents[1] / "refs" / "4bit").write_text(branch.name)
    assert ask(LOAD, "org/tiny", server.url) == old  # nobody serves that address any more
    assert ask(LISTED, "org/tiny", server.url) == {"all": {"org/tiny": old["path"]}}


def test_unknown_id_is_refused(repo, ask):
    with serving({"org/tiny": repo}) as server:
        answer = ask(LOAD, "org/tinny", server.url)
    assert answer["error"] == "UnknownModel"
    assert "org/tinny" in answer["text"]
    assert "\n" not in answer["text"]


def test_hub_that_does_not_answer_is_unreachable(ask):
    with serving({}) as server:
        pass
    answer = ask(LOAD, "org/tiny", server.url)
    assert answer["error"] == "Unreachable"
    assert "org/tiny" in answer["text"]
    assert "HF_ENDPOINT" in answer["text"]
    assert "\n" not in answer["text"]


def test_model_larger_than_the_disk_is_refused_before_download(repo, ask):
    (repo / "model.safetensors").unlink()
    with (repo / "model.safetensors").open("wb") as sparse:
        sparse.truncate(2**42)
    with serving({"org/tiny": repo}) as server:
        answer = ask(FETCH, "org/tiny", server.url)
    assert answer["error"] == "InsufficientResources"
    assert "4.0 TiB of disk" in answer["text"]
    assert answer["cached"] == "None"
    assert server.downloaded() == set()


def test_a_gguf_file_is_that_of_the_newest_revision(tmp_path, ask):
    """Of eight, so that no other order is right by chance; `main` is not the last one written."""
    repo = tmp_path / "hf" / "hub" / "models--org--repo"
    for number in range(8):
        file = repo / "snapshots" / (str(number) * 40) / "tiny.gguf"
        file.parent.mkdir(parents=True)
        file.write_text("GGUF")
        os.utime(file, (number, 1000 * number))
    assert ask(GGUF, "", "http://nowhere")["all"]["org/repo/tiny.gguf"] == str(file)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("3" * 40)
    main = repo / "snapshots" / ("3" * 40) / "tiny.gguf"
    assert ask(GGUF, "", "http://nowhere")["all"]["org/repo/tiny.gguf"] == str(main)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/name", True),
        ("Org-1/Name.v2_x-4bit", True),
        ("name", False),
        ("./name", False),
        ("../name", False),
        ("/org/name", False),
        ("~/name", False),
        ("a/b/c", False),
        ("dir/model.gguf", False),
        ("org/name\n", False),
    ],
)
def test_what_a_hub_id_looks_like(name, is_one):
    assert hub.is_id(name) is is_one
