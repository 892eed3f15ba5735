"""GGUF files with the quantisations of llama.cpp, written by its own package."""

import json
import math

import mlx.core as mx
import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, quants
from gguf import GGMLQuantizationType as Q

from tests.kit.checkpoints import CHATML, EOS, SPECIALS, make_tokenizer, write_checkpoint

HIDDEN, INNER, N_LAYERS, N_HEADS, N_KV, N_VOCAB = 256, 512, 2, 8, 4, 320
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# As llama.cpp's recipes mix them.
RECIPES = {
    "Q4_K_M": {"": Q.Q4_K, "attn_v": Q.Q6_K, "ffn_down": Q.Q6_K, "output.": Q.Q6_K},
    "Q5_K_M": {"": Q.Q5_K, "attn_v": Q.Q6_K, "token_embd": Q.Q5_1, "ffn_up": Q.Q5_0},
    "Q6_K": {"": Q.Q6_K, "attn_k": Q.Q8_0},
    "Q3_K_M": {"": Q.Q3_K, "attn_v": Q.Q5_K, "output.": Q.Q6_K, "ffn_down": Q.Q2_K},
    "IQ4_XS": {"": Q.IQ4_XS, "ffn_up": Q.IQ4_NL, "token_embd": Q.BF16},
}
HALVES = {  # where a block has its fp16 scales
    Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0],
    Q.Q2_K: [80, 82], Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208],
    Q.IQ2_XXS: [0], Q.IQ2_XS: [0], Q.IQ2_S: [0], Q.IQ3_XXS: [0], Q.IQ3_S: [0], Q.IQ1_S: [0],
    Q.IQ4_NL: [0], Q.IQ4_XS: [0], Q.IQ1_M: [],
}  # fmt: skip


def random_blocks(shape, kind, seed=0):
    """A tensor of any blocks with finite scales: every value of every other bit occurs."""
    rng = np.random.default_rng([seed, kind])
    if kind in (Q.F32, Q.F16, Q.BF16):
        return quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
    size, n_bytes = GGML_QUANT_SIZES[kind]
    n_blocks = math.prod(shape) // size
    blocks = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.uniform(0.5, 1, (n_blocks, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if kind == Q.IQ1_M:  # its scale is spread over the last nibbles; these are 0.5
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | np.array([0, 0, 0x80, 0x30], np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def sized(blocks, kind, wanted):
    """The same blocks with scales such that the weights have this standard deviation."""
    ratio = wanted / quants.dequantize(blocks, kind).std()
    if kind not in HALVES:
        return quants.quantize(quants.dequantize(blocks, kind) * np.float32(ratio), kind)
    flat = blocks.reshape(-1, GGML_QUANT_SIZES[kind][1]).copy()
    for at in HALVES[kind]:
        scales = flat[:, at : at + 2].copy().view(np.float16)
        flat[:, at : at + 2] = (scales * np.float16(ratio)).view(np.uint8)
    return flat.reshape(blocks.shape)


def shapes(architecture, head_dim):
    queries, keys = N_HEADS * head_dim, N_KV * head_dim
    layer = {
        "attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (queries, HIDDEN), "attn_k.weight": (keys, HIDDEN),
        "attn_v.weight": (keys, HIDDEN), "attn_output.weight": (HIDDEN, queries),
        "ffn_gate.weight": (INNER, HIDDEN), "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }  # fmt: skip
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if architecture == "qwen3":
        layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    layers = {f"blk.{i}.{name}": shape for i in range(N_LAYERS) for name, shape in layer.items()}
    ends = {"token_embd.weight": (N_VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return ends | {"output.weight": (N_VOCAB, HIDDEN)} | layers


def hub_name(name):
    if not name.startswith("blk."):
        return NAMES[name]
    _, index, part, suffix = name.split(".")
    return f"model.layers.{index}.{NAMES[part]}.{suffix}"


def in_halves(rows, head_dim):
    """Rows of Q or K as the hub has them; the converter of llama.cpp does the opposite."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


class Written:
    """A GGUF file, and the directory with the same weights, decoded by llama.cpp's package."""

    def __init__(self, folder, architecture, recipe, *, head_dim=32, tied=False, factor=None):
        self.architecture, self.head_dim, self.factor = architecture, head_dim, factor
        self.path, self.directory = folder / "model.gguf", folder / "directory"
        kinds, weights = RECIPES[recipe], {}
        writer = GGUFWriter(self.path, architecture)
        self._describe(writer)
        for seed, (name, shape) in enumerate(shapes(architecture, head_dim).items()):
            if tied and name == "output.weight":
                continue
            if len(shape) == 1:
                array = np.random.default_rng(seed).normal(1, 0.3, shape).astype(np.float32)
                writer.add_tensor(name, array)
            else:
                kind = next(kinds[part] for part in reversed(kinds) if part in name)
                blocks = sized(random_blocks(shape, kind, seed), kind, 1.5 / shape[-1] ** 0.5)
                writer.add_tensor(name, blocks, raw_dtype=kind)
                array = quants.dequantize(blocks, kind)
            if architecture == "llama" and ("attn_q" in name or "attn_k" in name):
                array = in_halves(array, head_dim)
            weights[hub_name(name)] = mx.array(array)
        if factor:
            writer.add_tensor("rope_freqs.weight", llama3_factors(head_dim, 500000.0, factor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self._write_directory(weights, tied)

    def _describe(self, writer):
        tokenizer = make_tokenizer()
        tokens = [tokenizer.id_to_token(index) for index in range(N_VOCAB)]
        writer.add_context_length(4096)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(N_LAYERS)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(N_HEADS)
        writer.add_head_count_kv(N_KV)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(500000.0)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm" if self.architecture == "llama" else "qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_eos_token_id(tokens.index(EOS))
        writer.add_chat_template(CHATML)

    def _write_directory(self, weights, tied):
        write_checkpoint(self.directory)
        mx.save_safetensors(str(self.directory / "model.safetensors"), weights)
        config = {
            "model_type": self.architecture, "hidden_size": HIDDEN, "intermediate_size": INNER,
            "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "vocab_size": N_VOCAB,
            "num_key_value_heads": N_KV, "head_dim": self.head_dim, "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
        }  # fmt: skip
        if self.factor:
            config["rope_scaling"] = {
                "rope_type": "llama3", "factor": self.factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            }  # fmt: skip
        (self.directory / "config.json").write_text(json.dumps(config))


def llama3_factors(head_dim, base, factor, low=1.0, high=4.0, context=8192):
    """As the converter of llama.cpp computes them, one by one."""
    found = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (index / head_dim)
        if wavelength < context / high:
            found.append(1.0)
        elif wavelength > context / low:
            found.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)
