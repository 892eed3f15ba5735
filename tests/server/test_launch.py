"""`keepwarm launch`: what is printed works when pasted, and is what it starts itself."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import replace

import psutil
import pytest

from keepwarm import config
from keepwarm.server.http.clients import CLIENTS, ServerInfo
from tests.cli import main_here
from tests.kit.checkpoints import write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.conftest import serve

SECRET = "secret$'key\""
VARIABLE = {
    "claude": "ANTHROPIC_AUTH_TOKEN",
    "codex": "KEEPWARM_API_KEY",
    "opencode": "KEEPWARM_API_KEY",
    "qwen": "OPENAI_API_KEY",
    "aider": "OPENAI_API_KEY",
}
PROGRAMS = tuple(VARIABLE)
FAKE = """#!{python}
import json, os, sys
seen = dict(os.environ)
if path := seen.get("QWEN_CODE_SYSTEM_DEFAULTS_PATH"):
    seen.update({{"FILE": path, "QWEN_CODE_SYSTEM_DEFAULTS_PATH": open(path).read()}})
print(json.dumps([sys.argv[1:], seen]))
"""
ON_TERM = "trap 'exit 7' TERM; kill -TERM $PPID; while :; do sleep 0.1; done"
TALK = """
import anthropic
import openai
print(*(model.id for model in openai.OpenAI(max_retries=0).models.list()))
message = [{"role": "user", "content": "Hello"}]
client = anthropic.Anthropic(max_retries=0)
print(client.messages.create(model="m", max_tokens=2, messages=message).role)
"""


@pytest.fixture(scope="module")
def locked(served_model, tmp_path_factory):
    """A server that wants a key, and whose context has room for every client's first prompt."""
    home = {"KEEPWARM_HOME": str(tmp_path_factory.mktemp("home"))}
    roomy = replace(served_model, n_context=131_072)
    with serve(roomy, config.load(home, api_keys=SECRET)) as live:
        yield live


