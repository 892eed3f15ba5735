"""Preparing is work: it is bounded before it begins, done in another process, and can be ended."""

import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from keepwarm import config
from keepwarm.errors import BadInput, Cancelled, ContextTooLong, EngineFailed, TimedOut
from keepwarm.models.load import load
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.text import prompt, prompt_limits, volatile
from keepwarm.text import volatile as scrub
from keepwarm.text.detokenize import decode
from keepwarm.text.grammar import MAX_COMPILED, Grammars
from keepwarm.text.past_answers import StoredAnswers
from keepwarm.text.prepare import Preparer
from keepwarm.text.prompt import Prompter
from keepwarm.text.prompt_limits import PromptLimits, is_heavy, token_reach
from keepwarm.text.request import Breakpoint, Format, Request
from keepwarm.text.sandbox import deadline as sandbox_deadline
from keepwarm.text.sandbox import process as sandbox_process
from keepwarm.text.sandbox.deadline import PrepareDeadline, PrepareStep
from keepwarm.text.sandbox.process import ProcessGone, SandboxProcess
from keepwarm.text.sandboxed import PlainTokenizer, Sandbox, new_process
from tests.kit import tasks
from tests.kit import tokenizers as kit
from tests.kit.checkpoints import CHATML, make_tokenizer, write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.conftest import serve

N_VOCAB = make_tokenizer().get_vocab_size()
CHAT = "/v1/chat/completions"
WORDS = ("the", "quick", "fox", "naïve", "🦊", "<|im_end|>", "\n\t", "12345", "")
SLOW = {"type": "integer", "multipleOf": 9_999_991}
SPINS = (
    "{% if spin is defined %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)


def long_text(n_words=1_500, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=n_words))


