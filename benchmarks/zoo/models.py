"""Tiny random models of every type that mlx-lm runs, from `models.toml`."""

from __future__ import annotations

import inspect
import io
import math
import pkgutil
import tomllib
from contextlib import redirect_stdout
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten

GAIN = 2.0
SEED = 7
# Decay parameters of state layers. With random values a state decays within twenty tokens, and an
# earlier error would not be seen.
SLOW_DECAY = ("A_log", "recurrent_param", "w_lora.lora.2.bias")


def model_types() -> list[str]:
    """Every model type of the installed mlx-lm, also those that cannot be imported."""
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [name for name in names if _is_model(name)]


def _is_model(name: str) -> bool:
    try:
        return hasattr(_module(name), "ModelArgs")
    except ImportError:  # it lacks a package
        return True


def _module(name: str) -> ModuleType:
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            return import_module(f"mlx_lm.models.{name}")
    except SystemExit as end:  # it says what it lacks, and would end this program
        raise ImportError(said.getvalue().strip()) from end


def build(name: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """A new tiny model of this type, with changes; equal calls give equal weights."""
    module = _module(name)
    model = module.Model(module.ModelArgs.from_dict(config_of(name) | changes))
    model.eval()  # as after loading: some keep arrays then that they compute at the first call
    randomise(model)
    if dtype != mx.float32:
        model.set_dtype(dtype)
        mx.eval(model)
    return model


def config_of(name: str) -> dict[str, Any]:
    """The config of a tiny model, as its `config.json` would hold it."""
    tables = tomllib.loads(files(__package__).joinpath("models.toml").read_text())
    module = _module(name)
    own = tables.get(name, {})
    given = {**tables["common"], **own, "model_type": name}
    required = _required(module.ModelArgs)
    if "text_config" in inspect.signature(module.ModelArgs).parameters:
        given = {**given, "text_config": given}
    return {field: given.get(field) for field in {*required, *given}}


def _required(args: type) -> list[str]:
    parameters = inspect.signature(args).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty]


def randomise(model: Any) -> None:
    """Set every parameter to fp32 numbers that depend only on the seed."""
    every: Any = sorted(tree_flatten(model.parameters()))
    parameters = [(path, p) for path, p in every if mx.issubdtype(p.dtype, mx.floating)]
    keys = mx.random.split(mx.random.key(SEED), len(parameters))
    fresh = [
        (path, _random(path, p.shape, k)) for (path, p), k in zip(parameters, keys, strict=True)
    ]
    model.update(tree_unflatten(fresh))
    mx.eval(model)  # RoPE tables are lazy too, and not parameters


def _random(path: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    noise = mx.random.normal(shape, key=key)
    if path.endswith(SLOW_DECAY):
        return 0.3 * noise - 5
    if len(shape) < 2:
        return 1 + 0.1 * noise if path.endswith(("weight", "scalar")) else 0.3 * noise
    if "embed" in path:
        return noise
    return noise * (GAIN / math.sqrt(shape[-1]))
