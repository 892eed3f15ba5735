"""Three lines give a plain mlx-lm script a prompt cache that outlives it."""

import re
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import keepwarm
from keepwarm.cache.store import Budgets
from keepwarm.concurrency import CallDeadline
from keepwarm.errors import BadInput, CacheError, InsufficientResources, StoreFailed
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.store.tier import NamedBlock
from tests.kit.checkpoints import write_checkpoint
from tests.kit.compare import assert_same
from tests.kit.models import LAYER_KINDS
from tests.kit.runs import FedCounter, cold, continue_from, prefill, prompt_of
from tests.store.kit import chain_of

SOON = 30.0

EXAMPLE = Path(__file__).parents[2] / "examples" / "prompt_cache.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return keepwarm.load(str(write_checkpoint(tmp_path_factory.mktemp("model"))))


def test_commit_in_one_store_restore_in_the_next(model, tmp_path):
    """After everything was closed the next store finds all but the last token."""
    prompt = prompt_of(600)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module, source=model.path)
        cache, rest = kw.restore(prompt)
        assert rest == prompt
        kw.commit(prompt, prefill(model.module, cache, rest))
    with keepwarm.Store(tmp_path / "store") as store:
        cache, rest = store.attach(model.module, source=model.path).restore(prompt)
    assert rest == prompt[-1:]
    counter = FedCounter(model.module)
    assert_same(cold(model.module, prompt, 5), continue_from(counter, cache, rest, 5))
    assert counter.fed == 1 + 5


@pytest.mark.parametrize("architecture", LAYER_KINDS)
def test_a_script_keeps_the_last_place_before_the_end(models, tmp_path, architecture):
    """A state cannot be taken back: it is kept while mlx-lm prefills, for the same prompt again."""
    model, prompt = models.of(architecture), prompt_of(300)
    answers, n_fed = [], []
    for _ in range(2):
        with keepwarm.Store(tmp_path / "store") as store:
            kw = store.attach(model.module.model, source=model.path)
            cache, rest = kw.restore(prompt)
            steps = generate_step(
                mx.array(rest),
                model.module.model,
                prompt_cache=cache,
                max_tokens=4,
                prefill_step_size=128,
                prompt_progress_callback=kw.on_progress(prompt, cache),
            )
            answers.append([int(token) for token, _ in steps])
            n_fed.append(len(rest))
            kw.commit([*prompt, *answers[-1]], cache)
    assert n_fed == [300, 1]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("architecture", ["llama", "mamba2"])
def test_a_prefill_must_begin_where_its_cache_ends(models, tmp_path, architecture):
    """States count no tokens, and would be kept as those of another position."""
    model, prompt = models.of(architecture).module.model, prompt_of(900)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model, source=models.of(architecture).path)
        kw.commit(prompt[:300], prefill(model, *kw.restore(prompt[:300])))
        restored, rest = kw.restore(prompt)
        for fed, cache in [(prompt, restored), (rest, make_prompt_cache(model))]:
            steps = generate_step(
                mx.array(fed),
                model,
                prompt_cache=cache,
                prompt_progress_callback=kw.on_progress(prompt, cache),
            )
            with pytest.raises(BadInput, match=f"begins at token {900 - len(fed)}, but the cache"):
                next(steps)
        assert kw.restore(prompt).rest == rest


@pytest.mark.parametrize("architecture", LAYER_KINDS)
def test_a_commit_saves_only_what_is_new(models, tmp_path, architecture):
    """Turn by turn, with a queue that has no room for the whole conversation."""
    model, tokens, n_put = models.of(architecture), prompt_of(2800), [0]
    module = model.module.model
    cache = make_prompt_cache(module)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(module, source=model.path)
        for end in range(700, 2801, 700):
            kw.commit(tokens[:end], prefill(module, cache, tokens[end - 700 : end]))
            n_put.append(store.saver.n_put)
            store.flush()
    n_new = [after - before for before, after in pairwise(n_put)]
    assert max(n_new[2:]) <= n_new[1]
    with keepwarm.Store(tmp_path / "store") as store:
        assert store.attach(module, source=model.path).restore([*tokens, 1]).rest == [1]