@pytest.fixture(scope="module", autouse=True)
def _heavy_is_less():
    """Else every long text takes a second to tokenise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_limits, "HEAVY_CHARACTERS", 6_000)
        yield


# What cannot fit


BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def backend(model=None, normalizer=None, pre_tokenizer=None, added=()):
    tokenizer = Tokenizer(model or models.BPE(*_bytes()))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), *added])
    return _Fast(tokenizer)


def _bytes(without=""):
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    names = [*alphabet, "ab", "abab", "abababab"]
    merges = [("a", "b"), ("ab", "ab"), ("abab", "abab")]
    return {name: i for i, name in enumerate(names)}, merges


class _Fast:
    def __init__(self, tokenizer):
        self.backend_tokenizer = tokenizer


def n_tokens(fast, text):
    return len(fast.backend_tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    "text",
    [
        "abababab" * 50,
        "e\u0301" * 200,
        "\u1112\u1161\u11ab" * 99,
        "\u03b1\u0313\u0301\u0345" * 99,
        "🦊",
    ],
)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_no_token_stands_for_more_text_than_its_reach(text, normalizer):
    fast = backend(normalizer=normalizer)
    reach = token_reach(fast)
    assert len(text) <= reach.longest * n_tokens(fast, text)


def test_characters_that_become_no_token_do_not_count():
    fast = backend(models.BPE(*_bytes(without=["Ą"])))  # the byte 4
    assert n_tokens(fast, "\x04" * 1000) == 0
    assert token_reach(fast).dropped == "\x04"
    limits = PromptLimits("tiny", 10, fast)
    limits.check(Request(prompt="\x04" * 1000))
    with pytest.raises(ContextTooLong, match="90 characters long and tiny reads at most 9 tokens"):
        limits.check(Request(prompt="\x04" * 1000 + "x" * 90))


ACROSS = {name: i for i, name in enumerate([*_bytes()[0], "aĠ", "aĠa"])}
WORDY = models.BPE(ACROSS, [*_bytes()[1], ("a", "Ġ"), ("aĠ", "a")])


@pytest.mark.parametrize(
    ("fast", "n_words"), [(backend(), 1), (backend(WORDY, pre_tokenizer=BYTES_ALONE), 2)]
)
def test_more_words_than_tokens_fit_no_context(fast, n_words):
    """Blanks that are not ASCII do not count: a token may hold them."""
    assert token_reach(fast).n_words == n_words
    text = "a " * 200 + "a"
    assert n_tokens(fast, text) >= 201 / n_words
    limits = PromptLimits("tiny", 200 // n_words, fast)
    with pytest.raises(ContextTooLong, match=f"at least {-(-201 // n_words)} tokens long"):
        limits.check(Request(prompt=text))
    limits.check(Request(prompt=text.replace(" ", "\u3000")))
    PromptLimits("tiny", 202, fast).check(Request(prompt=text))


class Asked(Exception):
    """A tokenizer was looked at."""


class Secretive:
    @property
    def backend_tokenizer(self):
        raise Asked


def test_the_vocabulary_is_looked_at_for_a_text_that_may_be_too_long():
    limits = PromptLimits("tiny", 10, Secretive())
    limits.check(Request(prompt="x" * 10))
    with pytest.raises(Asked):
        limits.check(Request(prompt="x" * 11))


def test_limits_are_sent_to_another_process_without_the_tokenizer():
    sent = pickle.dumps(PromptLimits("tiny", 10, backend()))
    assert len(sent) < 500
    with pytest.raises(ContextTooLong, match="1,000 characters long"):
        pickle.loads(sent).check(Request(prompt="x" * 1000))


@pytest.mark.parametrize(
    "fast",
    [
        backend(normalizer=normalizers.Strip()),
        backend(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        backend(normalizer=normalizers.Replace(" ", "")),
        backend(pre_tokenizer=pre_tokenizers.Whitespace()),
        backend(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        backend(added=[AddedToken("<wide>", rstrip=True)]),
        backend(models.WordLevel({"?": 0}, unk_token="?")),
        backend(models.Unigram([("a", 0.0)], 0)),
        backend(models.BPE(*_bytes(without=["¡"]))),
        object(),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_reach(fast):
    assert token_reach(fast) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("model"), template=SPINS + CHATML)
    return replace(load(str(path), config.load({}, home=None)), n_context=1 << 20)


@pytest.fixture(scope="module")
def here(model):
    """Prepares everything in this process."""
    return Preparer(model, N_VOCAB, RecentPrompts())


@pytest.fixture(scope="module")
def apart(model):
    """Prepares what is heavy in another process."""
    preparer = Preparer(model, N_VOCAB, RecentPrompts(), sandbox=new_process())
    yield preparer
    preparer.close()


def chat(*texts, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return Request(messages=messages, **more)


@pytest.mark.parametrize(
    "request_",
    [
        Request(prompt="ab" * 99_999),
        Request(prompt=[1] * 64),
        chat("ab" * 99_999),
        chat(*"ab" * 32),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_rendered(model, request_, monkeypatch):
    def touched(*_, **__):
        raise AssertionError("it was rendered")

    preparer = Preparer(replace(model, n_context=64), N_VOCAB, RecentPrompts())
    monkeypatch.setattr(prompt, "write", touched)
    monkeypatch.setattr(Prompter, "render", touched)
    with pytest.raises(ContextTooLong, match=r"reads at most 63 tokens.*; shorten it\."):
        preparer.prepare(request_)


def test_what_the_template_adds_counts_before_it_is_tokenised(model, monkeypatch):
    tiny = Preparer(replace(model, n_context=64), N_VOCAB, RecentPrompts())
    monkeypatch.setattr(prompt, "write", lambda *_, **__: "ab" * 99_999)
    monkeypatch.setattr(prompt, "tokenise", lambda *_: pytest.fail("it was tokenised"))
    with pytest.raises(ContextTooLong, match="199,998 characters long"):
        tiny.prepare(chat("hi"))


def test_a_prompt_that_is_too_long_is_told_with_its_length():
    """The error comes from another process if preparing takes long."""
    again = pickle.loads(pickle.dumps(ContextTooLong("Too long.", 9001, 8191)))
    assert (str(again), again.n_tokens, again.most) == ("Too long.", 9001, 8191)


def test_answers_do_not_count_because_templates_may_leave_them_out(model):
    limits = PromptLimits("tiny", 64, model.tokenizer)
    limits.check(chat("hi", "ab" * 5_000, "hi"))
    with pytest.raises(ContextTooLong):
        limits.check(chat("hi", "hi", "ab" * 5_000))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (chat(*["hi"] * 10_001), "There are 10,001 messages; send at most 10,000."),
        (chat("hi", tools=[{}] * 1_001), "There are 1,001 tools; send at most 1,000."),
        (chat("hi", format=Format(grammar="x" * 300_000)), "is 300,000 characters long; send at"),
    ],
)
def test_counts_are_bounded_whatever_the_model(here, request_, sentence):
    with pytest.raises(BadInput, match=sentence):
        here.prepare(request_)


# In another process


def test_a_long_prompt_has_the_same_tokens_cuts_and_ends(here, apart):
    texts = [long_text(180, seed) for seed in range(9)]
    asked = chat(*texts, explain=True, breakpoints=(Breakpoint(2), Breakpoint(-1)))
    assert is_heavy(asked)
    ours, theirs = (each.prepare(asked, None, None, True) for each in (here, apart))
    assert isinstance(theirs.prompt, prompt.RenderedPrompt)
    assert theirs.tokens == ours.tokens
    assert theirs.prompt.cuts == ours.prompt.cuts
    assert theirs.breakpoints == ours.breakpoints
    assert theirs.prompt.text == ours.prompt.text
    for token in range(0, len(ours.tokens) + 50, 997):
        assert theirs.prompt.message_at(token) == ours.prompt.message_at(token)


def test_a_long_text_and_long_tools_too(here, apart):
    tool = {"name": "look", "description": long_text(), "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": tool}]
    for asked in (Request(prompt=long_text()), chat("hi", tools=tools), chat("hi " + long_text())):
        assert apart.prepare(asked).tokens == here.prepare(asked).tokens
        assert apart.n_tokens(asked) == here.n_tokens(asked)


def test_past_answers_are_spliced_in_there_as_here(here, apart):
    question, encode = long_text(), here.markup.tokenizer.encode
    for preparer in (here, apart):
        first = preparer.prepare(chat(question))
        generated = [token for letter in "the fox" for token in encode(letter)]
        preparer.splicer.remember("", first.prompt.text, first.tokens, generated, ())
    answer = decode(here.markup.tokenizer, generated)
    asked = chat(question, answer, "and?")
    ours, theirs = here.prepare(asked), apart.prepare(asked)
    assert ours.prompt.spliced == theirs.prompt.spliced == len(generated)
    assert ours.tokens == theirs.tokens
    assert ours.tokens != here.prepare(replace(asked, tenant="another")).tokens


def test_stored_answers_are_asked_for_there_as_here(here, apart):
    question, asked = long_text(seed=5), []

    def follow(tokens, guesses):
        asked.append((len(tokens), len(guesses)))
        return []

    def elsewhere(texts):
        asked.append(texts)
        return []

    stored = StoredAnswers(follow, elsewhere)
    request_ = chat(question, "an answer that nobody remembers", "and?")
    ours, theirs = here.prepare(request_, stored), apart.prepare(request_, stored)
    assert ours.tokens == theirs.tokens
    assert asked
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]


def test_what_was_tokenised_there_is_known_by_the_next_turn(here, apart):
    """Of the tenant only. The texts spell special tokens, and most of them once more."""
    known = apart._prompter._known
    texts = [long_text(600, seed) for seed in range(20, 29)]

    def grown(asked):
        before = known.n_bytes
        assert apart.prepare(asked).tokens == here.prepare(asked).tokens
        return known.n_bytes - before

    asked, continued = chat(*texts), chat(*texts, "a short answer", "and?")
    whole = grown(asked)
    assert whole > 4 * len(here.prepare(asked).tokens)
    assert grown(continued) < whole / 10
    assert grown(continued) == 0
    assert grown(replace(continued, tenant="another")) >= whole


def test_errors_come_back_as_they_are(model, here, apart):
    bad = chat(long_text(), template_options={"messages": 1})
    for preparer in (here, apart):
        with pytest.raises(BadInput, match="The template option 'messages' cannot be set"):
            preparer.prepare(bad)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"extra": 1}])
@pytest.mark.parametrize("template", [CHATML, kit.WITH_TOOLS, "{{ enable_thinking }}" + CHATML])
def test_the_other_process_renders_as_mlx_lm_does(tmp_path, template, options):
    wrapper = kit.make(tmp_path, template=template, tokens=["<think>", "</think>"])
    plain = pickle.loads(pickle.dumps(PlainTokenizer.of(wrapper)))
    messages = [{"role": "user", "content": "hi"}]
    texts = [
        each.apply_chat_template(messages, tools=None, tokenize=False, **options)
        for each in (wrapper, plain)
    ]
    assert texts[0] == texts[1]
    assert plain.has_thinking == wrapper.has_thinking
    assert plain.encode("the fox") == wrapper.encode("the fox")


# Ending it


@pytest.fixture(scope="module")
def process():
    process = SandboxProcess().give(tasks.Nothing())
    yield process
    process.close()


def run(process, task, *arguments, deadline=None, cpu_s=60.0, reply=lambda *_: None):
    return process.run(
        task,
        *arguments,
        deadline=deadline or PrepareDeadline(600),
        cpu_s=cpu_s,
        too_long=BadInput("too long"),
        reply=reply,
    )


def test_every_task_runs_in_a_fork(process):
    first, second = run(process, tasks.report, 1, "a"), run(process, tasks.report)
    assert first[:2] == ("built", (1, "a"))
    assert len({first[2], second[2], os.getpid()}) == 3
    with pytest.raises(KeyError, match="no such thing"):
        run(process, tasks.fail)


def test_a_task_ends_when_it_has_worked_too_long(process):
    with pytest.raises(BadInput, match="too long"):
        run(process, tasks.spin, cpu_s=1.0)
    assert run(process, tasks.report)[0] == "built"


def test_a_task_ends_at_its_deadline(process):
    run(process, tasks.report)  # it has started
    with pytest.raises(TimedOut, match=r"took longer than 1 s, most of it for reading it; send"):
        run(process, tasks.spin, deadline=PrepareDeadline(1))
    wait_until(lambda: not children_of(process))
    with pytest.raises(TimedOut):
        run(process, tasks.report, deadline=PrepareDeadline(0))


def test_a_task_ends_when_its_client_goes(process):
    deadline = PrepareDeadline(600)
    with pytest.raises(Cancelled):
        run(process, tasks.sleep, deadline=deadline, reply=lambda *_: deadline.cancel())
    wait_until(lambda: not children_of(process))
    with pytest.raises(Cancelled):
        run(process, tasks.report, deadline=deadline)


def test_the_process_never_loads_mlx(apart):
    apart.prepare(chat(long_text()))
    found = run(apart._sandbox._process, tasks.modules)
    assert "transformers" in found
    assert not [name for name in found if "mlx" in name]


def test_a_process_that_ends_is_started_again(process):
    run(process, tasks.report)
    process._process.kill()
    process._process.wait()
    assert run(process, tasks.report)[0] == "built"


def test_what_only_some_tasks_need_is_loaded_when_asked_for_and_by_the_next_process_too():
    process = SandboxProcess().give(tasks.Loads())
    assert run(process, tasks.report)[0].n_loads == 0
    process.load()
    process.load()
    assert run(process, tasks.report)[0].n_loads == 1
    process._process.kill()
    process._process.wait()
    assert run(process, tasks.report)[0].n_loads == 1
    process.close()


def test_a_process_that_loads_does_not_hang(monkeypatch):
    """Nor does the next, which loads before its first task; it is not in a request's time."""
    monkeypatch.setattr(sandbox_process, "FORK_S", 0.5)
    process = SandboxProcess().give(tasks.Loads(1.5))
    run(process, tasks.report)
    first = process._process
    process.load()
    assert run(process, tasks.report, deadline=PrepareDeadline(1.0))[0].n_loads == 1
    assert process._process is first
    first.kill()
    first.wait()
    assert run(process, tasks.report, deadline=PrepareDeadline(1.0))[0].n_loads == 1
    process.close()


