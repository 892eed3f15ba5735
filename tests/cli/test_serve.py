"""`keepwarm serve` as a process: the printed command works, and it stops cleanly."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from keepwarm import config
from keepwarm.cli.serve import short_key_warning
from tests.cli import keepwarm_here
from tests.kit.checkpoints import write_checkpoint

QUESTION = [{"role": "user", "content": "What is the answer?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def command(checkpoint, *arguments):
    return [sys.executable, "-m", "keepwarm", "serve", "--model", str(checkpoint), *arguments]


@contextmanager
def served(checkpoint, home, *arguments, **environ):
    """Yields a server process and its output; always stops it."""
    environ = {**os.environ, "KEEPWARM_HOME": str(home), **environ}
    process = subprocess.Popen(
        command(checkpoint, "--port", "0", *arguments),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, greeting(process)
    finally:
        process.kill()
        process.communicate()


def greeting(process):
    """What it prints before it serves, to the command to be tried."""
    lines = []
    while not lines or (lines[-1] and not lines[-1].startswith("curl ")):
        lines.append(process.stdout.readline())
    return "".join(lines)


def address(printed):
    return re.search(r"http://127\.0\.0\.1:\d+", printed)[0]


def run_line(printed):
    """The response to the printed curl command."""
    if shutil.which("curl") is None:
        pytest.skip("needs `curl`")
    line = printed.splitlines()[-1]
    answer = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def check_links(printed):
    """Every address ends at a space or a line, as terminals make links of them, and opens."""
    links = [link for link in re.findall(r"http://\S+", printed) if "/v1" not in link]
    assert [link.rpartition("/")[2] for link in links[:2]] == ["dashboard", "docs"]
    assert all(re.fullmatch(r"http://127\.0\.0\.1:\d+(/\w+)?", link) for link in links)
    assert all(httpx.get(link).is_success for link in links[:2])


def check_clients(printed, home):
    """The command for clients reaches this server, whatever port the settings say."""
    (line,) = re.findall(r"keepwarm (launch claude --url \S+)", printed)
    done = keepwarm_here(*line.split(), "--print", home=home)
    assert f"ANTHROPIC_BASE_URL={address(printed)}" in done.stdout.decode()


def write_torch(folder):
    """A torch that is installed and cannot be imported."""
    for path, text in {
        "torch/__init__.py": "raise RuntimeError('torch is imported')",
        "torch-2.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n",
    }.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    return str(folder)


def test_what_is_printed_works_and_a_signal_ends_it_in_order(checkpoint, tmp_path):
    """A running answer finishes, nothing else is logged, and its prompt is warm afterwards.

    Neither the server nor its preparing process imports torch, which transformers does.
    """
    import openai

    more = {"KEEPWARM_DRAIN_S": "5", "PYTHONPATH": write_torch(tmp_path / "installed")}
    with served(checkpoint, tmp_path, **more) as (process, printed):
        check_links(printed)
        check_clients(printed, tmp_path)
        first = run_line(printed)
        assert first["object"] == "chat.completion"
        with openai.OpenAI(base_url=f"{address(printed)}/v1", api_key="any") as client:
            stream = client.chat.completions.create(
                model="m", messages=QUESTION, stream=True, max_tokens=100
            )
            next(stream)
            process.send_signal(signal.SIGTERM)
            chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason
        assert process.wait(300) == 0
        assert process.stdout.read() == ""
        logged = process.stderr.read().splitlines()
        assert " INFO keepwarm.server: event=loading " in logged[0]
        assert logged[0].endswith(" phase=starting")
        waits = ("event=loading", "event=draining")
        started, *requests, stopped = (line for line in logged if not _has(line, waits))
        assert " INFO keepwarm.server: event=started " in started
        assert " INFO keepwarm.server: event=stopped requests=2 hit_rate=0." in stopped
        assert [" INFO keepwarm.requests: id=req-" in line for line in requests] == [True] * 4

    keys = tmp_path / "my keys"
    keys.write_text("alice = secret\nother\n")
    keys.chmod(0o600)
    more = {"KEEPWARM_SHARE_CACHE": "yes", "KEEPWARM_DRAIN_S": "0.2"}
    with served(checkpoint, tmp_path, "--api-key-file", str(keys), **more) as (process, printed):
        assert "secret" not in printed
        refused = httpx.post(f"{address(printed)}/v1/chat/completions", json={})
        assert refused.status_code == 401
        again = run_line(printed)
        check_cut(process, printed, "secret")
    assert again["choices"] == first["choices"]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def _has(line, parts):
    return any(part in line for part in parts)


def check_cut(process, printed, key):
    """An answer that does not end in time is cut with words."""
    import openai

    bias = {"2": -100}  # the end of a turn
    with openai.OpenAI(base_url=f"{address(printed)}/v1", api_key=key) as client:
        stream = client.chat.completions.create(
            model="m", messages=QUESTION, stream=True, max_tokens=3000, logit_bias=bias
        )
        next(stream)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match=r"stopping|shutting"):
            list(stream)
    process.wait(300)
    assert process.returncode == 0
    draining, *_ = re.findall("event=draining (.*)", process.stderr.read())
    assert draining.startswith("unfinished_requests=1 up_to_s=0.2 hint=")
    assert time.monotonic() - begun < 120  # three thousand tokens take longer


def test_a_second_server_on_the_port_is_told(main_here, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = main_here("serve", "--model", checkpoint, "--port", port)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(rf"Port {port} .*in use", err)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--host", "0.0.0.0"), "no API key is set"),
        (("--port", "70000"), "--port is 70000; it must be"),
        (("--host", "no.such.host.invalid"), "no API key is set"),
        (("--api-key-file", "/nowhere/keys"), "cannot be read"),
        (("--model", "second=nosuch"), "There is no model 'nosuch'"),
    ],
)
def test_serve_with_bad_arguments_is_one_sentence(main_here, checkpoint, arguments, sentence):
    code, _, err = main_here("serve", "--model", str(checkpoint), "--port", "0", *arguments)
    assert code == 2
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("0.0.0.0", "short", True),
        ("0.0.0.0", f"{'long' * 4},short", True),
        ("0.0.0.0", "long" * 4, False),
        ("127.0.0.1", "short", False),
    ],
)
def test_a_short_key_that_others_can_try_is_warned_of(host, keys, warned):
    settings = config.load({"KEEPWARM_API_KEYS": keys}, host=host)
    assert ("fewer than 16" in short_key_warning(settings)) == warned
