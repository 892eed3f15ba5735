"""Models from directories: valid ones load and run, others are refused with a reason."""

import json
import shutil
import struct
import threading
from math import prod

import mlx.core as mx
import pytest
from benchmarks.requests.files import llama_shapes
from mlx import nn
from mlx.utils import tree_flatten

from keepwarm.device import space
from keepwarm.errors import (
    BadModelFile,
    InsufficientResources,
    KeepwarmError,
    UnknownModel,
    UnsupportedModel,
)
from keepwarm.kv import make_caches
from keepwarm.models.catalog import n_context
from keepwarm.models.load import PIECE_BYTES, load
from tests.kit.checkpoints import (
    EOS,
    make_config,
    make_tokenizer,
    make_weights,
    write_checkpoint,
)

TOKENS = mx.array([[5, 17, 230, 9, 44, 301, 12, 8]])
ON_GPU = mx.default_device() == mx.gpu


@pytest.fixture
def directory(tmp_path):
    return write_checkpoint(tmp_path / "model")


def refuse(name, error, *words):
    """Loading raises this error, with these words in one sentence."""
    with pytest.raises(KeepwarmError) as refusal:
        load(str(name))
    assert refusal.type is error
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert "\n" not in str(refusal.value)


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_directory_loads_as_it_was_written(directory):
    model = load(str(directory))
    assert (model.name, model.path, model.n_context) == (str(directory), directory, 4096)
    written = make_weights(make_config(make_tokenizer()))
    loaded = dict(tree_flatten(model.module.parameters()))
    assert loaded.keys() == written.keys()
    assert all(mx.array_equal(loaded[name], written[name]) for name in written)
    assert model.tokenizer.eos_token_ids == {make_tokenizer().token_to_id(EOS)}


def test_caches_fit_the_model(directory):
    model = load(str(directory))
    cache = make_caches(model.module)
    whole = model.module(TOKENS)
    first = model.module(TOKENS[:, :5], cache=cache)
    rest = model.module(TOKENS[:, 5:], cache=cache)
    assert len(cache) == 2
    assert mx.allclose(mx.concatenate([first, rest], axis=1), whole, atol=1e-4)


