"""What engines do with their memory budgets: MLX's limits, and the share of blocks."""

import time
from dataclasses import replace

import mlx.core as mx
import pytest

from keepwarm import config
from keepwarm.cache.store import Budgets, Store
from keepwarm.device.memory import (
    MIB,
    Memories,
    Memory,
    MemoryConfig,
    MemoryScopes,
    MLXDevice,
    host_memory,
    scopes_of_process,
)
from keepwarm.engine import engine as engine_module
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.engine import Engine
from tests.kit.engines import ask, memory
from tests.kit.runs import prompt_of


def settings_in(home, **variables):
    named = {f"KEEPWARM_{name.upper()}": str(value) for name, value in variables.items()}
    return config.load({"KEEPWARM_HOME": str(home), **named})


def an_engine(models, home, told=None, model=None, scopes=None):
    """With a store of its own."""
    model, settings = model or models.of("llama"), settings_in(home)
    return Engine(model, config=EngineConfig(told), settings=settings, scopes=scopes)


# MLX's limits.


def limit():
    """MLX returns its limit only when it is set."""
    now = mx.set_cache_limit(0)
    mx.set_cache_limit(now)
    return now


@pytest.fixture
def before():
    """The limit as it was, which every test must leave behind; as if no other engine were alive."""
    scopes_of_process.cache_clear()
    before = limit()
    yield before
    mx.set_cache_limit(before)  # whatever this test left, the next is not to blame
    scopes_of_process.cache_clear()


def limit_at_rest(engine):
    """The limit once an engine has begun its thread and has nothing to do."""
    engine.call(lambda: None).result()
    deadline = time.monotonic() + 300
    while not engine._scopes.release_if_idle() and time.monotonic() < deadline:
        time.sleep(0.001)
    return limit()


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_engines_that_were_told_nothing_share_the_limits(before, models, tmp_path, first_to_close):
    """Whichever closes first, the other's limits hold, and at the end the old ones."""
    idle = [16 * MIB, 8 * MIB]
    configs = [memory(buffer_idle_bytes=n_bytes) for n_bytes in idle]
    engines = [an_engine(models, tmp_path / str(n), told) for n, told in enumerate(configs)]
    assert [limit_at_rest(engine) for engine in engines] == [16 * MIB] * 2
    engines.pop(first_to_close).close()
    idle.pop(first_to_close)
    assert limit_at_rest(engines[0]) == idle[0]
    engines[0].close()
    assert limit() == before


def test_one_engine_works_while_another_comes_and_goes(before, models, tmp_path):
    """What runs keeps its buffers."""
    with an_engine(models, tmp_path / "a", memory()) as engine:

        def come_and_go():
            with an_engine(models, tmp_path / "b", memory(buffer_active_bytes=MIB)) as other:
                other.call(lambda: None).result()
                beside = limit()
            return beside, limit()

        high = memory().buffer_active_bytes
        assert engine.call(come_and_go).result() == (high, high)
    assert limit() == before


class Looking:
    """A model that looks at MLX's limit whenever it is called."""

    def __init__(self, module):
        self._module = module
        self.seen = {}

    def __call__(self, tokens, **options):
        self.seen.setdefault(tokens.shape[1], set()).add(limit())
        return self._module(tokens, **options)

    def __getattr__(self, name):
        return getattr(self._module, name)


def test_the_model_runs_with_the_buffers_of_a_working_engine(before, models, tmp_path):
    """Slices of a prompt and steps of an answer, not only what leads to them."""
    model = models.of("llama")
    model = replace(model, module=Looking(model.module))
    with an_engine(models, tmp_path, memory(), model) as engine:
        model.module.seen.clear()  # it was probed
        engine.submit(ask(prompt_of(40), 3)).result()
        assert limit_at_rest(engine) == memory().buffer_idle_bytes
    assert model.module.seen.keys() == {1, 40}
    assert set().union(*model.module.seen.values()) == {memory().buffer_active_bytes}


class CountingDevice(MLXDevice):
    n_cleared = 0

    def clear_cache(self):
        self.n_cleared += 1
        super().clear_cache()


