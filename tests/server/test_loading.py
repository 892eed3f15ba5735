"""A server whose model is not loaded yet: it lives, says what it does, and can be stopped."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from keepwarm.errors import BadInput
from keepwarm.server import process
from keepwarm.server.process import bind
from tests.kit.redis_server import free_port
from tests.kit.waiting import wait_until

CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 4}


class Loading:
    """A server process that reads a file of its model from a pipe, and waits for it."""

    def __init__(self, process, url, file, text):
        self.process = process
        self.url = url
        self._file = file
        self._text = text

    def get(self, path):
        return httpx.get(f"{self.url}{path}", timeout=60)

    def lives(self):
        try:
            return self.get("/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def give_file(self, text=None):
        with self._file.open("w") as pipe:  # waits for the reader
            self._file.unlink()
            self._file.write_text(self._text)
            pipe.write(self._text if text is None else text)


@pytest.fixture
def loading(checkpoint, tmp_path, request):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    file = model / getattr(request, "param", "config.json")
    text = file.read_text() if file.exists() else "{}"
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    port = free_port()
    with running(model, tmp_path / "home", port) as process:
        server = Loading(process, f"http://127.0.0.1:{port}", file, text)
        wait_until(server.lives)
        yield server


@contextmanager
def running(model, home, port):
    process = subprocess.Popen(
        [sys.executable, "-m", "keepwarm", "serve", "--port", str(port), "--model", str(model)],
        env={**os.environ, "KEEPWARM_HOME": str(home), "KEEPWARM_LOG_LEVEL": "warning"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("loading", ["generation_config.json"], indirect=True)
def test_server_while_loading_answers_503_with_its_progress(loading):
    wait_until(lambda: "opening its files" in loading.get("/health/ready").text)
    for path in ("/health/ready", "/health", "/v1/models"):
        answer = loading.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_loading"
        assert "being loaded (opening its files)" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    refused = httpx.post(f"{loading.url}{CHAT}", json=ASKED, timeout=60)
    assert refused.json()["error"]["code"] == "model_loading"
    assert loading.get("/docs").status_code == 200
    assert loading.process.poll() is None
    loading.give_file()
    assert loading.process.stdout.readline().startswith("Serving ")
    assert loading.get("/health/ready").json() == {"status": "ok"}
    assert httpx.post(f"{loading.url}{CHAT}", json=ASKED, timeout=60).status_code == 200
    loading.process.send_signal(signal.SIGTERM)
    assert loading.process.wait(60) == 0


def test_sigterm_while_loading_ends_the_server_at_once(loading):
    loading.process.send_signal(signal.SIGTERM)
    printed, logged = loading.process.communicate(timeout=60)
    assert loading.process.returncode == -signal.SIGTERM
    assert printed == ""
    *lines, last = logged.splitlines()
    assert last == "Stopped before the model was loaded."
    assert all("event=loading" in line for line in lines)  # of a start that takes long


EARLY = """
import signal, socket, threading
from keepwarm import config
from keepwarm.server import process
def make_app():
    with socket.socket() as client:
        print("open" if client.connect_ex(listening.getsockname()) == 0 else "closed", flush=True)
    signal.raise_signal({})
with process.bind("127.0.0.1", 0) as listening:
    process.serve(make_app, config.load(), listening, threading.Event().wait)
"""


def test_sigint_before_the_server_runs_ends_it_at_once(tmp_path):
    """Not as KeyboardInterrupt: the thread that loads would be unwound inside MLX, and abort.

    Until it runs its port is closed: nobody waits for its imports.
    """
    ended = subprocess.run(
        [sys.executable, "-c", EARLY.format(int(signal.SIGINT))],
        env={**os.environ, "KEEPWARM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGINT
    assert (ended.stdout, ended.stderr) == ("closed\n", "Stopped before the model was loaded.\n")


REFUSED = """
import threading
from keepwarm import config
from keepwarm.errors import BadInput
from keepwarm.server import process
def make_app():
    raise BadInput("A key is missing.")
with process.bind("127.0.0.1", 0) as listening:
    process.serve(make_app, config.load(), listening, threading.Event().wait)
"""
FIRST_OF_A_CONTAINER = """
import os, signal
from keepwarm.server import process
signal.raise_signal = lambda number: None  # as the kernel has it there
process._end_at_once(signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        (REFUSED, 2, "A key is missing.\n"),
        (FIRST_OF_A_CONTAINER, 128 + signal.SIGTERM, "Stopped before the model was loaded.\n"),
    ],
)
def test_a_server_ends_also_where_it_is_refused_or_signals_are_ignored(
    program, code, says, tmp_path
):
    """While a model is being loaded, which ends with the process."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KEEPWARM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ended.returncode, ended.stderr) == (code, says)


def test_model_that_cannot_be_loaded_ends_the_server_with_one_sentence(loading):
    loading.give_file("{}")
    printed, said = loading.process.communicate(timeout=60)
    assert loading.process.returncode == 2
    assert printed == ""
    assert "config.json has no model_type" in said
    assert said.count("\n") == 1


def test_bind_to_a_port_in_use_raises_bad_input():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"Port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_a_port_that_another_server_opens_meanwhile_ends_this_one(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(SystemExit) as ended:
                process._listen(second)
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"Port {port} on 127.0.0.1 is in use; ")
