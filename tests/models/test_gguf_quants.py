"""GGUF files as people have them, written by llama.cpp's own package, the yardstick too."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from random import Random

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Q
from mlx import nn
from mlx.utils import tree_flatten
from transformers import Qwen2Tokenizer

from keepwarm.errors import UnsupportedModel
from keepwarm.models.gguf import model as gguf_model
from keepwarm.models.gguf.file import OTHER_TYPES, TYPES, GGUFTensor
from keepwarm.models.gguf.model import GROUP, held_bits, held_bytes, to_arrays
from keepwarm.models.load import load
from tests.kit.checkpoints import EOS, SPECIALS, make_tokenizer
from tests.kit.gguf_models import N_VOCAB, Written, random_blocks

TOKENS = mx.array([[5, 17, 230, 9, 44, 301, 12, 8] * 4])
GPU_BITS = {"Q4_K_M": {4, 8}, "Q5_K_M": {5, 8}, "IQ4_XS": {8}}
LONG = mx.array([[(7 * i) % N_VOCAB for i in range(300)]])


def distance(one, other, tokens=TOKENS):
    """The largest difference of logits, as a share of the largest logit."""
    first, second = one.module(tokens), other.module(tokens)
    scale = mx.abs(second).max()
    assert scale.item() > 0.1
    return (mx.abs(first - second).max() / scale).item()


@pytest.mark.parametrize(
    ("architecture", "recipe", "options"),
    [
        ("llama", "Q4_K_M", {}),
        ("llama", "Q6_K", {"tied": True, "factor": 8.0}),
        ("qwen2", "Q4_K_M", {"tied": True}),
        ("qwen2", "Q5_K_M", {}),
        ("qwen3", "Q4_K_M", {"head_dim": 64}),
        ("qwen3", "Q3_K_M", {"head_dim": 64, "tied": True}),
        ("qwen3", "IQ4_XS", {"head_dim": 64}),
    ],
)
def test_logits_are_those_of_the_decoded_weights(tmp_path, architecture, recipe, options):
    """On a CPU the weights are the same numbers; a GPU keeps them packed, its scales in fp16."""
    written = Written(tmp_path, architecture, recipe, **options)
    got, wanted = load(str(written.path)), load(str(written.directory))
    tolerance = 0.0 if mx.default_device() == mx.cpu else 2e-2
    assert distance(got, wanted) <= tolerance
    assert got.config["tie_word_embeddings"] == options.get("tied", False)
    messages = [{"role": "user", "content": "what?"}]
    asked = [model.tokenizer.apply_chat_template(messages) for model in (got, wanted)]
    assert asked[0] == asked[1]


def test_the_conversion_says_how_far_it_is(tmp_path):
    said = []
    load(str(Written(tmp_path, "qwen2", "Q6_K").path), report=said.append)
    shares = [int(re.search(r"(\d+) %", each)[1]) for each in said if "converting" in each]
    assert (shares[0], shares[-1] > 50) == (0, True)
    assert shares == sorted(shares)


@pytest.mark.parametrize(
    ("architecture", "recipe"), [("llama", "Q4_K_M"), ("qwen2", "Q5_K_M"), ("qwen3", "IQ4_XS")]
)
def test_a_gpu_keeps_weights_packed_and_computes_in_fp16(
    tmp_path, architecture, recipe, monkeypatch
):
    """What a GPU would hold. At 8 bits a weight of Q6_K moves by 0.3 % of their deviation, on the
    average, and all logits by less than 3 % of the largest."""
    written = Written(tmp_path, architecture, recipe)
    exact = load(str(written.directory))
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.gpu)
        module = gguf_model.build(gguf_model.read(written.path))
    weights = dict(tree_flatten(module.parameters()))
    assert {array.dtype for array in weights.values()} == {mx.uint32, mx.float16}
    layers = [each for _, each in module.named_modules() if isinstance(each, nn.QuantizedLinear)]
    assert len(layers) == 7 * 2 + 1
    assert {layer.bits for layer in layers} == GPU_BITS[recipe]
    module.set_dtype(mx.float32)  # in fp16, MLX's kernels for CPUs add up too much rounding
    got, wanted = module(TOKENS), exact.module(TOKENS)
    assert (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item() < 3e-2


@pytest.mark.parametrize("left_out", ["blk.1.attn_k.bias", "blk.1.attn_q_norm.weight"])
def test_biases_and_norms_of_heads_count(tmp_path, left_out):
    """Control: the comparison above sees them."""
    architecture = "qwen2" if left_out.endswith("bias") else "qwen3"
    written = Written(tmp_path, architecture, "Q6_K")
    got, wanted = load(str(written.path)), load(str(written.directory))
    part = got.module.model.layers[1].self_attn
    if architecture == "qwen2":
        part.k_proj.bias = part.k_proj.bias * 0
    else:
        part.q_norm.weight = mx.ones_like(part.q_norm.weight)
    assert distance(got, wanted) > 0.01


def test_scaled_rope_counts(tmp_path):
    """Control: with other factors far tokens are seen elsewhere."""
    written = Written(tmp_path, "llama", "Q6_K", factor=8.0)
    got = load(str(written.path))
    assert got.config["rope_scaling"]["factor"] == 8.0
    config = json.loads((written.directory / "config.json").read_text())
    del config["rope_scaling"]
    (written.directory / "config.json").write_text(json.dumps(config))
    assert distance(got, load(str(written.directory)), LONG) > 1e-4


def test_rope_scaled_otherwise_is_refused(tmp_path, monkeypatch):
    doubled = lambda dim, *_: np.full(dim // 2, 2.0, np.float32)  # noqa: E731
    monkeypatch.setattr("tests.kit.gguf_models.llama3_factors", doubled)
    with pytest.raises(UnsupportedModel, match="another way than Llama 3"):
        load(str(Written(tmp_path, "llama", "Q6_K", factor=2.0).path))


def test_types_are_those_of_llama_cpp():
    for number, kind in TYPES.items():
        assert (Q(number).name, GGML_QUANT_SIZES[Q(number)]) == (kind.name, kind[1:3])
    assert {number: Q(number).name for number in OTHER_TYPES} == OTHER_TYPES


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("number", TYPES)
def test_every_type_has_the_values_that_llama_cpp_decodes(number, on_gpu, monkeypatch):
    """Exact on a CPU; on a GPU scales are rounded to fp16, and a step of 255 is lost at most
    where MLX does not have the type."""
    monkeypatch.setattr("keepwarm.models.gguf.model.PIECE_WEIGHTS", 3 * 512)  # several pieces
    kind, shape = TYPES[number], (10, 512)
    blocks = random_blocks(shape, Q(number))
    wanted = quants.dequantize(blocks, Q(number))
    data = np.concatenate([np.zeros(32, np.uint8), blocks.view(np.uint8).reshape(-1)])
    tensor = GGUFTensor(shape, kind, 32)
    with ThreadPoolExecutor(2) as workers:
        arrays = to_arrays(tensor, data, workers, on_gpu=on_gpu)
    bits = held_bits(kind, on_gpu=on_gpu)
    if bits:
        parts = [arrays["weight"], *(arrays[n].astype(mx.float32) for n in ("scales", "biases"))]
        got = np.array(mx.dequantize(*parts, group_size=GROUP, bits=bits))
    else:
        got = np.array(arrays["weight"].astype(mx.float32))
    groups = wanted.reshape(-1, GROUP)
    spread = np.ptp(groups, axis=1, keepdims=True)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    allowed = np.zeros_like(spread)
    if on_gpu and bits:
        allowed = (spread + largest) * 2.0**-10 + (0 if kind.bits else spread / 255)
    assert (np.abs(got - wanted).reshape(-1, GROUP) <= allowed).all()
    assert np.ptp(wanted) > 0
    size = sum(array.nbytes for array in arrays.values())
    assert 0.8 <= size / held_bytes(tensor, on_gpu=on_gpu) <= 1


TEXTS = [
    "The quick brown fox, in 1984! It's what they'LL ask: 3.14159",
    "  two  spaces\n\n\tand é, e\u0301, 漢字, 🙂‍↔️ ﬁ Å",
    "<|im_start|>user\nwhat?<|im_end|>\n\r\n x\u00a0y \u2028",
    "def f(x):\n    return [x**2 for _ in range(10)]  # ok\n",
]


def random_texts(n):
    random = Random(0)
    alphabet = "ab AB12'\n\r\t .,!?-_<|>ée\u0301ßﬃ\u0327漢字אب🙂\u200d\u00a0" + SPECIALS[1]
    return ["".join(random.choices(alphabet, k=random.randrange(40))) for _ in range(n)]


def test_tokens_are_those_of_qwens_own_tokenizer(tmp_path):
    """NFC, single digits, contractions in any case; beside transformers' class for Qwen."""
    own = load(str(Written(tmp_path, "qwen2", "Q6_K").path)).tokenizer
    model = json.loads(make_tokenizer().to_str())["model"]
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]])
    theirs.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    other = make_tokenizer()
    texts = TEXTS + random_texts(500)
    assert [own.encode(text) for text in texts] == [theirs.encode(text) for text in texts]
    assert any(own.encode(text) != other.encode(text).ids for text in texts)
    assert own.eos_token_ids == {other.token_to_id(EOS)}


def test_a_file_of_llama_cpps_package_is_read_as_it_reads_it(tmp_path):
    """Names and shapes of all tensors, by both readers."""
    from keepwarm.models.gguf.file import read_header

    path = Written(tmp_path, "qwen3", "Q4_K_M").path
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    ours = read_header(path).tensors
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tuple(tensor.shape.tolist())[::-1]
        assert (ours[name].start, ours[name].n_bytes) == (tensor.data_offset, tensor.n_bytes)
