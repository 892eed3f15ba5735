"""Released memory leaves the process: no request stays alive, and freed pages go back."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from keepwarm.cache.store import Budgets
from keepwarm.device.memory import MIB, MemoryScopes
from keepwarm.errors import Cancelled, EngineFailed
from keepwarm.prefix.policy import Policy
from tests.engine.test_faults import MARKED, FaultyTokenizer
from tests.kit.engines import ask, engine_on, memory
from tests.kit.runs import prompt_of
from tests.kit.waiting import no_collection

ROOT = Path(__file__).parents[2]

keeps_pages = pytest.mark.glibc


def whole(engine, **wishes):
    answer = engine.submit(ask(prompt_of(900), 3, policy=Policy.NO_STORE, **wishes))
    with suppress(EngineFailed):
        answer.result()
    return weakref.ref(answer)


def failed(engine):
    return whole(engine, logit_bias=MARKED)


def two(engine):
    return whole(engine, n=2)


def cancelled(engine):
    answer = engine.submit(ask(prompt_of(900), 200, policy=Policy.NO_STORE))
    next(answer)
    answer.cancel()
    with suppress(Cancelled):
        list(answer)
    return weakref.ref(answer)


@pytest.mark.parametrize("end", [whole, two, failed, cancelled])
def test_nothing_of_a_request_stays(models, tmp_path, end, caplog):
    """Its caches go with it, and do not wait for the garbage collector."""
    caplog.set_level(logging.CRITICAL)  # pytest would keep the tracebacks that are logged
    model = models.of("llama")
    model = replace(model, tokenizer=FaultyTokenizer(model.tokenizer))
    with engine_on(model, tmp_path) as engine, no_collection():
        end(engine)  # whatever is made once is made
        engine.call(mx.synchronize).result()
        before = mx.get_active_memory()
        answer = end(engine)
        engine.call(mx.synchronize).result()
        assert answer() is None
        assert mx.get_active_memory() <= before


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_restored_conversation_takes_no_more_memory_than_a_fresh_one(
    models, tmp_path, architecture
):
    """At its peak, less than a tenth over it."""
    found = []
    for n_cached in (0, 2999):
        budgets = Budgets(memory_bytes=0, min_free_disk_bytes=0)
        with engine_on(models.of(architecture), tmp_path, budgets=budgets) as engine:
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            result = engine.submit(ask(prompt_of(3000), 2)).result()
            found.append(mx.get_peak_memory() - before)
            assert result.receipt.cached_tokens == n_cached
    assert found[1] < 1.1 * found[0]


def rss():
    return psutil.Process().memory_info().rss


@keeps_pages
def test_freed_pages_go_back_to_the_system():
    """In a process of its own: the watchers of other engines free pages too."""
    subprocess.run([sys.executable, "-m", "tests.engine.freed_pages"], cwd=ROOT, check=True)


def test_a_rest_is_told_once():
    scopes = MemoryScopes()
    with scopes.join(memory()):
        assert not scopes.became_idle()  # nothing has run
        with scopes.active(memory()):
            assert not scopes.became_idle()
        assert [scopes.became_idle(), scopes.became_idle()] == [True, False]


@keeps_pages
def test_clearing_an_engine_shrinks_the_process(models, tmp_path):
    """By about as much as it kept."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        for seed in range(40):
            engine.warm(ask(prompt_of(600, seed))).result()
        engine.wait_until_saved()
        kept = sum(use.n_bytes for use in engine.memory() if use.name in ("live", "memory"))
        start = rss()
        engine.clear()
        assert kept > 60 * MIB  # much against what else comes and goes in a process of many tests
        assert start - rss() > kept / 2


COMPILED = """
import sys
from pathlib import Path
import mlx.core as mx
from keepwarm import Engine
from tests.kit.engines import Models
home = Path(sys.argv[1])
engine = Engine(Models(home / "models").of("llama"))
double = mx.compile(lambda x: {"doubled": 2 * x})
engine.call(lambda: [double(mx.zeros(n)) for n in range(5000)] and None).result()
engine.close()
"""


def test_a_process_that_ends_as_its_engine_is_closed_is_not_aborted(tmp_path):
    """What MLX compiled on the engine's thread has Python objects, to be freed before `close`."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, tmp_path]
    environ = {name: value for name, value in os.environ.items() if name != "MLX_DISABLE_COMPILE"}
    environ["KEEPWARM_HOME"] = str(tmp_path)
    ended = subprocess.run(command, cwd=ROOT, env=environ, check=False, stderr=subprocess.PIPE)
    assert ended.returncode == 0, ended.stderr
