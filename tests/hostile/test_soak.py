"""The soak in small: see tests/hostile/soak; its full run is in docs/results/soak.json."""

import pytest
from benchmarks.fairness import Models

from tests.hostile.soak.attacks import ATTACKS
from tests.hostile.soak.run import Soak
from tests.hostile.soak.servers import DISK_BYTES, MIB, Place

SIZES = {"small": (120, 1, 4), "soak": (3000, 12, 24)}  # requests, kills, talks
MAX_RSS = 1536 * MIB  # of one server; it takes 250 MiB
MAX_FILES = 400  # of one server, at one time; connections are most of them
MAX_THREADS = 200
LOG_BYTES_PER_REQUEST = 200


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wrong_lost_or_left_after_attacks_and_kills(tmp_path, size):
    n_requests, n_kills, n_talks = SIZES[size]
    models = Models.random(tmp_path / "models", shape={})
    report = Soak(tmp_path, models, n_talks, seed=1).run(n_requests, n_kills)
    assert not report.unexpected
    assert report.answers["wrong"] == report.kept["lost"] == 0
    assert report.answers["right"] > n_requests / 2
    assert report.kept["found"] > 0
    assert len(report.attacks) > len(ATTACKS) / 2
    for name in ("plain", "sealed"):
        assert report.measures[name].store_bytes <= DISK_BYTES
    measures = report.measures.values()
    assert max(each.rss for each in measures) < MAX_RSS
    assert max(each.files for each in measures) < MAX_FILES
    assert max(each.threads for each in measures) < MAX_THREADS
    assert report.events["logged tracebacks"] == 0
    assert report.events["log bytes"] < LOG_BYTES_PER_REQUEST * n_requests + 4096


@pytest.mark.soak
def test_a_second_run_finds_what_the_first_has_promised(tmp_path):
    models = Models.random(tmp_path / "models", shape={})
    known = []

    def soak(seed):
        made = Soak(tmp_path, models, 4, seed, 0.02, lambda it: known.append(it.as_json()))
        return made.run(0, 2)

    runs = [soak(1), soak(2)]
    assert len(known) > 2, "a run that is cut has its report too"
    assert known[0]["events"]["requests"] <= known[-1]["events"]["requests"]
    for report in runs:
        assert not report.unexpected
        assert report.answers["right"] > 0
        assert report.series
    assert runs[1].kept["found"] > 0


def test_damage_leaves_the_blocks_of_agents(tmp_path):
    place = Place("plain", tmp_path)
    names = [
        place.store / "blocks" / key[:2] / f"{key}.delta.safetensors" for key in ("ab1", "cd2")
    ]
    for path in (*names, place.store / "agents" / "one.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"blocks": ["ab1"]}')
    assert place.damageable() == names[1:]
