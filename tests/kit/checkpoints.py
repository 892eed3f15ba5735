"""Tiny real checkpoints: a Llama of 2 layers with random weights and a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from benchmarks.requests.files import llama_shapes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# An answer begins inside of a thought, unless thinking is switched off; past thoughts are shown.
THINKING_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>' }}{% endif %}"
    "{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"
NO_CHANGE: Mapping[str, int] = {}

CORPUS = (
    "The quick brown fox jumps over the lazy dog while the other dog sleeps under the tree.",
    "system user assistant: what is the answer to the question that the user asked the assistant?",
    "def answer(question): return the words of the document which hold the answer",
    "In 1984 there were 365 days, 12 months and 52 weeks.",
)


def write_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    n_context: int = 4096,
    tokenizer: Tokenizer | None = None,
    template: str = CHATML,
    shape: Mapping[str, int] = NO_CHANGE,  # changes to the config
) -> Path:
    """Write a Hugging Face style checkpoint that `load` and the command line accept."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or make_tokenizer()
    config = {**make_config(tokenizer, n_context), **shape}
    weights = {name: array.astype(dtype) for name, array in make_weights(config, seed).items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", config)
    described = tokenizer_config(n_context) | {"chat_template": template}
    _write_json(directory / "tokenizer_config.json", described)
    _write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    return directory


def make_tokenizer(
    corpus: Iterable[str] = CORPUS, n_vocab: int = 320, specials: Iterable[str] = SPECIALS
) -> Tokenizer:
    """Single digits, then byte level without a prefix space: the scheme of the default model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def make_config(tokenizer: Tokenizer, n_context: int = 4096) -> dict[str, Any]:
    """Untied embeddings: with tied random weights a model repeats its input in any case."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": n_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id(SPECIALS[1]),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }


def tokenizer_config(n_context: int = 4096) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": EOS,
        "pad_token": SPECIALS[0],
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_context,
    }


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random fp32 weights under the names of the Hugging Face format."""
    shapes = llama_shapes(config)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        noise = mx.random.normal(shape, key=key)
        norm = len(shape) == 1
        weights[name] = 1 + 0.1 * noise if norm else noise * (1.5 / shape[-1] ** 0.5)
    mx.eval(weights)
    return weights


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))
