"""GGUF files: read exactly as written; incomplete ones are refused with a reason."""

import struct
from collections import Counter
from random import Random

import mlx.core as mx
import pytest
from mlx import nn

from keepwarm.errors import BadModelFile, UnsupportedModel
from keepwarm.models.gguf import model as gguf
from keepwarm.models.gguf.file import read_header
from keepwarm.models.gguf.tokenizer import build_tokenizer, schemes
from keepwarm.models.load import load
from tests.kit.checkpoints import EOS, make_config, make_tokenizer, make_weights, write_checkpoint
from tests.kit.gguf_writer import U32, Encoded, encode_weights, metadata_for, write_gguf

KINDS = ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"]
TOKENS = mx.array([[5, 17, 230, 9, 44, 301, 12, 8]])
CONFIG = make_config(make_tokenizer())
TEXTS = [
    "The quick brown fox, in 1984!",
    "  two  spaces\n\tand é, 漢字, 🙂",
    "<|im_start|>user\nwhat?<|im_end|>\n",
]


def parts(kind="F32", config=CONFIG):
    """Metadata and tensors of a valid file; tests break one thing in them."""
    tensors, _ = encode_weights(config, make_weights(config), kind)
    return metadata_for(config), tensors


def logits(module):
    return module(TOKENS).astype(mx.float32)


def refuse(path, error, *words):
    """Loading raises this error, with these words in one sentence."""
    with pytest.raises(error) as refusal:
        load(str(path))
    assert all(word in str(refusal.value) for word in (*words, str(path)))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_equals_the_same_weights_from_a_directory(tmp_path, kind):
    tensors, meant = encode_weights(CONFIG, make_weights(CONFIG), kind)
    path = write_gguf(tmp_path / "model.gguf", metadata_for(CONFIG), tensors)
    directory = write_checkpoint(tmp_path / "directory")
    mx.save_safetensors(str(directory / "model.safetensors"), meant)
    got, wanted = load(str(path)), load(str(directory))
    # On a GPU the weights stay quantised, and its kernels round.
    tolerance = 0.0 if mx.default_device() == mx.cpu else 2e-2
    assert mx.abs(logits(got.module) - logits(wanted.module)).max() <= tolerance
    assert got.n_context == wanted.n_context == 4096
    for field in ("hidden_size", "head_dim", "num_key_value_heads", "tie_word_embeddings"):
        assert got.config[field] == wanted.config[field]


def test_rows_left_interleaved_would_give_other_logits(tmp_path):
    """Control: the comparison above sees the order of Q and K rows."""
    metadata, tensors = parts()
    weights = make_weights(CONFIG)
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = Encoded("F32", weights[name].shape, memoryview(weights[name]).tobytes())
    right = load(str(write_gguf(tmp_path / "right.gguf", metadata, tensors)))
    tensors["blk.0.attn_q.weight"] = plain
    wrong = load(str(write_gguf(tmp_path / "wrong.gguf", metadata, tensors)))
    assert mx.abs(logits(right.module) - logits(wrong.module)).max().item() > 0.01


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_quantised_weights_stay_quantised_for_a_gpu(tmp_path, kind, bits):
    path = write_gguf(tmp_path / "model.gguf", *parts(kind))
    module = gguf.build(gguf.read(path))
    layer = module.model.layers[1].mlp.down_proj
    assert isinstance(layer, nn.QuantizedLinear)
    assert (layer.bits, layer.group_size) == (bits, 32)
    assert isinstance(module.model.embed_tokens, nn.QuantizedEmbedding)
    exact = logits(load(str(path)).module)
    assert mx.abs(logits(module) - exact).max().item() < 0.05 * mx.abs(exact).max().item()


def test_norms_become_fp16_only_where_nothing_is_lost(tmp_path):
    metadata, tensors = parts("Q8_0")
    name = "output_norm.weight"
    ones = struct.pack("<64f", *[1.0] * 64)
    tensors[name] = tensors[name]._replace(data=ones)
    weights = gguf.read(write_gguf(tmp_path / "model.gguf", metadata, tensors)).weights
    assert weights["model.norm.weight"].dtype == mx.float16
    assert weights["model.layers.0.input_layernorm.weight"].dtype == mx.float32


def test_tied_embeddings_need_no_output_tensor(tmp_path):
    metadata, tensors = parts()
    del tensors["output.weight"]
    model = load(str(write_gguf(tmp_path / "model.gguf", metadata, tensors)))
    assert model.config["tie_word_embeddings"]
    assert logits(model.module).shape == (1, 8, CONFIG["vocab_size"])


@pytest.mark.parametrize("kind", KINDS)
def test_converted_directory_gives_the_same_logits(tmp_path, kind):
    path = write_gguf(tmp_path / "model.gguf", *parts(kind))
    directory = tmp_path / "directory"
    directory.mkdir()
    gguf.convert(path, directory)
    converted, direct = load(str(directory)), load(str(path))
    assert mx.array_equal(logits(converted.module), logits(direct.module))
    assert converted.tokenizer.eos_token_ids == direct.tokenizer.eos_token_ids
    assert converted.tokenizer.chat_template == direct.tokenizer.chat_template


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_is_the_one_that_was_packed(tmp_path, text):
    model = load(str(write_gguf(tmp_path / "model.gguf", *parts())))
    original = make_tokenizer()
    assert model.tokenizer.encode(text) == original.encode(text).ids
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    assert model.tokenizer.eos_token_ids == {original.token_to_id(EOS)}