@pytest.fixture
def environ(tmp_path):
    """An environment in which every client is installed: each tells how it was started."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text(FAKE.format(python=sys.executable))
        (programs / name).chmod(0o755)
    kept = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "KEEPWARM_HOME": str(tmp_path),
    }
    path = os.environ.get("PYTHONPATH")
    return kept | ({"PYTHONPATH": path} if path else {}) | {"ANTHROPIC_API_KEY": "elsewhere"}


def launch(environ, *arguments):
    command = [sys.executable, "-m", "keepwarm", "launch", *map(str, arguments)]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=300
    )


def launch_here(environ, *arguments):
    """The same without a process of its own, for what starts no client that prints."""
    done = main_here(environ, "launch", *arguments)
    out, err = (said.decode() for said in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return str(free.getsockname()[1])


def printed(environ, *arguments, launch=launch_here):
    answer = launch(environ, *arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def pasted(environ, text):
    """What the client sees when a shell is given the printed lines."""
    answer = subprocess.run(
        ["sh", "-eu"],
        input=text,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(answer.stdout)


def meaning(told):
    """Arguments, and the environment without what shells add; of a file only what it says."""
    arguments, environ = told
    added = {"PWD", "SHLVL", "_", "OLDPWD", "FILE"}
    return arguments, {k: v for k, v in environ.items() if k not in added}


@pytest.mark.parametrize("client", PROGRAMS)
def test_launch_prints_lines_that_do_what_run_does_and_hide_the_key(locked, environ, client):
    environ["KEEPWARM_API_KEY"] = SECRET
    given = (client, "--url", locked.url, "--", "-p", "it's me")
    text = printed(environ, *given[:3], "--print", *given[3:])
    told = meaning(pasted(environ, text))
    assert told == meaning(json.loads(printed(environ, *given, launch=launch)))
    assert told[0][-2:] == ["-p", "it's me"]
    assert told[1][VARIABLE[client]] == SECRET
    assert SECRET not in text
    assert locked.url in json.dumps(told)
    assert "tiny" in json.dumps(told)


@pytest.mark.parametrize("setting", [f"{SECRET},other", "@{file}"])
def test_launch_finds_the_keys_of_the_server_and_shows_them_only_on_request(
    locked, environ, tmp_path, setting
):
    keys = tmp_path / "my keys"
    keys.write_text(f"\nalice = {SECRET}\nother\n")
    keys.chmod(0o600)
    environ["KEEPWARM_API_KEYS"] = setting.format(file=keys)
    text = printed(environ, "claude", "--url", locked.url, "--print")
    assert SECRET not in text
    assert pasted(environ, text)[1]["ANTHROPIC_AUTH_TOKEN"] == SECRET
    assert shlex.quote(SECRET) in printed(
        environ, "claude", "--url", locked.url, "--print", "--show-key"
    )


def test_launch_with_a_wrong_key_says_so(locked, environ):
    environ["KEEPWARM_API_KEY"] = "wrong"
    refused = launch_here(environ, "claude", "--url", locked.url)
    assert refused.returncode == 2
    assert "set KEEPWARM_API_KEY" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_launch_claude_goes_nowhere_else_and_warns_of_a_small_context(live, environ):
    """The warning is not part of what is pasted."""
    answer = launch_here(environ, "claude", "--url", live.url, "--print")
    assert answer.stderr.startswith("Warning: the first prompt of claude has about 29,000 tokens")
    seen = pasted(environ, answer.stdout)[1]
    assert "ANTHROPIC_API_KEY" not in seen
    assert seen["ANTHROPIC_BASE_URL"] == live.url
    assert {v for k, v in seen.items() if k.endswith("_MODEL")} == {"tiny"}


def test_launch_names_an_agent_to_every_client_that_can_name_one():
    """As each of them reads headers; `python -m tests.clients.coders` sees them arrive."""
    server = ServerInfo("http://h:1", "tiny", 4096, agent="ops")
    claude, codex, opencode = (CLIENTS[name](server) for name in PROGRAMS[:3])
    assert claude.environ["ANTHROPIC_CUSTOM_HEADERS"] == "X-Keepwarm-Agent: ops"
    told = tomllib.loads("\n".join(codex.command[2::2]))
    config = json.loads(opencode.environ["OPENCODE_CONFIG_CONTENT"])
    headers = {"X-Keepwarm-Agent": "ops"}
    assert told["model_providers"]["keepwarm"]["http_headers"] == headers
    assert config["provider"]["keepwarm"]["options"]["headers"] == headers


def test_launch_deletes_a_file_when_its_client_has_ended(locked, environ, tmp_path):
    environ |= {"TMPDIR": str(tmp_path / "tmp"), "KEEPWARM_API_KEY": SECRET}
    (tmp_path / "tmp").mkdir()
    seen = json.loads(printed(environ, "qwen", "--url", locked.url, launch=launch))[1]
    assert seen["FILE"].startswith(environ["TMPDIR"])
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("end", "status"), [("exit 3", 3), (ON_TERM, 7), ("kill -9 $$", 137)])
def test_launch_of_a_client_with_a_file_ends_as_it_would_alone(
    locked, environ, tmp_path, end, status
):
    """A signal to `launch` reaches the client, and its status comes back."""
    environ["KEEPWARM_API_KEY"] = SECRET
    (tmp_path / "bin" / "qwen").write_text(f"#!/bin/sh\n{end}\n")
    assert launch(environ, "qwen", "--url", locked.url).returncode == status


SIGNALLED = """
import os, signal, sys, threading, time
from keepwarm.cli import launch
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
client = ["sh", "-c", "trap 'exit 7' TERM; kill -TERM $PPID; while :; do sleep 0.01; done"]
assert {launch._wait("/bin/sh", client, os.environ) for _ in range(300)} == {7}
os._exit(0)
"""


def test_launch_forwards_a_signal_that_another_thread_gets_while_the_client_starts(environ):
    """Libraries start threads, and a signal that the main thread blocks goes to one of them. The
    race was lost once in 35 to 250 times."""
    script = [sys.executable, "-c", SIGNALLED]
    done = subprocess.run(script, env=environ, check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


@pytest.mark.parametrize("text", ["#!/gone/python\n", "exit 0\n"])
def test_launch_says_which_program_cannot_be_started(live, environ, tmp_path, text):
    """A script without its interpreter, or without its first line; signals are as they were."""
    program = tmp_path / "bin" / "broken"
    program.write_text(text)
    program.chmod(0o755)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)]
    answer = launch_here(environ, "any", "--url", live.url, "--", "broken")
    assert answer.returncode == 2
    assert f"{program} cannot be started" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_codex_is_told_in_toml():
    """Values that are strange in a shell or in TOML come through."""
    name = 'models/"odd" name\\x'
    command = CLIENTS["codex"](ServerInfo("http://h:1", name, 4096)).command
    told = tomllib.loads("\n".join(command[2::2]))
    assert told["model"] == name
    assert told["model_context_window"] == 4096
    provider = told["model_providers"][told["model_provider"]]
    assert provider["base_url"] == "http://h:1/v1"
    assert provider["wire_api"] == "responses"


def test_opencode_is_told_in_json():
    setup = CLIENTS["opencode"](ServerInfo("http://h:1", "org/model", 4096))
    told = json.loads(setup.environ["OPENCODE_CONFIG_CONTENT"])
    assert told["model"] == "keepwarm/org/model"
    provider = told["provider"]["keepwarm"]
    assert provider["models"]["org/model"]["limit"]["context"] == 4096
    assert provider["options"]["apiKey"] == "{env:KEEPWARM_API_KEY}"


def test_qwen_is_told_by_variables_and_a_file():
    setup = CLIENTS["qwen"](ServerInfo("http://h:1", "org/model", 65_536))
    told = {"model": {"generationConfig": {"contextWindowSize": 65_536}}}
    assert setup.files == {"QWEN_CODE_SYSTEM_DEFAULTS_PATH": json.dumps(told)}
    assert setup.environ == {
        "OPENAI_BASE_URL": "http://h:1/v1",
        "OPENAI_MODEL": "org/model",
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "16384",
    }


def test_qwen_is_not_told_a_context_in_which_it_would_always_compact():
    assert not CLIENTS["qwen"](ServerInfo("http://h:1", "org/model", 40_960)).files


@pytest.mark.parametrize(("n_context", "kept"), [(4_096, 1_024), (65_536, 4_096), (1 << 20, 8_192)])
def test_aider_is_told_how_much_history_it_may_keep(n_context, kept):
    command = CLIENTS["aider"](ServerInfo("http://h:1", "org/model", n_context)).command
    assert command[-2:] == ("--max-chat-history-tokens", str(kept))


@pytest.mark.parametrize(
    ("client", "n_context", "said"),
    [
        ("claude", 32_768, ["first prompt"]),
        ("claude", 40_000, []),
        ("codex", 16_384, ["first prompt"]),
        ("codex", 32_768, []),
        ("opencode", 8_192, ["first prompt"]),
        ("qwen", 16_384, ["first prompt"]),
        ("qwen", 65_536, []),
        ("aider", 4_096, []),
        ("any", 4_096, []),
    ],
)
def test_a_context_that_is_too_small_is_told(client, n_context, said):
    server = ServerInfo("http://h:1", "org/model", n_context)
    warnings = list(CLIENTS[client](server).warnings(server))
    assert len(warnings) == len(said)
    for warning, word in zip(warnings, said, strict=True):
        assert word in warning
        assert f"org/model has a context of {n_context:,} tokens" in warning


def test_launch_starts_a_server_for_as_long_as_the_client_runs(environ, tmp_path):
    """By SDKs as they are published, with its key; nothing answers before, and nothing after. It is
    asked without a proxy, and has the models of the settings."""
    environ |= {"KEEPWARM_PORT": free_port(), "KEEPWARM_BLAS": "none", "KEEPWARM_API_KEYS": SECRET}
    other = tmp_path / "launch-1.log"  # of another launch
    other.write_text("Serving elsewhere")
    model = write_checkpoint(tmp_path / "tiny")
    (tmp_path / "config.toml").write_text(f'model = "{model}"\nmore_models = "second={model}"\n')
    proxied = environ | {"http_proxy": "http://127.0.0.1:1"}
    without_proxy = ("env", "-u", "http_proxy")
    talk = ("any", "--", *without_proxy, sys.executable, "-c", TALK)
    said = printed(proxied, *talk, launch=launch)
    assert said.split() == [str(model), "second", "assistant"]
    log = tmp_path / f"launch-{environ['KEEPWARM_PORT']}.log"
    assert log.read_text().count("Serving ") == 1
    assert other.read_text() == "Serving elsewhere"
    assert "No server answers" in launch_here(environ, "any", "--print", "--", "true").stderr
    (model / "config.json").write_text("{")
    failed = launch(environ, "any", "--model", model, "--", "true")
    assert failed.returncode == 2
    assert failed.stderr.startswith("The server did not start: ")
    assert "config.json" in failed.stderr


def test_launch_in_a_home_that_cannot_be_written_is_one_sentence(environ, tmp_path):
    home = tmp_path / "file"
    home.touch()
    environ |= {"KEEPWARM_PORT": free_port(), "KEEPWARM_HOME": str(home)}
    model = write_checkpoint(tmp_path / "tiny")
    answer = launch_here(environ, "any", "--model", model, "--", "true")
    assert answer.returncode == 2
    (said,) = answer.stderr.splitlines()
    assert f"{home}/launch" in said
    assert said.endswith("set KEEPWARM_HOME to another directory.")


def test_launch_asks_before_it_downloads(environ):
    """Without a terminal there is nobody to ask."""
    environ |= {"KEEPWARM_PORT": "1", "HF_HOME": environ["KEEPWARM_HOME"]}
    answer = launch_here(environ, "claude")
    assert answer.returncode == 2
    assert "name a model with --model" in answer.stderr


# Also where the tests run under nohup.
HEARING = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
runpy.run_module("keepwarm", run_name="__main__")
"""


