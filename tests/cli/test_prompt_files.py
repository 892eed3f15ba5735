"""Prompt-cache files of mlx-lm and Swift: `cache import` and `cache export --format`."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from keepwarm.cli.main import main
from keepwarm.kv.files.dialects import Dialect
from keepwarm.kv.files.prompt_cache import import_prompt_cache
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint

N = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a model, and an agent of that model."""
    home = tmp_path_factory.mktemp("home")
    write_checkpoint(home / "model", shape={"head_dim": 64})
    told(home, "run", "The quick brown fox. " * 40, "--agent", "ops", "--max-tokens", "4")
    return home


def told(home, *arguments, code=0, model="model"):
    """What a command prints, run in this process: its JSON, or its sentence if it fails."""
    if arguments[0] == "run" or arguments[1] in ("import", "export"):
        arguments = (*arguments, "--model", home / model)
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.setenv("KEEPWARM_HOME", str(home))
        patch.setattr(sys, "argv", ["keepwarm", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as left:
            main()
    assert (left.value.code or 0) == code, err.getvalue()
    return err.getvalue() if code else json.loads(out.getvalue())


@pytest.fixture(scope="module")
def model(home):
    return load(str(home / "model"))


def answer(module, cache, token, n=8):
    """Greedy tokens from a cache."""
    tokens = [token]
    for _ in range(n):
        logits = module(mx.array([[tokens[-1]]]), cache=cache)
        tokens.append(mx.argmax(logits[0, -1]).item())
    return tokens[1:]


def cold(module, tokens):
    cache = make_prompt_cache(module)
    module(mx.array([tokens]), cache=cache)
    return cache


def test_what_is_exported_for_mlx_lm_goes_on_there(home, model, tmp_path):
    """The answer is that of a cold run; then the file comes in again as another agent."""
    file = tmp_path / "ops.safetensors"
    made = told(home, "cache", "export", "ops", str(file), "--format", "mlx-lm")
    loaded, metadata = load_prompt_cache(str(file), return_metadata=True)
    tokens = json.loads(metadata["keepwarm-tokens"])
    assert made["tokens"] == len(tokens) == told(home, "cache", "show", "ops")["n_tokens"]
    assert answer(model.module, loaded, 5) == answer(model.module, cold(model.module, tokens), 5)
    again = told(home, "cache", "import", str(file), "--agent", "again")
    assert (again["n_tokens"], again["imported"]) == (len(tokens), True)


def test_what_is_exported_for_swift_is_read_as_swifts(home, model, tmp_path):
    file = tmp_path / "ops.safetensors"
    told(home, "cache", "export", "ops", str(file), "--format", "swift", "--tokens", "256")
    found = import_prompt_cache(file)
    assert found.dialect is Dialect.SWIFT
    tokens = json.loads(found.metadata["keepwarm-tokens"])
    assert len(tokens) == 256
    same = answer(model.module, cold(model.module, tokens), 5)
    assert answer(model.module, found.caches, 5) == same
    made = told(home, "cache", "import", str(file), "--agent", "swift")
    assert (made["n_tokens"], made["imported"]) == (256, True)


@pytest.fixture(scope="module")
def saved(home, model, tmp_path_factory):
    """A file as mlx-lm saves it, which names no tokens, and a file of its tokens."""
    directory = tmp_path_factory.mktemp("saved")
    tokens = [3 + n % 200 for n in range(N)]
    save_prompt_cache(str(directory / "fox.safetensors"), cold(model.module, tokens))
    (directory / "tokens.json").write_text(json.dumps(tokens))
    return directory


def test_a_file_of_mlx_lm_comes_in_with_its_tokens(home, saved):
    """Only its agent is served from it."""
    file, tokens = str(saved / "fox.safetensors"), str(saved / "tokens.json")
    made = told(home, "cache", "import", file, "--tokens", tokens)
    assert (made["id"], made["n_tokens"], made["imported"]) == ("fox", N, True)
    assert made["model"] == str(home / "model")
    assert "already exists" in told(home, "cache", "import", file, "--tokens", tokens, code=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not contain its token ids"),
        ("[1, 2]", f"holds {N} tokens, but 2 ids were given"),
        ("[]", "are not a JSON list of token ids"),
        ("[1, -2]", "are not a JSON list of token ids"),
        ("{", "are not a JSON list of token ids"),
    ],
)
def test_wrong_tokens_are_refused(home, saved, tmp_path, content, says):
    options = ["--agent", "wrong"]
    if content is not None:
        (tmp_path / "tokens.json").write_text(content)
        options += ["--tokens", str(tmp_path / "tokens.json")]
    file = str(saved / "fox.safetensors")
    assert says in told(home, "cache", "import", file, *options, code=2)
    assert "wrong" not in [agent["id"] for agent in told(home, "cache", "ls")]


def test_quantised_caches_come_in_with_their_options(home, model, tmp_path):
    tokens = [3 + n % 100 for n in range(40)]
    cache = [layer.to_quantized(group_size=32, bits=8) for layer in cold(model.module, tokens)]
    save_prompt_cache(str(tmp_path / "small.safetensors"), cache)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    arguments = ("--tokens", str(tmp_path / "tokens.json"))
    made = told(home, "cache", "import", str(tmp_path / "small.safetensors"), *arguments)
    assert made["n_tokens"] == 40


def test_another_model_is_refused(home, tmp_path):
    write_checkpoint(home / "other", seed=7)
    file = tmp_path / "ops.safetensors"
    arguments = ("cache", "export", "ops", file, "--format", "mlx-lm")
    assert "another model" in told(home, *arguments, code=2, model="other")
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("export", "ops", "x.safetensors", "--format", "onnx"), "must be one of bundle, mlx-lm"),
        (("export", "ops", "x.kw", "--format", "swift"), "must end in .safetensors"),
        (("export", "ops", "x", "--format", "swift", "--sign", "k"), "cannot be signed"),
        (("import", "x.safetensors", "--trust", "k"), "is not signed"),
        (("import", "x.safetensors"), "There is no file x.safetensors."),
    ],
)
def test_senseless_options_are_refused(home, options, says):
    assert says in told(home, "cache", *options, code=2)
