"""`keepwarm pull` and `keepwarm models`, run as programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.checkpoints import write_checkpoint
from tests.kit.hub_server import serving

UNMEASURED = {"KEEPWARM_BLAS": "none", "KEEPWARM_BLAS_THREADS": "1"}  # saves seconds a process
PROGRAM = "from keepwarm.cli.main import main; main()"


@pytest.fixture
def keepwarm(tmp_path):
    """Runs the program with a home and a hub cache of its own."""

    def run(*arguments, **environ):
        outside = ("HF_", "HUGGING", "KEEPWARM_")
        mine = {key: value for key, value in os.environ.items() if not key.startswith(outside)}
        mine |= {"HF_HOME": str(tmp_path / "hf"), "KEEPWARM_HOME": str(tmp_path / "home")}
        mine |= {
            "HOME": str(tmp_path),
            "COLUMNS": "300",
            "NO_PROXY": "127.0.0.1",
            **UNMEASURED,
            **environ,
        }
        command = [sys.executable, "-c", PROGRAM, *arguments]
        return subprocess.run(command, env=mine, capture_output=True, text=True, check=False)

    return run


def test_pulled_models_are_listed(tmp_path, keepwarm):
    repo = write_checkpoint(tmp_path / "repo")
    pretended = write_checkpoint(tmp_path / "home" / "models" / "smollm2", n_context=2048)
    with serving({"org/tiny": repo}) as server:
        pulled = keepwarm("pull", "org/tiny", HF_ENDPOINT=server.url)
    assert pulled.returncode == 0, pulled.stderr
    path = Path(pulled.stdout.strip())
    assert (path / "model.safetensors").is_file()
    alias, hub = json.loads(keepwarm("models", "--json").stdout)
    n_bytes = sum(file.stat().st_size for file in repo.iterdir())
    same = {"architecture": "llama", "n_bytes": n_bytes}
    assert hub == same | {
        "name": "org/tiny", "source": "hub", "path": str(path), "n_context": 4096,
    }  # fmt: skip
    assert alias["name"] == "smollm2"
    assert (alias["path"], alias["n_context"]) == (str(pretended), 2048)
    table = keepwarm("models").stdout
    assert all(word in table for word in ("smollm2", "org/tiny", "llama", "4,096", str(path)))


def test_builtin_is_listed_before_it_is_pulled(keepwarm):
    (model,) = json.loads(keepwarm("models", "--json").stdout)
    assert (model["name"], model["source"], model["path"]) == ("smollm2", "built-in", None)
    assert "keepwarm pull smollm2" in keepwarm("models").stdout


def test_broken_model_does_not_hide_the_others(tmp_path, keepwarm):
    broken = write_checkpoint(tmp_path / "home" / "models" / "smollm2")
    (broken / "config.json").write_text("{")
    (model,) = json.loads(keepwarm("models", "--json").stdout)
    assert (model["path"], model["architecture"]) == (str(broken), None)


def test_models_of_lm_studio_are_found_and_used(tmp_path, keepwarm):
    """Where it keeps them today, not one of the hub's, and not one that is half downloaded."""
    folder = tmp_path / ".lmstudio" / "models" / "org"
    theirs = write_checkpoint(folder / "tiny")
    half = write_checkpoint(folder / "half")
    weights = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(weights))
    _, found = json.loads(keepwarm("models", "--json").stdout)
    assert (found["name"], found["source"]) == ("org/tiny", "lm-studio")
    assert found["path"] == str(theirs)
    asked = ("run", "the fox", "--model", "org/tiny", "--max-tokens", "2", "--json")
    done = keepwarm(*asked, HF_ENDPOINT="http://127.0.0.1:9")
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0


def test_unknown_name_is_one_sentence_and_exit_code_2(keepwarm):
    done = keepwarm("pull", "no-such-model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "no-such-model" in done.stderr


def test_local_directory_needs_no_pull(tmp_path, keepwarm):
    directory = write_checkpoint(tmp_path / "model")
    assert keepwarm("pull", str(directory)).stdout.strip() == str(directory)