def test_an_engine_that_closes_frees_its_buffers(before, models, tmp_path):
    """Unless another one works, which would allocate them again."""
    device = CountingDevice()
    scopes = MemoryScopes(device)
    with an_engine(models, tmp_path, memory(), scopes=scopes) as engine:
        engine.submit(ask(prompt_of(40), 3)).result()
        limit_at_rest(engine)
        n_cleared = device.n_cleared
        engine.clear()
        assert device.n_cleared == n_cleared + 1
    assert device.n_cleared == n_cleared + 2
    with scopes.active(memory()):
        an_engine(models, tmp_path, memory(), scopes=scopes).close()
    assert device.n_cleared == n_cleared + 2


# Low memory.


def test_an_engine_releases_what_it_keeps_when_memory_runs_low(models, tmp_path, monkeypatch):
    """Live caches and blocks; its own watcher does it."""
    free = {"bytes": 1 << 60}
    shared = Memory(1 << 40, lambda: free["bytes"], int)
    monkeypatch.setattr(engine_module, "memories", lambda **_: Memories(shared, shared))
    with an_engine(models, tmp_path, memory()) as engine:
        engine.submit(ask(prompt_of(600), 3)).result()
        engine.wait_until_saved()
        assert min(engine.live.stats.n_bytes, engine.store.tier_stats()["memory"].n_bytes) > 0
        free["bytes"] = 0
        deadline = time.monotonic() + 300
        while engine.store.tier_stats()["memory"].n_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.live.stats.n_bytes == engine.store.tier_stats()["memory"].n_bytes == 0


def test_an_engine_that_cannot_start_leaves_the_limits(before, models, tmp_path):
    class Broken:
        layers = (None,)

        def __call__(self, tokens, cache=None):
            raise ValueError("no")

    model, settings = replace(models.of("llama"), module=Broken()), settings_in(tmp_path)
    with Store(settings=settings) as store, pytest.raises(ValueError, match="no"):
        Engine(model, store, settings=settings)
    assert limit() == before


# Blocks in memory.


def tier_limit(engine):
    return engine.store.tier_stats()["memory"].max_bytes


def test_blocks_get_what_the_engine_was_told(models, tmp_path):
    """In a store of its own, and in one that it is given."""
    told = memory(tier_bytes=3 * MIB)
    with an_engine(models, tmp_path, told) as engine:
        assert tier_limit(engine) == 3 * MIB
    with (
        Store(settings=settings_in(tmp_path)) as store,
        Engine(models.of("llama"), store, EngineConfig(told)) as engine,
    ):
        assert tier_limit(engine) == 3 * MIB


def test_blocks_leave_room_for_the_model(models, tmp_path):
    """As all other budgets do; and the next model's room is another."""
    total = host_memory().total_bytes
    with Store(settings=settings_in(tmp_path)) as store:
        for n_bytes in (total // 2, total // 8):
            model = replace(models.of("llama"), n_bytes=n_bytes)
            wanted = MemoryConfig.automatic(model_bytes=n_bytes).tier_bytes
            with Engine(model, store, settings=store.settings) as engine:
                assert tier_limit(engine) == wanted


@pytest.mark.parametrize("budgets", [None, Budgets(memory_bytes=0), Budgets(memory_bytes=3 * MIB)])
def test_what_settings_or_a_program_say_of_blocks_holds(models, tmp_path, budgets):
    """Whatever the engine would have had; none at all is an answer too."""
    settings = settings_in(tmp_path, memory_bytes=5 * MIB)
    told = EngineConfig(MemoryConfig.unconstrained())
    with (
        Store(budgets=budgets, settings=settings) as store,
        Engine(models.of("llama"), store, told, settings=settings) as engine,
    ):
        assert tier_limit(engine) == (budgets.memory_bytes if budgets else 5 * MIB)


def test_blocks_beyond_the_engines_share_go(models, tmp_path):
    """A store that was there before holds no more than its engine lets it."""
    with Store(settings=settings_in(tmp_path)) as store:
        with Engine(models.of("llama"), store, settings=store.settings) as engine:
            engine.warm(ask(prompt_of(900))).result()
            engine.wait_until_saved()
        held = store.tier_stats()["memory"].n_bytes
        told = EngineConfig(memory(tier_bytes=held // 2))
        with Engine(models.of("llama"), store, told, settings=store.settings):
            assert 0 < store.tier_stats()["memory"].n_bytes <= held // 2
