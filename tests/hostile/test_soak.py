"""The soak in small: see tests/hostile/soak; its full run is in docs/results/soak.json."""

import pytest

from tests.hostile.soak.attacks import ATTACKS
from tests.hostile.soak.run import Soak
from tests.hostile.soak.servers import DISK_BYTES, MIB
from tests.kit.checkpoints import write_checkpoint

SIZES = {"small": (120, 1, 4), "soak": (3000, 12, 24)}  # requests, kills, talks
MAX_RSS = 1536 * MIB  # of one server; it takes 250 MiB
MAX_FILES = 400  # of one server, at one time; connections are most of them
MAX_THREADS = 200
LOG_BYTES_PER_REQUEST = 200


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_wrong_lost_or_left_after_attacks_and_kills(tmp_path, size):
    n_requests, n_kills, n_talks = SIZES[size]
    checkpoint = write_checkpoint(tmp_path / "model", n_context=4096)
    report = Soak(tmp_path, checkpoint, n_talks, seed=1).run(n_requests, n_kills)
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