def test_chat_template_comes_from_the_file(tmp_path):
    model = load(str(write_gguf(tmp_path / "model.gguf", *parts())))
    messages = [{"role": "user", "content": "what?"}]
    tokens = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    rendered = "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer.decode(tokens) == rendered


def test_both_end_tokens_end_an_answer(tmp_path):
    metadata, tensors = parts()
    metadata["tokenizer.ggml.eot_token_id"] = U32(0)
    model = load(str(write_gguf(tmp_path / "model.gguf", metadata, tensors)))
    assert model.tokenizer.eos_token_ids == {0, make_tokenizer().token_to_id(EOS)}


def test_beginning_token_is_added_where_the_file_says_so(tmp_path):
    metadata, _ = parts()
    metadata["tokenizer.ggml.add_bos_token"] = True
    assert build_tokenizer(tmp_path, metadata).encode("fox").tokens[0] == "<|im_start|>"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_end_token_is_added_where_the_file_says_so(tmp_path, adds_bos):
    """As embedders say it, whose vectors are those of this token."""
    metadata, _ = parts()
    metadata |= {
        f"tokenizer.ggml.add_{role}_token": True for role in ("eos", "bos")[: 1 + adds_bos]
    }
    tokens = build_tokenizer(tmp_path, metadata).encode("fox", "dog").tokens
    begins = ["<|im_start|>"] * adds_bos
    assert tokens[: len(begins)] == begins
    assert [index for index, token in enumerate(tokens) if token == EOS][-1] == len(tokens) - 1
    assert tokens.count(EOS) == 2
    assert tokens.count("<|im_start|>") == 2 * adds_bos


@pytest.mark.parametrize(
    ("said", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),  # linear is llama.cpp's default
        ({"rope.scale_linear": 4.0}, 4.0),  # and this the key's older name
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear"}, None),
    ],
)
def test_rope_is_scaled_as_llama_cpp_does(tmp_path, said, factor):
    metadata, tensors = parts()
    metadata |= {f"llama.{key}": value for key, value in said.items()}
    config = gguf.read(write_gguf(tmp_path / "model.gguf", metadata, tensors)).config
    wanted = factor and {"rope_type": "linear", "factor": factor}
    assert config.get("rope_scaling") == wanted


@pytest.mark.parametrize(
    "harmless",
    [{"pooling_type": U32(3)}, {"pooling_type": U32(0)}, {"attention.causal": True}],
)
def test_what_asks_for_nothing_else_is_taken(tmp_path, harmless):
    metadata, tensors = parts()
    metadata |= {f"llama.{key}": value for key, value in harmless.items()}
    load(str(write_gguf(tmp_path / "model.gguf", metadata, tensors)))


@pytest.mark.parametrize(
    ("scheme", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "!!", "ĊĠĠ", "Ġok"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "!!", "ĊĠĠ", "Ġok"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "!!Ċ", "ĠĠ", "Ġok"]),
    ],
)
def test_text_is_cut_as_each_scheme_says(scheme, pieces):
    cut = schemes()[scheme].pre_tokenizer.pre_tokenize_str("It's 1234!!\n   ok")
    assert [piece for piece, _ in cut] == pieces


def test_cut_off_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", *parts("Q4_0")).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in {*range(4, len(whole), 997), 4, 5, 8, 23, 24, len(whole) - 33}:
        path.write_bytes(whole[:length])
        refuse(path, BadModelFile, "truncated")


def test_changed_bytes_of_a_header_never_escape_as_another_error(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", *parts())
    whole = path.read_bytes()
    n_header = min(tensor.start for tensor in read_header(path).tensors.values())
    random, outcomes = Random(0), Counter()
    for _ in range(150):
        changed = bytearray(whole)
        changed[random.randrange(4, random.choice([1600, n_header]))] = random.choice([0, 1, 255])
        path.write_bytes(changed)
        try:
            load(str(path))
            outcomes["loaded"] += 1
        except (BadModelFile, UnsupportedModel):
            outcomes["refused"] += 1
    assert min(outcomes["loaded"], outcomes["refused"]) > 10


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100), b"FUGG" + bytes(99)])
def test_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refuse(path, BadModelFile, "not a GGUF file")


HUGE = struct.pack("<Q", 2**63 + 1)


