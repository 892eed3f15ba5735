"""The staging profile is one that the program takes; its smoke test tells good from bad."""

import configparser
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepwarm import config
from keepwarm.cli.main import command_line

DEPLOY = Path(__file__).parents[2] / "deploy"


def smoke(*arguments, **environ):
    command = [sys.executable, "-I", DEPLOY / "smoke.py", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


def test_smoke_of_a_good_server_passes_with_a_key_from_a_file_or_a_variable(serving, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("\nalice = one\ntwo\n")
    with serving(api_keys="one", strict_model=True) as live:
        answer = smoke(live.url, KEEPWARM_API_KEY="one")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert len(answer.stdout.splitlines()) == 9
        again = smoke(live.url, "--key-file", keys, "--wait", "5")
        assert again.returncode == 0, again.stdout
        refused = smoke(live.url)
        assert refused.returncode == 1
        assert "bad  models: 401" in refused.stdout


def test_smoke_of_a_server_that_does_not_answer_or_has_no_engine_fails(serving):
    with serving(max_body_bytes=300) as live:
        answer = smoke(live.url)
        assert answer.returncode == 1
        assert "bad  chat: 413" in answer.stdout
        live.host.engine.close()
        answer = smoke(live.url, "--wait", "1")
        assert answer.returncode == 1
        assert answer.stdout.splitlines()[-1].startswith("bad  ready: 503")


def test_a_server_that_keeps_nothing_warm_fails():
    """The check that matters most can fail."""
    spec = importlib.util.spec_from_file_location("smoke", DEPLOY / "smoke.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Cold(module.Server):
        def _ask(self, path, body):
            details = {"cached_tokens": 3}
            usage = {"prompt_tokens": 100, "prompt_tokens_details": details}
            return json.dumps({"usage": usage})

    with pytest.raises(module.CheckFailed, match="3 of 100 were warm"):
        module.warm(Cold("http://nowhere", ""))


def test_no_server_fails():
    answer = smoke("http://127.0.0.1:1")
    assert answer.returncode == 1
    assert "no answer" in answer.stdout


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_file_without_a_key_is_one_sentence(tmp_path, content):
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
    answer = smoke("http://127.0.0.1:1", "--key-file", keys)
    assert answer.returncode == 1
    assert (str(keys) in answer.stderr, answer.stderr.count("\n")) == (True, 1)


def test_the_profile_is_taken(tmp_path):
    shutil.copy(DEPLOY / "config.toml", tmp_path)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    assert settings.strict_model
    assert settings.rate_per_minute == 120
    assert settings.api_keys


def test_the_unit_starts_what_there_is():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "keepwarm.service")
    service = unit["Service"]
    verbs = {command.callback.__name__ for command in command_line().registered_commands}
    for name in ("ExecStartPre", "ExecStart"):
        program, verb, *_ = service[name].split()
        assert program.endswith("/bin/keepwarm")
        assert verb in verbs
    assert "deploy/smoke.py" in service["ExecStartPost"]
    profile = config.load({"KEEPWARM_HOME": str(DEPLOY)})
    assert int(service["TimeoutStopSec"]) > profile.drain_s + 5
