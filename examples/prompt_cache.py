"""An mlx-lm script with a persistent prompt cache: `attach`, `restore`, `on_progress`, `commit`.

Run it twice: the second time only the last token of the prompt is prefilled.
"""

import sys

import keepwarm
from keepwarm import load  # before mlx, so that a fast BLAS can be loaded for it

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
loaded = load(name)  # or mlx_lm.load(path_or_id)
model, tokenizer = loaded.module, loaded.tokenizer
tokens = tokenizer.encode("Keepwarm never computes the same prompt twice. " * 40)

with keepwarm.Store() as store:
    kw = store.attach(model, source=loaded.path)
    cache, rest = kw.restore(tokens)
    print(f"{len(tokens) - len(rest)} of {len(tokens)} tokens were warm")
    steps = generate_step(
        mx.array(rest),
        model,
        prompt_cache=cache,
        max_tokens=8,
        prompt_progress_callback=kw.on_progress(tokens, cache),
    )
    answer = [int(token) for token, _ in steps]
    kw.commit([*tokens, *answer], cache)
print(f"answer: {answer}")
