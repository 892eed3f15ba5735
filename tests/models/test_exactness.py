"""What is promised of a restored prompt: exact where the table of architectures says so."""

import mlx.core as mx
import pytest

from keepwarm.kv import make_caches, probe
from keepwarm.models.load import may_drift
from tests.kit.engines import ask, engine_on
from tests.kit.models import ARCHITECTURES, tiny
from tests.kit.runs import prompt_of


def drifts(module, kind=None):
    layout = probe(module, make_caches(module))
    module.model_type = kind or module.model_type
    return may_drift(module, layout.dtypes)


@pytest.mark.parametrize(
    ("architecture", "dtype", "expected"),
    [
        ("llama", mx.float32, False),
        ("llama", mx.bfloat16, False),
        ("llama", mx.float16, False),
        ("mamba2", mx.float32, False),
        ("mamba2", mx.bfloat16, True),
        ("mamba2", mx.float16, True),
    ],
)
def test_the_table_decides_by_type_and_dtype(architecture, dtype, expected):
    module = ARCHITECTURES[architecture]()
    module.set_dtype(dtype)
    assert drifts(module) is expected


def test_a_type_goes_by_mlx_lms_name_for_it_and_an_unknown_one_is_not_promised():
    assert not drifts(tiny("llama"), "mistral")
    assert not drifts(tiny("llama"), "qwen3_next")
    in_16_bits = tiny("llama")
    in_16_bits.set_dtype(mx.bfloat16)
    assert drifts(in_16_bits, "qwen3_next")  # it could not be run there
    assert drifts(tiny("llama"), "plamo3")
    assert drifts(tiny("llama"), "of next year")


def test_what_may_drift_is_said_where_something_was_reused(models, tmp_path):
    model = models.of("llama")
    model.module.model_type = "of next year"
    with engine_on(model, tmp_path) as engine:
        cold, warm = (engine.submit(ask(prompt_of(300), 2)).result().receipt for _ in range(2))
    assert (cold.exact, cold.inexact) == (True, ())
    assert (warm.exact, warm.inexact) == (False, ("drifts",))
