"""`keepwarm chat`: in a real terminal, and with its input piped in."""

import errno
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from itertools import count

import pytest

from keepwarm.cli.chat import ChatHistory, _input_lines, _read, _turn
from keepwarm.cli.options import make_request, open_engine
from keepwarm.config import Settings
from keepwarm.text.request import Request
from tests.cli import environment, keepwarm_here, write_endless
from tests.kit.checkpoints import write_checkpoint
from tests.kit.waiting import wait_until

SUMMARY = r"(\d+) tokens · (\d+) of (\d+) already warm · ([\d.]+ tok/s|stopped)"

# A new session has no terminal of its own until it asks for one; only then does ^C reach it.
IN_TERMINAL = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "from keepwarm.cli.main import main; main()"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), n_context=400)


class Terminal:
    """`keepwarm chat` in a pseudo-terminal: type keys, wait for output."""

    def __init__(self, checkpoint, home):
        self._fd, inside = pty.openpty()
        termios.tcsetwinsize(inside, (40, 200))
        options = ["chat", "--model", str(checkpoint), "--max-tokens", "500000"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *options],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=environment(home, TERM="xterm"),
            start_new_session=True,
        )
        os.close(inside)
        self.shown = ""

    def type(self, keys):
        os.write(self._fd, keys)

    def wait_for(self, pattern, again=b""):
        """Read until the pattern shows in what is new; `again` is typed while nothing comes."""
        end = time.monotonic() + 300
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert time.monotonic() < end, f"{pattern!r} never came, but {self.shown[-500:]!r}"
            if select.select([self._fd], [], [], 0.5)[0]:
                self.shown += os.read(self._fd, 65536).decode("utf-8", "replace")
            else:
                self.type(again)
        self.shown = self.shown[found.end() :]
        return found

    def is_controlling(self):
        """Whether the first line of the program has run."""
        with suppress(OSError):
            return os.tcgetpgrp(self._fd) == self.process.pid
        return False

    def close(self):
        os.close(self._fd)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def terminal(tmp_path):
    opened = Terminal(write_endless(tmp_path / "model"), tmp_path)
    yield opened
    opened.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal):
    terminal.wait_for("Ctrl-C stops an answer")
    terminal.wait_for("> ")
    terminal.type(b"the fox\n")
    terminal.wait_for(r"the fox\r\n.{40}")  # in the middle of an answer that has no end
    terminal.type(b"\x03")
    first = terminal.wait_for(SUMMARY)
    terminal.wait_for("> ")
    terminal.type(b"the dog\n")
    terminal.wait_for(r"the dog\r\n.{40}")
    terminal.type(b"\x03")
    second = terminal.wait_for(SUMMARY)
    terminal.wait_for("> ")
    # Where nothing runs there is nothing to stop. Python notes a ^C that comes before its line
    # editor waits for keys only at the next key.
    terminal.wait_for("Ctrl-C stops an answer", again=b"\x03")
    terminal.wait_for("> ")
    assert terminal.process.poll() is None
    terminal.type(b"\x04")
    assert terminal.process.wait(timeout=300) == 0

    n_answer, n_warm, n_prompt = (int(n) for n in first.groups()[:3])
    assert n_answer > 0
    assert n_warm == 0
    _, n_warm_then, n_prompt_then = (int(n) for n in second.groups()[:3])
    assert n_prompt_then > 2 * n_prompt + 10  # both questions and what was said between them
    assert n_warm_then >= n_prompt  # of which the first question was not read again


def test_ctrl_c_while_loading_leaves(terminal):
    """Before the first prompt there is no answer to stop, and nothing to lose."""
    wait_until(terminal.is_controlling)  # Python itself is there: it takes no Ctrl-C before
    time.sleep(0.1)
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.process.wait(timeout=300) in (130, -signal.SIGINT)


