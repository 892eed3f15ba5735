"""What is on disk after an answer: every layer's rows in blocks, their position, their owner."""

import json

import mlx.core as mx
import pytest

import keepwarm
from keepwarm import config, kv
from keepwarm.cache.store import Budgets, Store
from keepwarm.errors import BadInput, CacheError
from keepwarm.prefix.blocks import chain
from keepwarm.prefix.policy import Policy
from tests.kit.checkpoints import write_checkpoint
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import Job, batched, prompt_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return keepwarm.load(str(write_checkpoint(tmp_path_factory.mktemp("model"))))


def blocks_under(root):
    """Header and tensors of every block of rows, by its number, as MLX itself reads them."""
    files = [mx.load(str(p), return_metadata=True) for p in root.glob("blocks/*/*.d.safetensors")]
    headers = [(json.loads(metadata["keepwarm"]), tensors) for tensors, metadata in files]
    return {header["number"]: (header, tensors) for header, tensors in headers}


def test_a_generators_cache_becomes_blocks_of_every_layer_in_order(model, tmp_path):
    """Taken from the last response, cut every 256 tokens, the tail too."""
    prompt = prompt_of(600)
    (run,) = batched(model.module, [Job(prompt, 8)])
    tokens = [*prompt, *run.tokens]
    with keepwarm.Store(tmp_path) as store:
        kept = store.attach(model.module, source=model.path)
        kept.commit(tokens, run.cache)
        point = kept.restorer.plan([*tokens, 0]).point
    assert (point.n_tokens, [read.number for read in point.reads]) == (608, [0, 1, 2])
    blocks = blocks_under(tmp_path)
    assert sorted(blocks) == [0, 1, 2]
    for layer, cache in enumerate(run.cache):
        for name, rows in zip("KV", cache.keys_and_values(), strict=True):
            parts = [blocks[n][1][f"L{layer}_B{n}_{name}"] for n in range(3)]
            assert [part.shape[2] for part in parts] == [256, 256, 96]
            assert mx.array_equal(mx.concatenate(parts, axis=2), rows)


def test_a_saved_cache_says_its_place_and_its_owner(models, tmp_path):
    """Blocks by the hash of their tokens, in order, and a list of them by agent."""
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path) as engine:
        answer = (
            engine.submit(ask(prompt, 4, agent="ada", policy=Policy.DURABLE)).result().choices[0]
        )
        agent = engine.store.on_disk.agents.show("ada")
        said = engine.store.on_disk.tokens_of(agent)
    blocks = blocks_under(tmp_path / "store")
    assert said == [*prompt, *tokens_of(answer)]
    assert (agent.id, agent.n_tokens, agent.turns) == ("ada", 304, (304,))
    assert agent.blocks == tuple(ref.key for ref in chain(agent.namespace, said))
    own = [blocks[number][0] for number in (0, 1)]
    assert [header["key"] for header in own] == [key.hex() for key in agent.blocks]
    assert own[1]["parent"] == own[0]["key"]


def test_agent_asked_for_several_answers_goes_on_from_the_first(models, tmp_path):
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path) as engine:
        asked = ask(prompt, 4, agent="ada", n=3, temperature=1.5, seed=7)
        answers = [tokens_of(choice) for choice in engine.submit(asked).result().choices]
        engine.wait_until_saved()
        agent = engine.store.on_disk.agents.show("ada")
        said = engine.store.on_disk.tokens_of(agent)
    assert answers[0] not in answers[1:]
    assert (said, agent.turns) == ([*prompt, *answers[0]], (304,))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_an_agents_blocks_are_loaded_by_its_id(architecture, models, tmp_path):
    """By layer, in order, with the number of tokens and its labels."""
    prompt = prompt_of(600)
    with engine_on(models.of(architecture), tmp_path) as engine:
        engine.submit(ask(prompt, 4, agent="ada", policy=Policy.DURABLE)).result()
        engine.wait_until_saved()
        engine.store.on_disk.agents.update("ada", metadata={"team": "web"})
        loaded = engine.store.load_agent("ada")
        layout = engine.lane_of().restorer.layout
        restored = engine.lane_of().restorer.restore(
            [*engine.store.on_disk.tokens_of(engine.store.on_disk.agents.show("ada")), 0]
        )
    assert (loaded.n_tokens, loaded.metadata) == (604, {"team": "web"})
    assert list(loaded.layers) == list(range(len(layout.layers)))
    for layer, blocks in loaded.layers.items():
        assert [block.index for block in blocks] == sorted(block.index for block in blocks)
        names = {name for block in blocks for name in (*block.delta, *block.window, *block.state)}
        assert names
        assert all(name.startswith(f"L{layer}_") for name in names)
    rows = [layer for layer in loaded.layers if loaded.layers[layer][0].delta]
    for layer in rows if architecture == "llama" else ():
        blocks = loaded.layers[layer]
        ks, vs = ([b.delta[f"L{layer}_B{b.index}_{name}"] for b in blocks] for name in "KV")
        assert [k.shape[2] for k in ks] == [256, 256, 92]
        joined = kv.concatenate_cache_blocks(ks, vs)
        for mine, theirs in zip(joined, restored.caches[layer].state[:2], strict=True):
            assert mx.array_equal(mine, theirs[..., :604, :])  # behind them is room to grow


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_blocks_that_were_loaded_are_saved_as_another_agent(architecture, models, tmp_path):
    """It goes on from them, and nobody else does."""
    model, settings = models.of(architecture), config.load({"KEEPWARM_HOME": str(tmp_path)})
    with engine_on(model, tmp_path) as engine:
        engine.submit(ask(prompt_of(600), 4, agent="ada", policy=Policy.DURABLE)).result()
        engine.wait_until_saved()
        engine.store.on_disk.agents.update("ada", metadata={"team": "web"})
    with Store(settings=settings, budgets=Budgets(min_free_disk_bytes=0)) as store:
        kw, loaded = store.attach(model.module.model, model.path), store.load_agent("ada")
        kw.save_agent("eve", loaded)
        again = store.load_agent("eve")
        assert (again.tokens, again.metadata) == (loaded.tokens, {"team": "web"})
        for layer, blocks in again.layers.items():
            assert_same_tensors(blocks[-1], loaded.layers[layer][-1])
        with pytest.raises(BadInput, match="'eve' already exists"):
            kw.save_agent("eve", loaded)
        layers = {layer: blocks for layer, blocks in loaded.layers.items() if layer}
        with pytest.raises(CacheError, match="Layer 0, block"):
            kw.save_agent("one", loaded._replace(layers=layers))
        caches, _ = kw.restore([*loaded.tokens, 1])
        with pytest.raises(BadInput, match="holds 604 tokens, but 603 were given"):
            kw.import_agent("one", loaded.tokens[:-1], caches)
        assert not store.knows_agent("one")
        store.forget("ada")
    with engine_on(model, tmp_path) as engine:
        prompt = [*loaded.tokens, 1]
        own = engine.submit(ask(prompt, 1, agent="eve")).result().receipt
        assert own.reused == {"disk": 604}
        assert engine.submit(ask(prompt, 1)).result().receipt.cached_tokens == 0


def assert_same_tensors(block, expected):
    for kind in ("delta", "window", "state"):
        mine, theirs = getattr(block, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys()
        assert all(mx.array_equal(mine[name], theirs[name]) for name in theirs)
