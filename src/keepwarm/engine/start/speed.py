"""Measures a model that has computed nothing on this machine yet."""

from __future__ import annotations

from dataclasses import replace

from keepwarm.cache.store import Budgets, Store
from keepwarm.config import Settings
from keepwarm.engine.engine import Engine
from keepwarm.models.load import load
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Request, Sampling

LENGTHS = (300, 300, 600)  # tokens; the first also compiles kernels


def measure_model(settings: Settings) -> None:
    """Load the model of the settings and compute short prompts; what they cost is remembered."""
    settings = replace(settings, remote="")
    model = load(settings.model, settings)
    budgets = Budgets(memory_bytes=None, disk=False)
    with (
        Store(budgets=budgets, settings=settings) as store,
        Engine(model, store, settings=settings) as engine,
    ):
        for n_tokens in LENGTHS:
            prompt = [1 + i % 100 for i in range(min(n_tokens, model.n_context - 1))]
            nothing = Sampling(max_tokens=0)
            engine.submit(Request(prompt=prompt, sampling=nothing, policy=Policy.NO_STORE)).result()