def test_a_small_queue_has_room_for_a_turn(model, tmp_path):
    tokens, cache = prompt_of(3000), make_prompt_cache(model.module)
    block = prefill(model.module, make_prompt_cache(model.module), tokens[:256])
    budgets = Budgets(queue_bytes=3 * keepwarm.kv.live_bytes(block))
    with keepwarm.Store(tmp_path / "store", budgets) as store:
        kw = store.attach(model.module, source=model.path)
        for end in range(500, 3001, 500):
            kw.commit(tokens[:end], prefill(model.module, cache, tokens[end - 500 : end]))
            store.flush()
    with keepwarm.Store(tmp_path / "store") as store:
        assert store.attach(model.module, source=model.path).restore([*tokens, 1]).rest == [1]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1", "qwen3_next"])
def test_a_cache_that_the_queue_cannot_hold_is_saved_in_steps(models, tmp_path, architecture):
    """Whether it is committed or imported."""
    model, tokens = models.of(architecture), prompt_of(3000)
    module = model.module.model
    cache = prefill(module, make_prompt_cache(module), tokens)
    budgets = Budgets(memory_bytes=0, queue_bytes=keepwarm.kv.live_bytes(cache) // 3)
    with keepwarm.Store(tmp_path / "store", budgets) as store:
        kw = store.attach(module, source=model.path)
        kw.commit(tokens, cache)
        agent = kw.import_agent("old", tokens, cache)
        assert store.on_disk.tokens_of(agent) == tokens
    with keepwarm.Store(tmp_path / "store") as store:
        assert store.attach(module, source=model.path).restore([*tokens, 1]).rest == [1]


def test_a_cache_that_does_not_fit_is_not_imported(model, tmp_path):
    """An agent was made of its beginning."""
    tokens = prompt_of(1000)
    cache = prefill(model.module, make_prompt_cache(model.module), tokens)
    budgets = Budgets(disk_writes_per_day=keepwarm.kv.live_bytes(cache) // 2)
    with keepwarm.Store(tmp_path / "store", budgets) as store:
        kw = store.attach(model.module, source=model.path)
        with pytest.raises(InsufficientResources, match="raise disk_bytes"):
            kw.import_agent("old", tokens, cache)
        assert not store.knows_agent("old")
        assert not list(store.on_disk.disk.walk())


def test_a_bound_beside_a_narrow_window_is_restored_from_one_commit(models, tmp_path):
    """The blocks before the last have no rows of the narrow window, and none are needed."""
    model, tokens = models.of("gpt_oss", sliding_window=32), prompt_of(700)
    module, options = model.module.model, {"max_kv_size": 1024}
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(module, source=model.path, **options)
        cache = prefill(module, keepwarm.kv.make_caches(module, **options), tokens, step=256)
        kw.commit(tokens, cache)
        assert kw.restore([*tokens, 1]).rest == [1]
        store.flush()
        before = len(list(store.on_disk.disk.walk()))
        assert kw.restore(tokens[:400]).rest == tokens[:400], "their rows are gone"
        assert kw.restore([*tokens, 1]).rest == [1]
        assert len(list(store.on_disk.disk.walk())) == before, "sound records are set aside"


@pytest.mark.parametrize("end", [512, 600])
@pytest.mark.parametrize("architecture", LAYER_KINDS)
def test_a_commit_of_known_tokens_reaches_their_end(models, tmp_path, architecture, end):
    """Their blocks are those of a longer prompt, without what only the end of one has."""
    model, tokens = models.of(architecture), prompt_of(900)
    module = model.module.model
    caches = [prefill(module, make_prompt_cache(module), tokens[:n]) for n in (900, end)]
    for n, cache in zip((900, end), caches, strict=True):
        with keepwarm.Store(tmp_path / "store") as store:
            store.attach(module, source=model.path).commit(tokens[:n], cache)
    with keepwarm.Store(tmp_path / "store") as store:
        assert store.attach(module, source=model.path).restore([*tokens[:end], 1]).rest == [1]


def test_an_agent_id_that_could_not_be_a_file_name_is_refused(tmp_path):
    with keepwarm.Store(tmp_path / "store") as store:
        store.check_agent(None)
        store.check_agent("coder")
        with pytest.raises(BadInput, match="is not an agent id"):
            store.check_agent("../coder")


def test_no_file_stays_open(model, tmp_path):
    store = keepwarm.Store(tmp_path / "store")
    kw, prompt = store.attach(model.module, source=model.path), prompt_of(300)
    kw.commit(prompt, prefill(model.module, *kw.restore(prompt)))
    assert open_below(tmp_path)
    store.close()
    assert not open_below(tmp_path)


def test_a_closed_store_takes_nothing_in_silence(model, tmp_path):
    prompt = prompt_of(300)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module, source=model.path)
        cache = prefill(model.module, *kw.restore(prompt))
    for call in (
        lambda: kw.commit(prompt, cache),
        lambda: kw.restore(prompt),
        lambda: kw.on_progress(prompt, cache),
        lambda: kw.import_agent("ops", prompt, cache),
    ):
        with pytest.raises(StoreFailed, match="closed; open it again"):
            call()
    store.flush()
    store.close()


def test_a_store_that_cannot_open_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEPWARM_REMOTE", "foo://x")
    before = threading.enumerate()
    with pytest.raises(BadInput, match="names no place"):
        keepwarm.Store(tmp_path / "store")
    assert not open_below(tmp_path)
    assert {thread.name for thread in threading.enumerate() if thread not in before} == set()


def open_below(folder: Path) -> list[str]:
    files = psutil.Process().open_files()
    return [file.path for file in files if Path(file.path).is_relative_to(folder)]


def test_other_kv_options_are_another_identity(model, tmp_path):
    prompt = prompt_of(300)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module, source=model.path)
        kw.commit(prompt, prefill(model.module, make_prompt_cache(model.module), prompt))
        bounded = store.attach(model.module, source=model.path, max_kv_size=4096)
        assert bounded.restore(prompt).rest == prompt
        assert kw.restore(prompt).rest == prompt[-1:]


