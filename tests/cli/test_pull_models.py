"""`keepwarm pull` and `keepwarm models`, run as programs."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.cells import cell_len

from keepwarm.cli.models import models
from keepwarm.cli.options import print_table
from tests.cli import command, environment
from tests.kit.checkpoints import make_config, make_tokenizer, make_weights, write_checkpoint
from tests.kit.gguf_writer import encode_weights, metadata_for, write_gguf
from tests.kit.hub_server import _Handler, serving

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


class Stalling(NamedTuple):
    begun: threading.Event
    over: threading.Event


@pytest.fixture
def stalling(monkeypatch):
    """A hub that sends half of the weights, and the rest once this is over."""
    stall, answer = Stalling(threading.Event(), threading.Event()), _Handler._answer

    def slowly(handler, status, body, headers):
        if handler.command == "HEAD" or not handler.path.endswith("model.safetensors"):
            return answer(handler, status, body, headers)
        half = len(body) // 2
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(body[:half])
        stall.begun.set()
        stall.over.wait(60)
        with suppress(OSError):  # the client has left
            handler.wfile.write(body[half:])
        return None

    monkeypatch.setattr(_Handler, "_answer", slowly)
    yield stall
    stall.over.set()


def test_pulled_models_are_listed(tmp_path, keepwarm):
    repo = write_checkpoint(tmp_path / "repo")
    pretended = write_checkpoint(tmp_path / "home" / "models" / "smollm2", n_context=2048)
    with serving({"org/tiny": repo}) as server:
        pulled = keepwarm("pull", f"{server.url}/org/tiny", HF_ENDPOINT=server.url)
    assert pulled.returncode == 0, pulled.stderr
    path = Path(pulled.stdout.strip())
    assert (path / "model.safetensors").is_file()
    alias, hub = json.loads(keepwarm("models", "--json").stdout)
    n_bytes = sum(file.stat().st_size for file in repo.iterdir())
    same = {"architecture": "llama", "n_bytes": n_bytes}
    assert hub == same | {
        "name": "org/tiny", "source": "hub", "path": str(path), "n_context": 4096,
        "reason": None,
    }  # fmt: skip
    assert alias["name"] == "smollm2"
    assert (alias["path"], alias["n_context"]) == (str(pretended), 2048)
    table = keepwarm("models").stdout
    assert all(word in table for word in ("smollm2", "org/tiny", "llama", "4,096", str(path)))


def test_builtin_is_listed_before_it_is_pulled(keepwarm):
    (model,) = json.loads(keepwarm("models", "--json").stdout)
    assert (model["name"], model["source"], model["path"]) == ("smollm2", "built-in", None)


@pytest.mark.parametrize("broken_config", ["{", '{"model_type": 5}'])
def test_broken_model_does_not_hide_the_others(tmp_path, main_here, broken_config):
    broken = write_checkpoint(tmp_path / "models" / "smollm2")
    (broken / "config.json").write_text(broken_config)
    model, *_ = json.loads(main_here("models", "--json")[1])
    assert (model["path"], model["architecture"]) == (str(broken), None)


def test_models_of_lm_studio_are_found_and_used(tmp_path, main_here, monkeypatch):
    """Where it keeps them today, not one of the hub's, and not one that is half downloaded."""
    folder = tmp_path / ".lmstudio" / "models" / "org"
    theirs = write_checkpoint(folder / "tiny")
    half = write_checkpoint(folder / "half")
    weights = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(weights))
    monkeypatch.setenv("HOME", str(tmp_path))
    listed = json.loads(main_here("models", "--json")[1])
    (found,) = (model for model in listed if model["source"] == "lm-studio")
    assert (found["name"], found["path"]) == ("org/tiny", str(theirs))
    _, out, _ = main_here("run", "the fox", "--model", "org/tiny", "--max-tokens", 2, "--json")
    assert json.loads(out)["usage"]["completion_tokens"] > 0


def test_gguf_files_are_listed_with_the_reason_for_what_cannot_be_read(tmp_path, keepwarm):
    config = make_config(make_tokenizer())
    tensors, _ = encode_weights(config, make_weights(config), "Q8_0")
    theirs = tmp_path / ".lmstudio" / "models" / "org" / "tiny"
    cached = tmp_path / "hf" / "hub" / "models--org--repo" / "snapshots" / ("0" * 40)
    for folder in (theirs, cached):
        folder.mkdir(parents=True)
    write_gguf(theirs / "tiny.gguf", metadata_for(config), tensors)
    foreign = metadata_for(config) | {"general.architecture": "gemma3"}
    write_gguf(cached / "other.gguf", foreign, tensors)
    _, other, tiny = json.loads(keepwarm("models", "--json").stdout)
    assert (tiny["name"], tiny["architecture"], tiny["n_context"]) == (
        "org/tiny/tiny.gguf", "llama", 4096,
    )  # fmt: skip
    assert (other["name"], other["source"]) == ("org/repo/other.gguf", "hub")
    assert "gemma3" in other["reason"]
    table = keepwarm("models").stdout
    assert "unreadable" in table
    assert other["reason"] in table
    assert keepwarm("pull", "org/tiny/tiny.gguf").stdout.strip() == tiny["path"]