def test_another_thread_may_run_a_loaded_model(directory):
    """Lazy arrays, as the RoPE's table, would belong to the thread that loaded them."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 1024}
    edit_config(directory, rope_scaling=scaling)
    model = load(str(directory))
    sums = []
    thread = threading.Thread(target=lambda: sums.append(model.module(TOKENS).sum().item()))
    thread.start()
    thread.join()
    assert sums == [pytest.approx(model.module(TOKENS).sum().item(), rel=1e-4)]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_becomes_fp32_on_cpu_alone(tmp_path, dtype):
    model = load(str(write_checkpoint(tmp_path / "model", dtype=dtype)))
    wanted = dtype if ON_GPU else mx.float32
    written = make_weights(make_config(make_tokenizer()))["lm_head.weight"].astype(dtype)
    assert mx.array_equal(model.module.lm_head.weight, written.astype(wanted))
    cache = make_caches(model.module)
    assert model.module(TOKENS, cache=cache).dtype == wanted
    assert cache[0].keys.dtype == wanted


def test_quantised_weights_become_fp32_on_cpu_alone(directory):
    model = load(str(directory))
    nn.quantize(model.module, group_size=32, bits=4)
    quantised = model.module(TOKENS)
    weights = dict(tree_flatten(model.module.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    edit_config(directory, quantization={"group_size": 32, "bits": 4})
    again = load(str(directory))
    dtypes = {array.dtype for _, array in tree_flatten(again.module.parameters())}
    assert dtypes == ({mx.float32, mx.uint32} if ON_GPU else {mx.float32})
    assert mx.allclose(again.module(TOKENS), quantised, atol=1e-3)


def test_home_is_understood_in_a_path(directory, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    assert load("~/model").path == directory


@pytest.mark.parametrize(
    "name",
    ["smolm2", "./nowhere", "/no/such/model", "model.gguf", "", "x" * 5000, "~nobody9/x", "a\0b"],
)
def test_unknown_name_says_which_names_work(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refuse(name, UnknownModel, repr(name)[:400], "smollm2", "directory", ".gguf", "org/name")


@pytest.mark.parametrize("name", ["org/a--b", "org/" + "x" * 200, "org/name."])
def test_id_that_no_hub_can_have_is_unknown(name):
    refuse(name, UnknownModel, name)


def test_directory_without_config_is_refused(directory):
    (directory / "config.json").unlink()
    refuse(directory, BadModelFile, "config.json")


def test_config_that_cannot_be_read_is_refused(directory):
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    refuse(directory, BadModelFile, "config.json", "directory")


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\x00", pytest.param("[" * 100_000, id="deep")])
def test_config_that_is_none_is_refused(directory, text):
    (directory / "config.json").write_text(text)
    refuse(directory, BadModelFile, "config.json")


@pytest.mark.parametrize("changes", [{"model_type": 5}, {"text_config": "x"}])
def test_config_with_a_value_of_another_kind_is_refused(directory, changes):
    edit_config(directory, **changes)
    refuse(directory, BadModelFile, "config.json", next(iter(changes)), "download")


def test_end_tokens_that_are_no_numbers_are_refused(directory):
    """Of the tokenizer, where mlx-lm puts them; in config.json transformers refuses them."""
    (directory / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    refuse(directory, BadModelFile, "eos_token_id", "download")


def test_directory_without_weights_is_refused(directory):
    (directory / "model.safetensors").unlink()
    refuse(directory, BadModelFile, "weights")


def test_directory_without_tokenizer_is_refused(directory):
    (directory / "tokenizer.json").unlink()
    refuse(directory, BadModelFile, "tokenizer.json")


def test_broken_tokenizer_is_refused(directory):
    (directory / "tokenizer.json").write_text('{"model": 5}')
    refuse(directory, BadModelFile, "The tokenizer of")


@pytest.mark.parametrize(
    "fields", [{"max_position_embeddings": "many"}, {"id2label": 7}, {"num_labels": "x"}]
)
def test_config_with_a_wrong_value_is_not_told_as_a_broken_tokenizer(directory, fields):
    edit_config(directory, **fields)
    refuse(directory, BadModelFile, "The config.json of")


def test_config_of_words_is_not_told_as_an_unsupported_architecture(directory):
    edit_config(directory, vocab_size="many")
    refuse(directory, BadModelFile, "is not a complete model")


def test_unsupported_architecture_is_named(directory):
    edit_config(directory, model_type="perceiver9000", architectures=["Perceiver9000"])
    refuse(directory, UnsupportedModel, "perceiver9000")


def test_model_that_would_write_outside_its_memory_is_refused(directory):
    """mlx-lm's phi3small sets logits of tokens by their numbers, up to 100,351."""
    edit_config(directory, model_type="phi3small", vocab_size=100_351)
    refuse(directory, UnsupportedModel, "100351", "'phi3small' only with 100352")
    edit_config(directory, vocab_size=100_352)
    refuse(directory, BadModelFile, "is not a complete model")


def test_code_of_a_model_is_never_run(directory):
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(directory, model_file="evil.py")
    refuse(directory, UnsupportedModel, "llama")


def test_config_without_a_needed_field_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    del config["hidden_size"]
    (directory / "config.json").write_text(json.dumps(config))
    refuse(directory, BadModelFile, "hidden_size")


