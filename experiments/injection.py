"""A saved KV cache in a new BatchGenerator: is the prompt prefilled again, is the text the same?

    python experiments/injection.py [--model NAME] [--max-tokens N]

The first generator prefills the prompt; its cache is saved. New generators, here and in a new
process, get that cache and the tokens it does not hold. A run without a cache is the reference,
and a run with the cache of another prompt must differ from it. Prefilled tokens are counted where
the model is called. Prints a page of Markdown; exits with 1 if a check fails.

The generator of mlx-lm 0.32 has no tokenizer, prompts are lists of ids; one `Response` is one
token; `Response.prompt_cache` is an attribute, None until the sequence has ended; then
`all_tokens` are the tokens that the cache holds.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import keepwarm
from keepwarm import kv  # before mlx.core: the first import of that fixes the BLAS
from keepwarm.kv.files.prompt_cache import export_prompt_cache, import_prompt_cache
from keepwarm.models.load import Model

# isort: split
import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import load_prompt_cache

PROMPT = "The quick brown fox jumps over the lazy"
FOLLOWING = " In the end, the dog"
OTHER = "In 1984 there were 365 days, 12 months and 52 weeks."


class CountedModel:
    """Wraps a model and counts the tokens it is fed."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.n_fed = 0

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
        self.n_fed += inputs.size
        return self._module(inputs, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Run(NamedTuple):
    name: str
    n_held: int  # tokens in the injected cache
    n_new: int  # prompt tokens that are not in it
    n_prefilled: int
    generated: list[int]


class Finished(NamedTuple):
    run: Run
    tokens: list[int]  # what the cache holds
    cache: kv.Caches


def generate(
    name: str, module: Any, tokens: list[int], n: int, cache: kv.Caches | None = None
) -> Finished:
    """Run a new generator on a prompt whose first tokens the cache, if any, already holds."""
    counted = CountedModel(module)
    n_held = kv.token_count(cache) or 0 if cache else 0
    generator = BatchGenerator(counted, max_tokens=n)
    generator.insert([tokens[n_held:]], caches=[cache], all_tokens=[tokens[:n_held]])
    generated = []
    while True:
        (response,) = generator.next_generated()
        generated.append(response.token)
        if response.finish_reason is not None:
            break
        assert response.prompt_cache is None, "the cache is set only at the end"
    generator.close()
    assert kv.token_count(response.prompt_cache) == len(response.all_tokens)
    mx.eval([layer.state for layer in response.prompt_cache])
    # At the end every generated token has been fed too.
    run = Run(name, n_held, len(tokens) - n_held, counted.n_fed - len(generated), generated)
    return Finished(run, response.all_tokens, response.prompt_cache)


def experiment(model: Model, n: int, file: Path) -> list[Run]:
    """All runs; the file holds the cache of the first one."""
    module, encode = model.module, model.tokenizer.encode
    prompt = encode(PROMPT)
    first = generate("prompt, no cache", module, prompt, n)
    export_prompt_cache(file, first.cache, {"tokens": json.dumps(first.tokens)})

    again = reload(file)
    kv.trim(again, len(first.tokens) - len(prompt) + 1)  # at least one token must be fed
    longer = first.tokens + encode(FOLLOWING)
    other = kv.make_caches(module)
    module(mx.array([(encode(OTHER) * len(longer))[: len(first.tokens)]]), cache=other)
    return [
        first.run,
        generate("prompt, cache from the file", module, prompt, n, again).run,
        generate("more text, no cache", module, longer, n).run,
        generate("more text, cache from the file", module, longer, n, reload(file)).run,
        in_new_process(model.name, n, file),
        generate("more text, cache of another prompt", module, longer, n, other).run,
    ]


def reload(file: Path) -> kv.Caches:
    """Load the file with mlx-lm: it has mlx-lm's format."""
    caches: kv.Caches = load_prompt_cache(str(file))
    return caches


def in_new_process(model: str, n: int, file: Path) -> Run:
    command = [sys.executable, __file__, "--model", model, "--max-tokens", str(n)]
    done = subprocess.run(
        [*command, "--continue", str(file)], stdout=subprocess.PIPE, text=True, check=True
    )
    return Run(*json.loads(done.stdout))


def continue_file(model: Model, n: int, file: Path) -> Run:
    """Runs in the new process; the tokens come from the file too."""
    caches, metadata, _ = import_prompt_cache(file)
    tokens = json.loads(metadata["tokens"]) + model.tokenizer.encode(FOLLOWING)
    return generate("more text, new process", model.module, tokens, n, caches).run


def checks(runs: list[Run]) -> dict[str, bool]:
    first, again, cold, warm, resumed, wrong = runs
    return {
        "every run prefilled the new tokens and no other": all(
            run.n_prefilled == run.n_new for run in runs
        ),
        "the prompt again: one token prefilled, the same text": again.n_prefilled == 1
        and again.generated == first.generated,
        "more text: the same with and without the cache": warm.generated == cold.generated,
        "more text: the same in a new process": resumed.generated == cold.generated,
        "more text after the cache of another prompt: different": wrong.generated != cold.generated,
    }


def page(model: Model, runs: list[Run]) -> str:
    """The results as Markdown."""
    found = checks(runs)
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "keepwarm"))
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines = [
        "# A saved cache in a new BatchGenerator",
        "",
        f"{'Passed' if all(found.values()) else 'FAILED'} on {datetime.now(UTC).date()} with"
        f" {model.name}, {versions}, {system}: the output of `python experiments/injection.py`.",
        "",
        "| run | in the cache | new | prefilled | generated |",
        "|---|---|---|---|---|",
        *(
            f"| {run.name} | {run.n_held} | {run.n_new} | {run.n_prefilled} |"
            f" {json.dumps(model.tokenizer.decode(run.generated))} |"
            for run in runs
        ),
        "",
        *(f"- {'yes' if true else 'NO'}: {claim}" for claim, true in found.items()),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=10)
    parser.add_argument("--continue", dest="file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = keepwarm.load(options.model)
    if options.file:
        print(json.dumps(continue_file(model, options.max_tokens, options.file)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        runs = experiment(model, options.max_tokens, Path(folder, "fox.safetensors"))
    print(page(model, runs))
    return 0 if all(checks(runs).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
