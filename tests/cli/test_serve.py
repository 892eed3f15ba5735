"""`keepwarm serve` as a process: what it prints works, and it leaves in order."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import openai
import pytest

from tests.kit.checkpoints import write_checkpoint

QUESTION = [{"role": "user", "content": "What is the answer?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def command(checkpoint, *arguments):
    return [sys.executable, "-m", "keepwarm", "serve", "--model", str(checkpoint), *arguments]


@contextmanager
def served(checkpoint, home, *arguments, **environ):
    """A server process; yields it and what it has printed, ends it however the test ends."""
    environ = {**os.environ, "KEEPWARM_HOME": str(home), **environ}
    process = subprocess.Popen(
        command(checkpoint, "--port", "0", *arguments),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed = process.stdout.readline() + process.stdout.readline()
        yield process, printed
    finally:
        process.kill()
        process.communicate()


def address(printed):
    return re.search(r"http://127\.0\.0\.1:\d+", printed)[0]


def test_the_printed_curl_line_works_as_printed(checkpoint, tmp_path):
    with served(checkpoint, tmp_path) as (_, printed):
        assert httpx.get(f"{address(printed)}/docs").is_success
        line = printed.splitlines()[1]
        answer = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        assert '"chat.completion"' in answer.stdout


def test_the_printed_curl_line_works_with_keys(checkpoint, tmp_path):
    keys = tmp_path / "my keys"
    keys.write_text("secret\nother\n")
    keys.chmod(0o600)
    with served(checkpoint, tmp_path, "--api-key-file", str(keys)) as (_, printed):
        assert "secret" not in printed
        line = printed.splitlines()[1]
        answer = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        assert '"chat.completion"' in answer.stdout
        refused = httpx.post(f"{address(printed)}/v1/chat/completions", json={})
        assert refused.status_code == 401


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(checkpoint, tmp_path, number):
    """A short answer still ends; the process leaves with 0, and what was read is on disk."""
    with served(checkpoint, tmp_path, KEEPWARM_DRAIN_S="5") as (process, printed):
        client = openai.OpenAI(base_url=f"{address(printed)}/v1", api_key="any")
        with client:
            stream = client.chat.completions.create(
                model="m", messages=QUESTION, stream=True, max_tokens=100
            )
            next(stream)
            process.send_signal(number)
            chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason
        process.wait(15)
        assert process.returncode == 0
        assert process.stderr.read() == ""
    with served(checkpoint, tmp_path) as (_, printed):
        client = openai.OpenAI(base_url=f"{address(printed)}/v1", api_key="any")
        with client:
            again = client.chat.completions.create(model="m", messages=QUESTION, max_tokens=4)
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_what_does_not_end_in_time_is_cut_with_words(checkpoint, tmp_path):
    with served(checkpoint, tmp_path, KEEPWARM_DRAIN_S="0.2") as (process, printed):
        client = openai.OpenAI(base_url=f"{address(printed)}/v1", api_key="any")
        bias = {"2": -100}  # the end of a turn
        with client:
            stream = client.chat.completions.create(
                model="m", messages=QUESTION, stream=True, max_tokens=3000, logit_bias=bias
            )
            next(stream)
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match=r"stopping|shutting"):
                list(stream)
        process.wait(15)
        assert process.returncode == 0
        assert time.monotonic() - begun < 8


def test_a_second_server_on_the_port_is_told(checkpoint, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = subprocess.run(
            command(checkpoint, "--port", port),
            env={**os.environ, "KEEPWARM_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert answer.returncode == 2
    assert f"Port {port}" in answer.stderr
    assert "in use" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--host", "0.0.0.0"), "no key is set"),
        (("--port", "70000"), "Cannot listen"),
        (("--host", "no.such.host.invalid"), "no key is set"),
        (("--api-key-file", "/nowhere/keys"), "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_sentence(main_here, checkpoint, arguments, sentence):
    code, _, said = main_here("serve", "--model", checkpoint, *arguments)
    assert code == 2
    assert sentence in said
    assert len(said.splitlines()) == 1
