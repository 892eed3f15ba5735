"""What the KV-cache library costs, measured: workloads, a runner, a report.

`python -m keepwarm.bench` runs it. Speeds are compared within one run only, as ratios.
"""