def test_a_task_does_without_what_cannot_be_loaded(capfd):
    process = SandboxProcess().give(tasks.LoadFails())
    run(process, tasks.modules)
    first = process._process
    process.load()
    run(process, tasks.modules)
    assert process._process is first
    assert "no such vocabulary" in capfd.readouterr().err
    process.close()


def test_only_a_grammar_has_the_process_read_the_vocabulary(model):
    """So that a server is ready sooner; what long texts need of it is known by then."""
    preparer = Preparer(model, N_VOCAB, RecentPrompts(), sandbox=new_process())
    preparer.wait_until_ready()
    assert "_reach" in vars(preparer._limits)
    knows = partial(run, preparer._sandbox._process, tasks.knows_vocabulary)
    assert not knows()
    preparer.prepare(chat("hi", format=Format(json=True)))
    assert knows()
    preparer.close()


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/file"])
def test_without_the_process_a_prompt_is_prepared_here(model, here, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    preparer = Preparer(model, N_VOCAB, RecentPrompts(), sandbox=new_process().start())
    asked = chat(long_text(), format=Format(json=True))
    found = preparer.prepare(asked)
    assert found.tokens == here.prepare(asked).tokens
    assert found.grammar is not None
    preparer.close()


def test_a_fork_that_crashes_is_no_reason_to_wait():
    process = SandboxProcess().give(tasks.Nothing())
    with pytest.raises(ProcessGone):  # it may never work here, so the work is done in the server
        run(process, tasks.crash)
    run(process, tasks.report)
    with pytest.raises(EngineFailed, match="more than this machine can prepare"):
        run(process, tasks.crash)
    process.close()


def test_a_recipe_that_cannot_be_sent_is_no_reason_to_fail():
    process = SandboxProcess().give(lambda: None)
    with pytest.raises(ProcessGone):
        run(process, tasks.report)
    process.close()


def test_a_closed_process_takes_no_more():
    process = SandboxProcess().give(tasks.Nothing())
    run(process, tasks.report)
    pid = process._process.pid
    process.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(ProcessGone):
        run(process, tasks.report)


def test_close_ends_a_process_that_is_stopped():
    process = SandboxProcess().give(tasks.Nothing())
    run(process, tasks.report)
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)
    process.close()
    assert not psutil.pid_exists(pid)


