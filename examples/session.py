"""A conversation: each turn prefills only what is new, also when the script runs again.

python examples/session.py [MODEL]
"""

import sys

import keepwarm

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
with keepwarm.Engine(keepwarm.load(name)) as engine:
    session = keepwarm.Session(engine, system="Answer in one short sentence.")
    session.prewarm()
    for question in ("What is a fox?", "What does it eat?", "And where does it sleep?"):
        reply = session.respond(question, sampling=keepwarm.Sampling(max_tokens=24, temperature=0))
        warm, n_tokens = reply.usage.cached_tokens, reply.usage.prompt_tokens
        print(f"{question} {reply.text!r}\n  {warm} of {n_tokens} tokens were warm")