def test_exact_by_name_is_exact(model, tmp_path):
    prompt = prompt_of(300)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module, source=model.path, at_rest="exact")
        kw.commit(prompt, prefill(model.module, make_prompt_cache(model.module), prompt))
    with keepwarm.Store(tmp_path / "store") as store:
        plain = store.attach(model.module, source=model.path)
        assert plain.identity == kw.identity
        assert plain.restore(prompt).rest == prompt[-1:]


def test_a_cache_must_hold_what_is_named(model, tmp_path):
    prompt = prompt_of(20)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module, source=model.path)
        cache = prefill(model.module, make_prompt_cache(model.module), prompt)
        with pytest.raises(BadInput, match="holds 20 tokens, but 19 were given"):
            kw.commit(prompt[:-1], cache)
        with pytest.raises(BadInput, match="no tokens"):
            kw.restore([])


def wide(cache):
    """Two sequences in one."""
    for layer in cache:
        layer.keys, layer.values = (mx.concatenate([x, x]) for x in (layer.keys, layer.values))
    return cache


def half(cache):
    for layer in cache:
        layer.keys, layer.values = (x.astype(mx.float16) for x in (layer.keys, layer.values))
    return cache


FOREIGN = {
    "8 bit": (
        lambda cache: [layer.to_quantized(64, 8) for layer in cache],
        "Layer 0: the class is QuantizedKVCache, expected KVCache",
    ),
    "another dtype": (half, "the tensor keys is .*float16.*expected .*float32"),
    "one layer": (lambda cache: cache[:1], "the number of layers is 1, expected 2"),
    "several sequences": (wide, r"the tensor keys is .*\(2, .*expected .*\(1, "),
    "a batch": (lambda cache: keepwarm.kv.merge([cache, cache]), "is a batch; extract a row"),
    "empty": (lambda cache: [type(layer)() for layer in cache], "the tensor keys is missing"),
}


@pytest.mark.parametrize(("change", "why"), FOREIGN.values(), ids=FOREIGN)
def test_commit_refuses_a_cache_that_is_not_the_models(models, tmp_path, change, why):
    """It was taken, and its records were later called bad."""
    prompt, path = prompt_of(20), models.of("llama").path
    module = models.of("llama").module.model
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(module, source=path)
        cache = change(prefill(module, make_prompt_cache(module), prompt))
        with pytest.raises(CacheError, match=why):
            kw.commit(prompt, cache)
        assert not list(store.memory.walk())


def test_commit_refuses_a_state_of_another_shape(models, tmp_path):
    model = models.of("mamba2")
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module.model, source=model.path)
        cache = prefill(model.module.model, make_prompt_cache(model.module.model), prompt_of(20))
        cache[0][0] = cache[0][0][:, :1]
        with pytest.raises(CacheError, match="Layer 0: the tensor state0 is"):
            kw.commit(prompt_of(20), cache)


