"""Decode steps are measured: the program runs on any machine, without the kernels."""

import json

import pytest

from benchmarks import decode, decode_page, rows


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(decode, "BATCHES", (8, 1, 2))
    monkeypatch.setattr(decode, "row_counts", lambda _: (2,))
    monkeypatch.setattr(decode, "PAIRS", (8,))
    monkeypatch.setattr(decode, "DRAFTS", (2,))
    monkeypatch.setattr(decode, "STEPS", 3)


def test_the_benchmark_runs_where_there_is_no_gpu(few, tmp_path, capsys):
    decode.main(["--tiny", "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert "failed stages: none" in printed
    stages = [line for line in printed.splitlines() if line.startswith("---")]
    last_step = max(i for i, line in enumerate(stages) if ": steps" in line)
    assert not any("agreement" in line or "products" in line for line in stages[:last_step])
    found = json.loads((tmp_path / "found.json").read_text())
    steps = found["tiny-experts: steps"]
    assert steps.keys() == {"1", "2", "8"}
    for rates in steps.values():
        pipelined = rates["pipelined"]
        assert pipelined["tokens/s"].keys() == rates["tokens/s"].keys()
        assert pipelined["tokens/s"].keys() >= {"today", "chosen and experts"}
        for way, times in pipelined["ms"].items():
            host = pipelined["host ms"][way]
            assert all(0 < part <= whole for part, whole in zip(host, times, strict=True))
    assert {"alike", "tensor"} <= steps["2"]["tokens/s"].keys()
    assert {"flat", "tensor"} <= steps["8"]["tokens/s"].keys()
    again = found["tiny: agreement"]["today"]["batch and the same again"]
    assert again["max difference / std"] == 0
    tables = decode_page.tables(found)
    for title in ("tiny: pipelined steps", "tiny-experts: one step after the other"):
        assert title in tables


def test_a_stage_without_time_is_skipped_and_has_no_table(few, tmp_path, capsys):
    decode.main(["--tiny", "--budget", "0", "--json", str(tmp_path / "found.json")])
    assert "skipped: no time left" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    found |= {"tiny: steps": {"1": "skipped: no time left"}, "tiny: agreement": {"error": "why"}}
    assert decode_page.tables(found).strip() == ""


@pytest.mark.parametrize("program", [decode, rows])
def test_a_stage_that_fails_is_the_exit_status(program, monkeypatch, capsys):
    def fail(report, *_):
        report.stage("products", lambda: 1 // 0)

    monkeypatch.setattr(program, "measure", fail)
    assert program.main(["--tiny"]) == 1
    assert "failed stages: ['products']" in capsys.readouterr().out
    monkeypatch.setattr(program, "measure", lambda *_: None)
    assert program.main(["--tiny"]) == 0


def test_the_tables_are_those_of_the_results():
    """If it fails: `python -m benchmarks.decode_page`."""
    text = decode_page.PAGE.read_text()
    found = json.loads(decode_page.JSON.read_text())
    assert decode_page.page(text, found) == text
    assert "| today | 209 |" in decode_page.tables(found)