def test_piped_conversation(checkpoint, tmp_path):
    """Answers on standard output, notes on standard error."""
    options = ("--model", checkpoint, "--max-tokens", 12)
    lines = "the fox\n\nthe dog\n/clear\nthe fox\n/nonsense\n/help\n/exit\nnever read\n"
    done = keepwarm_here("chat", *options, home=tmp_path, stdin=lines.encode())
    assert done.returncode == 0
    once = keepwarm_here("run", "the fox", *options, home=tmp_path).stdout
    assert done.stdout.startswith(once)
    assert done.stdout.endswith(once)
    assert len(done.stdout) > 2 * len(once)
    notes = done.stderr.decode()
    first, second, third = (tuple(map(int, found[:3])) for found in re.findall(SUMMARY, notes))
    assert first[:2] == (12, 0)
    assert second[1] >= first[2]  # the first turn's prompt was warm
    assert third[1] == first[2] - 1  # after /clear the same prompt: all but the token to be fed
    assert "History cleared.\n" in notes
    assert "Unknown command /nonsense; /help lists them." in notes
    listed = notes.partition("/nonsense; /help lists them.\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == ["/clear", "/help", "/exit", "Ctrl-C"]


def test_an_agent_goes_on_where_the_last_chat_ended(main_here, checkpoint):
    """Two processes after each other; `/clear` leaves what the first one said."""
    options = ("--model", checkpoint, "--max-tokens", 4, "--agent", "fox")
    code, _, notes = main_here("chat", *options, stdin=b"the fox\nthe dog\n")
    assert code == 0
    assert "continued" not in notes
    before = [tuple(map(int, found[:3])) for found in re.findall(SUMMARY, notes)][-1]
    code, _, notes = main_here("chat", *options, stdin=b"the tree\nand the days\n/clear\nthe fox\n")
    assert code == 0
    assert "fox has 2 turns, which are continued." in notes
    third, fourth, cleared = (tuple(map(int, f[:3])) for f in re.findall(SUMMARY, notes))
    assert third[1] >= before[2] + before[0] - 1  # prompt and answer of the last chat
    assert fourth[2] > third[2] > before[2]
    assert cleared[2] < before[2]


def test_clear_keeps_the_system_prompt_of_an_agent(main_here, checkpoint, tmp_path):
    """That of its last chat, which is not named again."""
    system = tmp_path / "system.txt"
    system.write_text("Answer the fox.")
    options = ("--model", checkpoint, "--max-tokens", 4, "--agent", "fox")
    _, _, before = main_here("chat", *options, "--system", system, stdin=b"the fox\n")
    _, _, after = main_here("chat", *options, stdin=b"the dog\n/clear\nthe fox\n")
    (first,), (_, cleared) = (re.findall(SUMMARY, notes) for notes in (before, after))
    assert cleared[2] == first[2]


def test_the_end_of_input_leaves(checkpoint, tmp_path):
    options = ("--model", checkpoint, "--max-tokens", 2)
    done = keepwarm_here("chat", *options, home=tmp_path, stdin=b"no newline at the end")
    assert done.returncode == 0
    assert len(re.findall(SUMMARY, done.stderr.decode())) == 1


def test_a_turn_that_does_not_fit_is_refused_and_the_next_one_answered(checkpoint, tmp_path):
    lines = "hi\n" + "far too long " * 100 + "\nhi again\n"
    options = ("--model", checkpoint, "--max-tokens", 3)
    done = keepwarm_here("chat", *options, home=tmp_path, stdin=lines.encode())
    assert done.returncode == 0
    assert b"reads at most 399; shorten it. /clear starts over." in done.stderr
    prompts = [int(found[2]) for found in re.findall(SUMMARY, done.stderr.decode())]
    assert len(prompts) == 2
    assert prompts[1] < 100  # the refused line left no trace


def test_without_a_cache_every_turn_is_read_whole(main_here, checkpoint, tmp_path):
    options = ("--model", checkpoint, "--max-tokens", 4, "--no-cache")
    code, _, notes = main_here("chat", *options, stdin=b"the fox\nthe dog\n")
    assert code == 0
    found = re.findall(SUMMARY, notes)
    assert [int(n_warm) for _, n_warm, _, _ in found] == [0, 0]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--system", "no-such-file"],
        ["--system", "{too long}"],
        ["--max-tokens", "-1"],
        ["--kv-bits", "3"],
        ["--agent", "../fox"],
    ],
)
def test_bad_options_are_one_sentence(main_here, checkpoint, tmp_path, options):
    """Reported before the first prompt."""
    long = tmp_path / "system.txt"
    long.write_text("far too long " * 100)
    options = [option.replace("{too long}", str(long)) for option in options]
    code, out, err = main_here("chat", "--model", checkpoint, *options)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"[^\n]*\.\n", err)


