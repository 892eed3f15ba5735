"""`python -m benchmarks.ledger`: every figure of a server against what its clients know.

Clients send a random mix to a server process: all APIs, two keys, further turns, forks, streams
that are left, requests that are refused, through restarts and evictions. They note what they sent
and got, with tokens counted by the model's tokenizer and template, and no code of Keepwarm's. Then
answers, log, metrics, dashboard, cache API and command line must show the same numbers.
"""