def test_fitting_models_are_listed_in_80_columns(main_here, monkeypatch):
    shown = on_terminal(monkeypatch, lambda: models(memory="64G"))
    assert max(map(len, shown.splitlines())) <= 80
    largest = shown.splitlines()[1]
    assert re.match(r"\S+/\S+ +\d+\.\d GiB\* +\d+k/\d+k +Apache-2.0", largest), largest
    assert "keepwarm pull" in shown
    piped = main_here("models", "--memory", "64G")[1].splitlines()
    assert piped[0] == "Model\tWeights\tTokens\tLicence"
    assert {line.count("\t") for line in piped} == {3}
    rows = json.loads(main_here("models", "--fit", "--memory", "16G", "--json")[1])
    sizes = [row["weights_bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sizes[0] < 12 * 2**30
    assert all(row["sources"] and row["n_tokens"] >= 16_384 for row in rows)
    for wrong in ("much", f"{'9' * 400}T"):
        assert main_here("models", "--memory", wrong)[2].count("\n") == 1


def test_names_and_paths_are_whole_in_80_columns(tmp_path, monkeypatch):
    """They are there to be pasted."""
    folder = tmp_path / ".lmstudio" / "models" / "an-organisation-of-some-size"
    long = write_checkpoint(folder / f"a-{'very-' * 12}long-name")
    for name, place in {"HOME": tmp_path, "KEEPWARM_HOME": tmp_path, "HF_HOME": tmp_path}.items():
        monkeypatch.setenv(name, str(place))
    heading, _, pull, model, path = on_terminal(monkeypatch, models).splitlines()
    assert heading.split() == ["Model", "Size", "Context", "From", "Architecture"]
    assert pull == "  to download it: keepwarm pull smollm2"
    assert model.split()[0] == f"{folder.name}/{long.name}"
    assert model.split()[-3:] == ["4,096", "lm-studio", "llama"]
    assert path == f"  {long}"


def on_terminal(monkeypatch, act):
    """What is printed on one of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with redirect_stdout(Terminal()) as shown:
        act()
    return shown.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_is_long_is_shortened_on_a_terminal_and_whole_in_a_pipe(monkeypatch, capsys):
    """By cells, which a wide character takes two of; nothing in it moves the cursor."""
    title, agent = "修復測試" * 20, "3f0c6f0e-8a5e-4c1e-9b59-2f3d0c1a7b71"
    columns, row = ("title", "tokens", "agent"), (title, "12\n", agent)

    def act():
        print_table(columns, [row], below=["agent"], shortened="title")

    heading, line, below = on_terminal(monkeypatch, act).splitlines()
    assert cell_len(line) <= 80
    assert re.fullmatch(r"[修復測試]{30,} ?… +12", line)
    assert heading.index("tokens") == cell_len(line.partition("12")[0])
    assert below == f"  {agent}"
    act()
    assert capsys.readouterr().out.splitlines() == ["\t".join(columns), f"{title}\t12 \t{agent}"]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [(("pull", "org/tiny"), signal.SIGINT), (("run", "hi", "--model", "org/tiny"), signal.SIGTERM)],
)
def test_a_signal_ends_a_download_at_once(tmp_path, stalling, arguments, number):
    """Not when the file in hand is whole, which takes minutes."""
    environ = {"HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1", **UNMEASURED}
    with serving({"org/tiny": write_checkpoint(tmp_path / "repo")}) as server:
        env = environment(tmp_path / "home", HF_ENDPOINT=server.url, **environ)
        with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, env=env) as process:
            assert stalling.begun.wait(60)
            process.send_signal(number)
            _, err = process.communicate(timeout=20)  # the hub waits for longer
        stalling.over.set()
        assert process.returncode == 128 + number
        assert err.decode().splitlines()[-1] == "Stopped."
        again = subprocess.run(
            command("pull", "org/tiny"), stdout=subprocess.PIPE, env=env, check=False
        )
    assert again.returncode == 0
    weights = Path(again.stdout.decode().strip(), "model.safetensors")
    assert weights.read_bytes() == (tmp_path / "repo" / "model.safetensors").read_bytes()


def test_unknown_name_is_one_sentence_and_exit_code_2(main_here):
    code, out, err = main_here("pull", "no-such-model")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no-such-model" in err


def test_local_directory_needs_no_pull(tmp_path, main_here):
    directory = write_checkpoint(tmp_path / "model")
    assert main_here("pull", directory)[:2] == (0, f"{directory}\n")
