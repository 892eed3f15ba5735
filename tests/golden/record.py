"""Write the golden files with the code that runs this script: `python -m tests.golden.record`.

Answers, records and API shapes may be written again where a change of behaviour is wanted and
said so. The models, the stores and the bundle are not: what an older version wrote must be found.
Without them `python -m tests.golden.record stores` makes them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from keepwarm.agents.agent_store import AgentStore
from keepwarm.store.disk.disk import DiskLimits
from tests.golden import scenario
from tests.golden.api import shapes
from tests.golden.scenario import DATA
from tests.kit.checkpoints import make_tokenizer, tokenizer_config
from tests.kit.models import COMMON, CONFIGS, tiny

N_VOCABULARY = 320
N_CONTEXT = 4096
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32, "num_hidden_layers": 2},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    "qwen3_next": {"num_hidden_layers": 4},
}
SHARED = {
    "vocab_size": N_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_key_value_heads": 1,
}


def write_model(architecture: str) -> None:
    directory = DATA / "models" / architecture
    directory.mkdir(parents=True)
    changes = SHARED | SMALL[architecture]
    module = tiny(architecture, **changes)
    weights: Any = tree_flatten(module.parameters(), destination={})
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer = make_tokenizer(n_vocab=N_VOCABULARY)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": architecture, **COMMON, **CONFIGS[architecture], **changes}
    config["eos_token_id"] = tokenizer.token_to_id("<|endoftext|>")
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer_config.json", tokenizer_config(N_CONTEXT))


def write_store(architecture: str, kind: str, secret: str = "") -> None:
    place = DATA / "stores" / f"{architecture}-{kind}"
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        with scenario.engine_on(scenario.load(architecture), home, secret) as engine:
            wanted = scenario.request(scenario.SYSTEM, scenario.USER)
            answer = scenario.ask(engine, wanted)
        write_json(DATA / "stores" / f"{architecture}.json", answer)
        shutil.copytree(home / "store", place)
        if not secret:
            with AgentStore(home / "store", DiskLimits(min_free_bytes=0)) as disk_store:
                disk_store.export_agent("golden", DATA / "stores" / f"{architecture}.bundle")
    for leftover in (place / "tmp", place / "quarantine"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    if "stores" in sys.argv:
        for architecture in scenario.ARCHITECTURES:
            write_model(architecture)
            write_store(architecture, "plain")
        write_store("llama", "sealed", scenario.SECRET)
    for architecture in scenario.ARCHITECTURES:
        with tempfile.TemporaryDirectory() as name:
            write_json(DATA / f"{architecture}.json", scenario.play(architecture, Path(name)))
    with tempfile.TemporaryDirectory() as name:
        write_json(DATA / "api.json", shapes(scenario.load("llama"), Path(name)))


if __name__ == "__main__":
    main()
