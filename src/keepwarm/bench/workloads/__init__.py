"""The workloads that `keepwarm bench` runs, one file each.

Imports `bench`, `bench.report`, `prefix`.
"""
