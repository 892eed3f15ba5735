"""One step of the scheduler: what it plans, and how a job's status goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from keepwarm.engine.jobs import JobStatus
from keepwarm.prefix.policy import Policy
from tests.kit.devices import M4_MAX, Simulation, simulated


@pytest.fixture
def sim(models, tmp_path) -> Iterator[Simulation]:
    with simulated(M4_MAX, models.of("llama"), tmp_path) as simulation:
        yield simulation


def statuses(sim: Simulation, job) -> list[JobStatus]:
    """The statuses of a job after each step, without repetitions."""
    seen = [job.status]
    while not job.is_computed:
        sim.scheduler.step()
        seen += [job.status] if job.status is not seen[-1] else []
    return seen


def test_job_status_goes_from_waiting_to_done(sim):
    seen = statuses(sim, sim.send(4096, n_answer=3).job)
    waiting, prefilling = JobStatus.WAITING, JobStatus.PREFILLING
    assert seen == [waiting, prefilling, JobStatus.DECODING, JobStatus.DONE]


def test_durable_job_is_saving_until_it_is_on_disk(sim):
    job = sim.send(16, policy=Policy.DURABLE).job
    assert statuses(sim, job)[-1] is JobStatus.SAVING
    assert job not in sim.scheduler.jobs
    sim.scheduler.end(job)
    assert job.ended


@pytest.mark.parametrize("status", [JobStatus.DECODING, JobStatus.SAVING])
def test_job_status_cannot_skip_prefilling(sim, status):
    with pytest.raises(AssertionError, match="WAITING"):
        sim.send(16).job.advance(status)


def test_schedule_starts_a_job_and_prefills_it_in_the_same_step(sim):
    running = sim.running(1)
    job = sim.send(4096).job
    schedule = sim.scheduler.schedule()
    assert schedule.started is job
    assert schedule.prefill is not None
    assert schedule.prefill.job is job
    assert (schedule.n_rows, schedule.slice_tokens > 0) == (1, True)
    n_tokens = len(running[0].answer.tokens)
    sim.scheduler.finish(sim.scheduler.run(schedule))
    assert schedule.prefill.prefill.n_done > 0
    assert len(running[0].answer.tokens) == n_tokens + 1


def test_schedule_is_idle_without_jobs(sim):
    assert sim.scheduler.schedule().is_idle


def test_scheduler_refuses_another_thread(sim):
    sim.scheduler.step()
    errors: list[BaseException] = []

    def step() -> None:
        try:
            sim.scheduler.step()
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert "only the engine's thread" in str(errors[0])
