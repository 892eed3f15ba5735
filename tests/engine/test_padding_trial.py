"""Padded rows compared with single ones, on models that are right and on models that are not; the
verdicts on disk, which are best effort."""

import sys

import mlx.core as mx
import pytest
from benchmarks.zoo.models import build

from keepwarm import kv
from keepwarm.engine.padding import (
    LENGTHS,
    PROMPT,
    STEPS,
    KnownVerdict,
    Verdict,
    VerdictsFile,
    try_padding,
)
from tests.kit.runs import FedCounter

GIB = 1 << 30


def run(model, max_bytes=GIB, max_tokens=sys.maxsize, **options):
    """The verdict, and the shapes of all passes."""
    counter = FedCounter(model)
    trial = try_padding(counter, lambda: kv.make_caches(model, **options), max_bytes, max_tokens)
    while True:
        try:
            next(trial)
        except StopIteration as end:
            return end.value, counter.shapes


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v32"])
def test_right_models_pass(name, tiny_model):
    """Rows, windows, states, an index beside the keys: with and without quantization."""
    for options in ({}, {"kv_bits": 8, "kv_group_size": 32}) if name == "llama" else ({},):
        verdict, _ = run(tiny_model(name), **options)
        assert verdict.shares
        assert verdict.n_tokens == max(LENGTHS)
        assert verdict.padded < 1e-4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rows_that_take_slots_for_positions_fail(dtype):
    """Here in one of four layers."""
    verdict, _ = run(build("afm7", dtype))
    assert not verdict.shares
    assert verdict.padded > 10 * verdict.unpadded
    assert run(build("llama", dtype))[0].shares


@pytest.mark.parametrize(("n_blocks", "n_tokens"), [(80, 771), (200, 4111)])
def test_rows_that_differ_only_when_they_are_long_fail(n_blocks, n_tokens):
    """Sparse attention drops blocks of 8 tokens only beyond its budget."""
    model = build("minimax_m3_vl")
    for layer in model.layers:
        layer.self_attn.index_topk_blocks = n_blocks
    verdict, _ = run(model)
    assert not verdict.shares
    assert verdict.n_tokens == n_tokens


def test_what_it_costs(tiny_model):
    """One short prompt, then passes of one token a row; long rows are not prefilled."""
    _, shapes = run(tiny_model("llama"))
    assert shapes[0] == (1, len(PROMPT))
    assert all(rows <= 2 and length == 1 for rows, length in shapes[1:])
    assert len(shapes) == 37


def test_memory_bounds_its_rows(tiny_model):
    model = tiny_model("llama")
    per_token = 2 * 2 * 64 * 2 * 4  # layers, heads, width, keys and values, bytes
    verdict, _ = run(model, max_bytes=6 * per_token * 500)
    assert verdict.n_tokens == 500
    assert run(model, max_bytes=1)[0].n_tokens == min(LENGTHS)


def test_its_rows_fit_into_the_models_context(tiny_model):
    """With the tokens that are decoded behind them."""
    verdict, _ = run(tiny_model("llama"), max_tokens=500)
    assert verdict.n_tokens + len(STEPS[0]) == 500


RIGHT = KnownVerdict("right", "0.32.2", Verdict(True, 0.0, 0.0, 4111))
WRONG = KnownVerdict("wrong", "0.32.2", Verdict(False, 0.5, 0.0, 97))


def test_verdicts_of_two_processes_are_both_kept(tmp_path):
    home = tmp_path / "home"
    first, second = VerdictsFile(home), VerdictsFile(home)
    for verdicts, key, known in ((first, "a", RIGHT), (second, "b", WRONG)):
        verdicts.put(key, known, keep=True)
        assert VerdictsFile(home).get(key) is None, "the engine's thread writes no file"
        verdicts.save()
    again = VerdictsFile(home)
    assert (again.get("a"), again.get("b"), again.get("c")) == (RIGHT.verdict, WRONG.verdict, None)
    assert again.alone() == [WRONG]


def test_a_verdict_that_could_not_be_written_is_written_later(tmp_path):
    """Also one that the engine's thread adds meanwhile."""
    verdicts = VerdictsFile(tmp_path)
    verdicts.put("a", RIGHT, keep=True)
    change = verdicts._file.change

    def fail(_):
        verdicts.put("b", WRONG, keep=True)
        raise OSError("full")

    verdicts._file.change = fail
    verdicts.save()
    verdicts._file.change = change
    verdicts.save()
    again = VerdictsFile(tmp_path)
    assert (again.get("a"), again.get("b")) == (RIGHT.verdict, WRONG.verdict)


def test_what_is_not_to_be_kept_holds_for_this_process(tmp_path):
    verdicts = VerdictsFile(tmp_path)
    verdicts.put("a", WRONG, keep=False)
    verdicts.save()
    assert verdicts.get("a") == WRONG.verdict
    assert VerdictsFile(tmp_path).get("a") is None


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"model": "m", "mlx_lm": "1"}}'])
def test_a_damaged_file_is_no_verdict(tmp_path, text):
    (tmp_path / "machine.json").write_text(f'{{"padding": {text}}}')
    verdicts = VerdictsFile(tmp_path)
    assert verdicts.get("a") is None
    verdicts.put("a", RIGHT, keep=True)
    verdicts.save()
    assert VerdictsFile(tmp_path).get("a") == RIGHT.verdict