def test_truncated_weights_are_refused(directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refuse(directory, BadModelFile)


def test_missing_and_misshapen_weights_are_refused(directory):
    weights = make_weights(make_config(make_tokenizer()))
    missing = weights.pop("model.norm.weight")
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    refuse(directory, BadModelFile)
    weights["model.norm.weight"] = missing[:10]
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    refuse(directory, BadModelFile)


def test_context_is_found_where_models_write_it():
    assert n_context({"max_position_embeddings": 77}) == 77
    assert n_context({"n_positions": 78}) == 78
    assert n_context({"text_config": {"max_position_embeddings": 79}}) == 79
    assert n_context({"model_type": "mamba"}) > 10**9


def test_too_little_room_is_said_with_both_numbers():
    space.require("It", 100, 100, "memory")
    with pytest.raises(
        InsufficientResources, match=r"It needs 2\.5 GiB of memory and only 300 MiB is free"
    ):
        space.require("It", 5 << 29, 300 << 20, "memory")


def test_model_larger_than_memory_is_refused_before_it_is_read(directory):
    """A sparse file of half a terabyte: reading it would take minutes."""
    rows = 2**31 - 1
    config = make_config(make_tokenizer()) | {"vocab_size": rows, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    shapes = llama_shapes(config)
    del shapes["lm_head.weight"]
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    refuse(directory, InsufficientResources, "512 GiB of memory", "free")


def test_disk_and_memory_are_measured(tmp_path):
    place = tmp_path / "not" / "yet" / "there"
    space.require_disk("It", 1000, place)
    space.require_memory("It", 1000)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(InsufficientResources, match=f"disk in {place}"):
        space.require_disk("It", 2 * free + 10**9, place)
    with pytest.raises(InsufficientResources, match="memory"):
        space.require_memory("It", 10**18)


def test_weights_whose_header_lies_are_refused_before_mlx_reads_them(tmp_path):
    """MLX takes the offsets as they are and fails when it reads, or reads something else."""
    directory = write_checkpoint(tmp_path / "model")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    refuse(directory, BadModelFile, "model.safetensors", "not a complete safetensors file")


def shard(directory, *, head):
    """Write the weights as two files and an index; the head is in this one."""
    weights = mx.load(str(directory / "model.safetensors"))
    mx.eval(weights)
    (directory / "model.safetensors").unlink()
    places = {name: head if "lm_head" in name else "model-1.safetensors" for name in weights}
    for place in set(places.values()):
        kept = {name: array for name, array in weights.items() if places[name] == place}
        mx.save_safetensors(str(directory / place), kept, {"format": "mlx"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_a_head_whose_file_is_missing_is_not_one_that_was_left_out(directory):
    """With the embeddings as its head it would answer, wrongly."""
    shard(directory, head="model-2.safetensors")
    load(str(directory))
    (directory / "model-2.safetensors").unlink()
    refuse(directory, BadModelFile, "not a complete model", "lm_head")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": []}}'])
def test_an_index_that_says_nothing_is_ignored(directory, index):
    (directory / "model.safetensors.index.json").write_text(index)
    load(str(directory))


def test_an_index_of_other_files_is_ignored(directory):
    """As of the model that an embedder was made from."""
    shard(directory, head="model-2.safetensors")
    (directory / "model-2.safetensors").unlink()
    (directory / "model-1.safetensors").rename(directory / "model.safetensors")
    load(str(directory))


def test_files_that_are_replaced_while_they_are_read_are_refused(directory):
    """Weights of the one and a tokenizer of the other would be no model's."""

    def replace(said):
        if said == "reading weights, 0 %":
            write_checkpoint(directory, seed=1)

    with pytest.raises(BadModelFile, match="changed while they were read; load it again"):
        load(str(directory), report=replace)


def test_progress_is_told(tmp_path):
    """Embedding and head are a piece each, the layers between them are the rest of one."""
    n_vocab = PIECE_BYTES // (4 * make_config(make_tokenizer())["hidden_size"])
    path = write_checkpoint(tmp_path / "model", shape={"vocab_size": n_vocab})
    said = []
    load(str(path), report=said.append)
    assert said[:3] == ["finding its files", "opening its files", "reading weights, 0 %"]
    told = [int(line.split()[-2]) for line in said[2:]]
    assert told == sorted(told)
    assert 40 < told[-1] < 100
