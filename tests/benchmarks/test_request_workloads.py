"""The workloads of `benchmarks.requests` on a tiny model: their figures are consistent."""

from dataclasses import replace

import pytest
from benchmarks.requests import files, suite
from benchmarks.requests.report.results import Results
from benchmarks.requests.run import QUICK
from benchmarks.requests.summary import LINES
from benchmarks.requests.targets import InProcess

from tests.kit.checkpoints import write_checkpoint

IN_PROCESS = [name for name, workload in suite.WORKLOADS.items() if not workload.has_own_targets]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), n_context=16384)


class SettledInProcess(InProcess):
    """Returns a reply once its blocks can be found.

    Answers of a random model hold broken characters. Those are not remembered by their text, so the
    next turn finds their tokens in the store, which the engine fills after it has sent the reply.
    """

    def ask(self, ask):
        reply = super().ask(ask)
        self.engine._engine.wait_until_saved()
        return reply


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    target = SettledInProcess("engine", model, tmp_path_factory.mktemp("store"))
    target.start()
    yield target
    target.close()


@pytest.fixture(scope="module")
def make_run(model, tmp_path_factory):
    return suite.run_factory(model, tmp_path_factory.mktemp("bench"), QUICK)


@pytest.fixture(scope="module")
def found(engine, make_run):
    """Every workload that needs no server, once."""
    records = suite.run_all([(name, engine) for name in IN_PROCESS], make_run)
    return Results("", "", "tiny", QUICK.samples, {}, {"engine": ""}, records)


def claim(found, workload, what):
    (one,) = [c for c in found.claims if (c.workload, c.what) == (workload, what)]
    return one


@pytest.mark.soak
def test_every_workload_is_measured_and_none_failed(found):
    assert found.workloads == IN_PROCESS
    assert found.notes == []
    assert all(series.samples for series in found.series)
    assert all(min(series.samples) > 0 for series in found.series if series.unit == "s")


@pytest.mark.soak
def test_a_conversation_computes_what_is_new(found):
    """Only new tokens from turn 2 on, and the same answers as without a cache."""
    assert claim(found, "pipeline", "recomputed ÷ new tokens from turn 2").value <= 1.02
    assert claim(found, "pipeline", "answers that differ from cache off").value == 0
    (compared,) = found.of("pipeline", "answers compared")
    assert min(compared.samples) >= 1  # the first turn, at least
    first = {s.x: s for s in found.of("pipeline", "recomputed")}
    assert max(first[2].samples) < min(first[1].samples)


@pytest.mark.soak
def test_agents_share_one_prefill(found):
    """One after another and all at once."""
    for how in ("one after another", "all at once"):
        found_claim = claim(found, "agents", f"times the shared prompt is prefilled, {how}")
        assert 0.9 < found_claim.value <= 1.02


def test_recomputed_tokens_are_those_that_the_model_was_fed(engine, make_run):
    """The replies' counts, against the engine's own counter."""
    before = engine.engine.stats().counters["prefilled_tokens"]
    run = make_run("agents", engine, lambda _: None)
    run = replace(run, sizes=replace(QUICK, samples=1))
    assert run.template_tokens > 0
    n_frame = engine.engine.stats().counters["prefilled_tokens"] - before
    records = list(suite.WORKLOADS["agents"].work(run))
    told = sum(r.samples[0] for r in records if getattr(r, "what", "").startswith("recomputed"))
    fed = engine.engine.stats().counters["prefilled_tokens"] - before - n_frame
    assert told == fed > 0


class Impatient(InProcess):
    """A target whose user presses Ctrl-C at its first question."""

    def ask(self, ask):
        raise KeyboardInterrupt


def test_an_interrupted_run_keeps_its_records(engine, make_run, model, tmp_path):
    impatient = Impatient("impatient", model, tmp_path)
    steps = [("late", engine), ("late", impatient), ("chat", engine)]
    *records, note = suite.run_all(steps, make_run)
    assert {record.target for record in records} == {"engine"}
    assert (note.workload, note.target) == ("late", "impatient")
    assert "not run" in note.text


def test_weights_are_widened_once_and_the_same(model, tmp_path):
    """mlx-lm gets the fp32 weights Keepwarm runs; on narrow weights it is ten times slower."""
    import mlx.core as mx

    assert files.full_precision(model, tmp_path) == model
    narrow = write_checkpoint(tmp_path / "narrow", dtype=mx.bfloat16)
    wide = files.full_precision(narrow, tmp_path / "made")
    before, after = (mx.load(str(path / "model.safetensors")) for path in (narrow, wide))
    assert before.keys() == after.keys()
    for name, array in after.items():
        assert array.dtype == mx.float32
        assert mx.array_equal(array, before[name].astype(mx.float32))


@pytest.mark.soak
def test_rows_of_the_readme_are_measured(found):
    """Every row of the README's table names a series that the workloads produce."""
    known = {(record.workload, record.what) for record in (*found.series, *found.claims)}
    assert {(line.workload, line.what) for line in LINES} <= known