def test_input_that_is_not_text_is_one_sentence(main_here, checkpoint):
    code, _, err = main_here("chat", "--model", checkpoint, stdin=b"\xff\xfe\n")
    assert code == 2
    assert err.endswith("Standard input is not UTF-8 text; convert it.\n")


# -- the conversation behind it -------------------------------------------------------------------


@pytest.fixture
def conversation(tmp_path):
    system = [{"role": "system", "content": "Answer the fox."}]
    model = write_endless(tmp_path / "model")
    settings = Settings(tmp_path, tmp_path / "store", model=str(model), max_tokens=500)
    asks = make_request(settings, None, False, None)
    with open_engine(settings, asks) as engine:
        yield ChatHistory(engine, asks, system)


def interrupt_after(n_asked):
    """Reports Ctrl-C after this many polls."""
    asked = count()
    return lambda: next(asked) >= n_asked


def test_an_interrupted_answer_stays_in_the_history(conversation, capsys):
    """The history holds what was printed, and the next turn does not prefill it again."""
    stopped = _read(conversation.ask("the dog"), interrupt_after(6))
    assert 0 < stopped.n_tokens < 500
    assert stopped.summary.endswith("· stopped")
    conversation.keep("the dog", stopped)
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[-1]["content"] + "\n" == capsys.readouterr().out
    goes_on = _read(conversation.ask("the fox"), interrupt_after(6))
    assert goes_on.receipt.cached_tokens >= stopped.receipt.prompt_tokens
    assert goes_on.receipt.prompt_tokens > stopped.receipt.prompt_tokens + stopped.n_tokens


def test_clear_keeps_the_system_prompt_warm(conversation):
    said = _read(conversation.ask("the dog"), interrupt_after(3))
    conversation.keep("the dog", said)
    conversation.clear()
    assert [message["role"] for message in conversation.messages] == ["system"]
    again = _read(conversation.ask("a fox"), interrupt_after(3))
    opening = conversation._engine.prepare(Request(messages=conversation.messages)).prompt
    assert again.receipt.cached_tokens >= opening.end_of(0) > 0


def test_a_turn_that_fails_in_the_engine_leaves_no_trace(checkpoint, tmp_path, capsys):
    """One sentence, no traceback, and the next turn is answered."""
    settings = Settings(tmp_path, tmp_path / "store", model=str(checkpoint), max_tokens=3)
    asks = make_request(settings, None, False, None)
    with open_engine(settings, asks) as engine:
        talk, model = ChatHistory(engine, asks, []), engine.model.module
        whole, model.lm_head = model.lm_head, None
        _turn(talk, "hi")
        model.lm_head = whole
        _turn(talk, "hi")
        assert len(talk.messages) == 2
    failed, answered = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"The engine failed on this request .* Retry\. /clear starts over\.", failed
    )
    assert re.fullmatch(SUMMARY, answered)


def test_a_terminal_that_is_gone_is_the_end_of_input(monkeypatch):
    def gone(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("builtins.input", gone)
    assert list(_input_lines()) == []
