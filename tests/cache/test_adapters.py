"""An adapter changes keys and values: with another one nothing of it is found."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers

import keepwarm
from keepwarm import kv
from keepwarm.cache.identity import identity_of
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput
from keepwarm.prefix.fingerprint import namespace
from tests.kit.checkpoints import write_checkpoint
from tests.kit.runs import prefill, prompt_of

PROMPT = prompt_of(300)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def write_adapter(path, directory, *, seed=0, kind="lora", keys=None):
    """What `mlx_lm.lora` leaves after training, with random numbers for what was learnt."""
    model, _ = load(str(path))
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0} | ({"keys": keys} if keys else {})
    linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    named = dict(tree_flatten(model.parameters()))
    shapes = {name: a.shape for name, a in named.items() if name.endswith(("lora_a", "lora_b"))}
    drawn = zip(shapes.items(), mx.random.split(mx.random.key(seed), len(shapes)), strict=True)
    weights = {name: mx.random.normal(shape, key=key) for (name, shape), key in drawn}
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def kept(store, model, path, **options):
    """A prompt of this model, computed and committed."""
    kw = store.attach(model, source=path, **options)
    cache = prefill(model, kv.make_caches(model), PROMPT)
    kw.commit(PROMPT, cache)
    return kw, cache


def test_another_adapter_is_another_namespace(path, tmp_path):
    """Fingerprint: the base model, and each adapter, find what is their own."""
    adapters = [write_adapter(path, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    models = [load(str(path), adapter_path=str(adapter))[0] for adapter in adapters]
    with keepwarm.Store(tmp_path / "store") as store:
        base, cache = kept(store, load(str(path))[0], path)
        first, adapted = kept(store, models[0], path, adapter=adapters[0])
        other = store.attach(models[1], source=path, adapter=str(adapters[1]))
        assert not mx.allclose(cache[-1].keys, adapted[-1].keys), "the adapter does nothing"
        assert [len(kw.restore(PROMPT).rest) for kw in (base, first, other)] == [1, 1, 300]
        found = first.restore(PROMPT).cache[-1].keys[..., :299, :]
        assert mx.array_equal(found, adapted[-1].keys[..., :299, :])


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("keys", [["self_attn.q_proj"], ["model.embed_tokens"]])
def test_an_adapter_that_is_not_named_is_refused(path, tmp_path, kind, keys):
    adapter = write_adapter(path, tmp_path / "adapter", kind=kind, keys=keys)
    model, _ = load(str(path), adapter_path=str(adapter))
    with keepwarm.Store(tmp_path / "store") as store:
        with pytest.raises(BadInput, match="has an adapter"):
            store.attach(model, source=path)
        store.attach(model, source=path, adapter=adapter)


def test_the_engine_and_bundles_refuse_it_too(path, tmp_path):
    loaded = keepwarm.load(str(path))
    linear_to_lora_layers(loaded.module, 2, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    mx.eval(loaded.module)  # another thread runs it
    with keepwarm.Store(tmp_path / "store") as store:
        with pytest.raises(BadInput, match="has an adapter"):
            identity_of(loaded.module, path, store.settings)
        with Engine(loaded, store) as engine, pytest.raises(BadInput, match="has an adapter"):
            engine.submit(keepwarm.Request(prompt=PROMPT))


def test_an_adapter_of_nothing_but_weights_may_be_named(path, tmp_path):
    """Fine-tuned in full there are no layers to see it by."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "adapters.safetensors").write_bytes(b"all of them")
    model, _ = load(str(path))
    with keepwarm.Store(tmp_path / "store") as store:
        names = [
            namespace(identity_of(model, path, store.settings, adapter=adapter))
            for adapter in (None, full, str(full))
        ]
    assert names[0] != names[1] == names[2]


@pytest.mark.parametrize("named", ["nowhere", "adapter/adapters.safetensors"])
def test_an_adapter_that_is_no_directory_is_refused(path, tmp_path, named):
    """Its rank and scale are in another file than its weights."""
    write_adapter(path, tmp_path / "adapter")
    model, _ = load(str(path))
    with (
        keepwarm.Store(tmp_path / "store") as store,
        pytest.raises(BadInput, match="no adapter"),
    ):
        store.attach(model, source=path, adapter=tmp_path / named)
