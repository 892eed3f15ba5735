"""Decode steps are measured: the program runs on any machine, without the kernels."""

import json

from benchmarks import decode


def test_the_benchmark_runs_where_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode, "BATCHES", (1, 2))
    monkeypatch.setattr(decode, "ROW_COUNTS", (1, 2))
    monkeypatch.setattr(decode, "PAIRS", (8,))
    monkeypatch.setattr(decode, "DRAFTS", (2,))
    monkeypatch.setattr(decode, "STEPS", 3)
    decode.main(["--tiny", "--json", str(tmp_path / "found.json")])
    assert "failed stages: none" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tiny-experts: steps"]["2"]["tokens/s"].keys() >= {"today", "tensor and experts"}
    assert found["tiny: profile"]["today"]["whole step"] > 0