def test_a_process_that_hangs_is_replaced(process, monkeypatch):
    run(process, tasks.report)
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(sandbox_process, "FORK_S", 0.5)
    with pytest.raises(ProcessGone):  # so it is done in the server
        run(process, tasks.report)
    assert not psutil.pid_exists(pid)
    monkeypatch.undo()
    assert run(process, tasks.report)[0] == "built"


def test_what_runs_in_a_process_that_is_replaced_is_done_in_the_server(process):
    """A fork that takes long for one task is not the fault of another's prompt."""
    run(process, tasks.report)
    with pytest.raises(ProcessGone):
        run(process, tasks.sleep, reply=lambda *_: process._replace(process._control))
    assert run(process, tasks.report)[0] == "built"


KILLED = """
import os
from keepwarm.text.sandbox import deadline, process
from tests.kit import tasks
started = process.SandboxProcess().give(tasks.Slow(0.5)).start()
{}
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("first", ["", "started.wait_until_ready(deadline.PrepareDeadline())"])
def test_it_ends_without_a_word_when_its_server_is_killed(first):
    command = [sys.executable, "-c", KILLED.format(first)]
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(command, check=False, capture_output=True, timeout=300, env=environ)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, b"")


def test_its_start_is_not_in_a_request_s_time():
    process = SandboxProcess().give(tasks.Slow(2.0))
    assert run(process, tasks.report, deadline=PrepareDeadline(1.0))[0] == "built"
    process.close()


def test_a_client_that_goes_does_not_wait_for_its_start():
    process = SandboxProcess().give(tasks.Slow(600.0)).start()
    deadline = PrepareDeadline()
    threading.Timer(0.2, deadline.cancel).start()
    with pytest.raises(Cancelled):
        run(process, tasks.report, deadline=deadline)
    process.close()


def test_it_imports_what_it_needs_before_it_has_a_recipe():
    process = SandboxProcess("tabnanny").start()
    process.give(tasks.Nothing())
    assert "tabnanny" in run(process, tasks.modules)
    process.close()


def children_of(process):
    return [
        child
        for child in psutil.Process(process._process.pid).children()
        if child.status() != psutil.STATUS_ZOMBIE
    ]


# Grammars


class Renewed(PrepareDeadline):
    """Counts how often it begins again."""

    n = 0

    def begin_again(self):
        super().begin_again()
        self.n += 1


@pytest.mark.parametrize("loads_before", [False, True])
def test_the_vocabulary_is_not_read_in_a_request_s_time(model, monkeypatch, loads_before):
    """Once, by the first that needs it, or before any does."""
    read, reads = Grammars._read_vocabulary, []
    monkeypatch.setattr(
        Grammars, "_read_vocabulary", lambda grammars: (reads.append(1), read(grammars))[1]
    )
    preparer = Preparer(model, N_VOCAB, RecentPrompts())
    if loads_before:
        preparer.load()
    for n, wanted in ((1, Format(json=True)), (0, Format(schema={"type": "integer"}))):
        deadline = Renewed(600)
        assert preparer.prepare(chat("hi", format=wanted), None, deadline).grammar is not None
        assert deadline.n == (0 if loads_before else n)
    assert reads == [1]


def test_what_took_long_is_named(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sandbox_deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    deadline = PrepareDeadline(10.0)
    steps = ((PrepareStep.PROMPT, 3.0), (PrepareStep.FORMAT, 6.0), (PrepareStep.PROMPT, 1.0))
    for step, seconds in steps:
        deadline.begin(step)
        deadline.check()
        now[0] += seconds
    with pytest.raises(TimedOut, match="than 10 s, most of it for the answer's format; simplify"):
        deadline.check()


def test_a_grammar_that_takes_long_to_compile_is_refused_and_not_tried_again(apart, monkeypatch):
    asked = chat("hi", format=Format(json=True, schema=SLOW))
    with pytest.raises(BadInput, match="format takes more than 1 s to compile; simplify it"):
        apart.prepare(asked)
    monkeypatch.setattr(Sandbox, "try_grammar", lambda *_: pytest.fail("tried again"))
    with pytest.raises(BadInput, match="to compile"):
        apart.prepare(asked)


def test_a_grammar_is_tried_out_before_it_is_compiled_here(apart, monkeypatch):
    tried, compiled = [], []
    try_grammar, compile_ = Sandbox.try_grammar, Grammars.compile_text
    monkeypatch.setattr(
        Sandbox, "try_grammar", lambda *given: (tried.append(1), try_grammar(*given))
    )
    monkeypatch.setattr(
        Grammars, "compile_text", lambda *given: (compiled.append(len(tried)), compile_(*given))[1]
    )
    for _ in range(2):
        asked = chat("hi", format=Format(json=True, schema={"enum": ["one", "two"]}))
        assert apart.prepare(asked).new_matcher().mask().any()
    assert compiled == [1]


def test_one_tenant_cannot_take_another_s_compiled_grammars(model):
    grammars, compiled = Grammars(model.tokenizer, N_VOCAB, [2]), []
    wanted = Format(json=True)
    grammars.compile(wanted, tenant="a", trial=compiled.append)
    grammars.compile(wanted, tenant="b", trial=compiled.append)
    assert len(compiled) == 2  # they share none, so that none can tell what the other sends
    for i in range(2 * MAX_COMPILED):
        grammars.compile(Format(grammar=f'start: "{i}"'), tenant="a")
    grammars.compile(wanted, tenant="b", trial=compiled.append)
    assert len(compiled) == 2


# Over HTTP


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with serve(model, config.load({"KEEPWARM_HOME": str(home)}, prepare_timeout_s=600.0)) as server:
        yield server


def test_a_client_that_goes_ends_the_preparation_of_its_request(live):
    """The template never ends: only the client's leaving can."""
    process = live.host.engine.preparer._sandbox._process
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": long_text()}],
            "chat_template_kwargs": {"spin": True},
        }
    ).encode()
    process.start()
    with socket.create_connection(live.url.removeprefix("http://").split(":")) as link:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: children_of(process))
    wait_until(lambda: not children_of(process))


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"messages": [1] * 9_000}, 400, "The field messages[0] is invalid"),
        ({"messages": [{"role": "user"}] * 10_001}, 400, "at most 10000 items"),
        ({"messages": [[]] * 300_000}, 413, "more than 300,000 values; send fewer."),
        ({"x": ["\\", '"', "[[[,,,"] * 100_001}, 413, "more than 300,000 values"),
    ],
)
def test_bodies_of_many_values_are_refused_with_one_sentence(live, body, status, sentence):
    answer = live.post(CHAT, body)
    assert answer.status_code == status
    assert sentence in answer.json()["error"]["message"]


def test_what_is_inside_a_text_is_not_counted(live):
    text = '[{",:' * 70_000 + "\\"
    answer = live.post(
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}
    )
    assert answer.status_code == 200, answer.text


def test_a_million_newlines_are_not_looked_at_one_by_one():
    class Pattern:
        calls = 0

        def fullmatch(self, *_):
            self.calls += 1

    pattern = Pattern()
    rule = replace(volatile.LINES[0], pattern=pattern)
    message = {"role": "system", "content": "\n" * 1_000_000}
    assert scrub.scrub_messages([message], [rule]).messages == [message]
    assert pattern.calls == 1