@pytest.mark.parametrize("make", [mx.array, np.array, tuple], ids=["mlx", "numpy", "tuple"])
def test_tokens_may_be_any_list_or_array(model, tmp_path, make):
    prompt = prompt_of(300)
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module, source=model.path)
        cache, rest = kw.restore(make(prompt))
        assert rest == prompt
        kw.commit(make(prompt), prefill(model.module, cache, rest))
        assert kw.restore(make(prompt)).rest == prompt[-1:]


@pytest.mark.parametrize("tokens", [[1, 2.0], [1, -1], "text", [[1, 2]], 7, [2**32], None])
def test_tokens_are_whole_numbers_from_0(model, tmp_path, tokens):
    with keepwarm.Store(tmp_path / "store") as store:
        kw = store.attach(model.module, source=model.path)
        for call in (kw.restore, lambda ids: kw.commit(ids, make_prompt_cache(model.module))):
            with pytest.raises(BadInput, match="whole numbers from 0"):
                call(tokens)


def test_the_example_twice(tmp_path, monkeypatch, capsys):
    """The second time it prefills only what is new, and says the same."""
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, str(write_checkpoint(tmp_path / "model"))])
    outputs = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        outputs.append(capsys.readouterr().out)
    warm = [re.search(r"(\d+) of (\d+) tokens were warm", out).groups() for out in outputs]
    total = int(warm[0][1])
    assert [int(n) for n, _ in warm] == [0, total - 1]
    answers = [out.splitlines()[-1] for out in outputs]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_what_is_deleted_while_it_is_fetched_does_not_come_back(tmp_path, monkeypatch, is_deleted):
    """From a shared tier, into memory."""
    (tmp_path / "place").mkdir()
    monkeypatch.setenv("KEEPWARM_REMOTE", (tmp_path / "place").as_uri())
    one, reads, goes_on = chain_of(1)[0], threading.Event(), threading.Event()
    key = one.header.key
    budgets = Budgets(memory_bytes=1 << 20, min_free_disk_bytes=0)
    with keepwarm.Store(tmp_path / "store", budgets) as store, ThreadPoolExecutor() as threads:
        (tier,) = store._lookups.shared
        assert tier.put(one).stored
        fetch = tier.backend.fetch

        def slow_fetch(*arguments, **options):
            reads.set()
            assert goes_on.wait(SOON)
            return fetch(*arguments, **options)

        monkeypatch.setattr(tier.backend, "fetch", slow_fetch)
        found = threads.submit(tier.read, key, Part.DELTA, deadline=CallDeadline(SOON))
        assert reads.wait(SOON)
        if is_deleted:
            store.on_disk.disk.forget("agent:ada", [NamedBlock(key, one.header.parent, 256)])
            store.catch_up()
        goes_on.set()
        assert found.result() is not None
        assert (key in store.memory.have([key])) is not is_deleted


def test_that_blocks_of_other_classes_may_be_here_outlives_the_index(tmp_path):
    """What this machine computes from them is not for others of its class."""
    root, shared = tmp_path / "store", tmp_path / "shared"
    shared.mkdir()

    def is_mixed(numerics):
        settings = keepwarm.Settings(
            home=tmp_path, store=root, remote=shared.as_uri(), share_numerics=numerics
        )
        with keepwarm.Store(settings=settings) as store:
            return store._mixed.are_here

    assert [is_mixed("own"), is_mixed("any"), is_mixed("own")] == [False, True, True]
    (root / "index.sqlite").unlink()
    assert is_mixed("own")


def test_that_another_process_brings_blocks_of_other_classes_is_learnt(model, tmp_path):
    """From then on this one shares no block as of its own class."""
    root, place = tmp_path / "store", tmp_path / "shared"
    place.mkdir()
    own = keepwarm.Settings(home=tmp_path, store=root, remote=place.as_uri())
    first, second = prompt_of(300), prompt_of(300, seed=1)
    with keepwarm.Store(settings=own) as store:
        restorer = store.attach(model.module, source=model.path).restorer

        def learns_and_shares(tokens):
            caches = prefill(model.module, make_prompt_cache(model.module), tokens)
            restorer.open(tokens).finish(tokens, caches)
            store.flush()
            assert restorer.look_up(tokens, Policy.READ_WRITE).is_on_disk(tokens)
            learns, before = restorer.mixed.are_here, set(place.rglob("*"))
            restorer.share(tokens).result()
            return learns, set(place.rglob("*")) != before

        assert learns_and_shares(first) == (False, True)
        keepwarm.Store(settings=replace(own, share_numerics="any")).close()
        assert learns_and_shares(second) == (True, False)
