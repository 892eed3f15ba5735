"""The workloads that `keepwarm bench` runs, one a file.

Imports `bench`, `bench.report`, `prefix`.
"""