@pytest.mark.parametrize(
    "header",
    [
        HUGE + bytes(8),  # tensors
        bytes(8) + HUGE,  # values
        bytes(8) + struct.pack("<Q", 1) + HUGE,  # length of a name
        bytes(8) + struct.pack("<QQ1sIIQ", 1, 1, b"a", 9, 4, 2**61),  # numbers in an array
        bytes(8) + struct.pack("<QQ1sIIQ", 1, 1, b"a", 9, 8, 2**61),  # strings in an array
        struct.pack("<QQQ1sI4QIQ", 1, 0, 1, b"t", 4, *[2**60] * 4, 0, 0),  # a tensor's shape
        struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"t", 1, 32, 0, 2**63),  # a tensor's place
    ],
)
def test_huge_counts_are_refused_at_once(tmp_path, header):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + header + bytes(64))
    refuse(path, BadModelFile)


@pytest.mark.parametrize(
    ("header", "error", "word"),
    [
        (struct.pack("<IQQ", 1, 0, 0), UnsupportedModel, "version 1"),
        (struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "version"),
        (struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99), BadModelFile, "type 99"),
        (struct.pack("<IQQQ1sII", 3, 0, 1, 1, b"a", 9, 9), BadModelFile, "type 9"),
        (struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), BadModelFile, "UTF-8"),
        (struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 0), BadModelFile, "0 dimensions"),
        (struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), BadModelFile, "9 dimensions"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 256, 39, 0), UnsupportedModel, "MXFP4"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0), BadModelFile, "(33,)"),
    ],
)
def test_broken_header_is_refused(tmp_path, header, error, word):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + header + bytes(512))
    refuse(path, error, word)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"general.architecture": "gemma3"}, UnsupportedModel, "gemma3"),
        ({"llama.attention.sliding_window": U32(4096)}, UnsupportedModel, "window"),
        ({"llama.attention.value_length": U32(8)}, UnsupportedModel, "values"),
        ({"split.count": U32(3)}, UnsupportedModel, "llama-gguf-split"),
        ({"llama.expert_count": U32(8)}, UnsupportedModel, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedModel, "RoPE"),
        ({"llama.rope.dimension_count": U32(8)}, UnsupportedModel, "RoPE"),
        ({"llama.rope.scaling.attn_factor": 2.0}, UnsupportedModel, "attn_factor"),
        ({"llama.rope.scaling.factor": "x"}, BadModelFile, "factor"),
        ({"llama.attention.causal": False}, UnsupportedModel, "attention.causal"),
        ({"llama.attention.scale": 0.5}, UnsupportedModel, "attention.scale"),
        ({"llama.pooling_type": U32(1)}, UnsupportedModel, "pooling_type"),
        ({"llama.block_count": U32(10**9)}, BadModelFile, "blk.2"),
        ({"llama.block_count": U32(0)}, BadModelFile, "block_count"),
        ({"llama.embedding_length": "big"}, BadModelFile, "embedding_length"),
        ({"llama.attention.head_count_kv": [2, 2]}, BadModelFile, "head_count_kv"),
        ({"general.alignment": U32(0)}, BadModelFile, "alignment"),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModel, "tekken"),
        ({"tokenizer.ggml.model": "llama"}, UnsupportedModel, "llama"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, BadModelFile, "differ in length"),
        ({"tokenizer.ggml.tokens": ["a"] * 999}, BadModelFile, "more tokens"),
        ({"tokenizer.ggml.merges": ["one"]}, BadModelFile, "tokenizer"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, change, error, word):
    metadata, tensors = parts()
    refuse(write_gguf(tmp_path / "model.gguf", metadata | change, tensors), error, word)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_up.weight"])
def test_missing_tensor_is_named(tmp_path, name):
    metadata, tensors = parts()
    del tensors[name]
    refuse(write_gguf(tmp_path / "model.gguf", metadata, tensors), BadModelFile, name, "missing")


def test_tensor_of_another_shape_is_named(tmp_path):
    metadata, tensors = parts()
    wrong = Encoded("F32", (32, 64), bytes(32 * 64 * 4))
    tensors["blk.0.attn_q.weight"] = wrong
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    refuse(path, BadModelFile, "blk.0.attn_q.weight", "(32, 64)", "(64, 64)")


def test_unknown_tensor_is_named(tmp_path):
    metadata, tensors = parts()
    tensors["blk.0.attn_q.bias"] = Encoded("F32", (64,), bytes(256))
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    refuse(path, UnsupportedModel, "blk.0.attn_q.bias")


def test_a_quantised_norm_is_refused(tmp_path):
    metadata, tensors = parts("Q8_0")
    name = "blk.0.attn_norm.weight"
    data = bytes(tensors[name].shape[0] // 32 * 34)
    tensors[name] = Encoded("Q8_0", tensors[name].shape, data)
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    refuse(path, BadModelFile, name, "quantised")


def test_a_header_of_too_many_values_is_refused(tmp_path):
    """Each takes more memory than it has bytes in the file."""
    path = tmp_path / "model.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    path.write_bytes(head + struct.pack("<IIQ", 9, 0, 1 << 22) + bytes(1 << 22))
    refuse(path, BadModelFile, "more than 4194304 values")


def test_a_long_string_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    n_bytes = (1 << 24) + 1
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, n_bytes) + bytes(n_bytes))
    refuse(path, BadModelFile, "a string of 16777217 bytes")