def test_launch_whose_terminal_is_closed_while_its_server_starts_leaves_none(environ, tmp_path):
    """A model that is a pipe is never loaded."""
    model = write_checkpoint(tmp_path / "tiny")
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    environ |= {"KEEPWARM_PORT": free_port(), "KEEPWARM_BLAS": "none"}
    log = tmp_path / f"launch-{environ['KEEPWARM_PORT']}.log"
    command = [sys.executable, "-c", HEARING, "launch", "any", "--model", model, "--", "true"]
    launched = subprocess.Popen(command, env=environ)
    try:
        wait_until(lambda: log.exists() and log.stat().st_size > 0)
        (server,) = psutil.Process(launched.pid).children()
        launched.send_signal(signal.SIGHUP)
        assert launched.wait(60) == 128 + signal.SIGTERM
    finally:
        launched.terminate()
        launched.wait()
    assert not server.is_running()


def test_launch_says_which_options_change_nothing(live, environ):
    given = ("any", "--url", live.url, "--model", "other", "--show-key", "--", "true")
    said = launch_here(environ, *given).stderr.splitlines()
    assert [line.split()[1] for line in said] == ["--model", "--show-key"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("vim",), "is not a known client"),
        (("claude", "--url", "http://127.0.0.1:1"), "keepwarm serve"),
        (("claude", "--url", "ftp://127.0.0.1"), "is not a server URL"),
        (("claude", "--url", "http://[::1"), "is not a server URL"),
        (("claude", "--url", "http://127.0.0.1:port"), "is not a server URL"),
        (("any",), "No command to start"),
        (("claude", "--agent", "my ops"), "An agent id has"),
        (("aider", "--agent", "ops"), "leave out --agent"),
        (("any", "--", "no-such-program"), "is not installed"),
    ],
)
def test_launch_refuses_what_cannot_be_in_one_sentence(live, environ, arguments, sentence):
    if "--url" not in arguments:
        arguments = (arguments[0], "--url", live.url, *arguments[1:])
    answer = launch_here(environ, *arguments)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
