"""The program that compares captured bytes finds a difference if there is one."""

from pathlib import Path

import pytest
from benchmarks.captures import Comparison, measure

from keepwarm.kv.slices import Block

CHANGED = 5  # the block whose bytes are changed


def test_one_changed_byte_is_found(tmp_path: Path) -> None:
    seen = []

    def change_one(block: Block) -> None:
        seen.append(block)
        if len(seen) == CHANGED:
            next(iter(block.delta.values())).words[0, 0, 0, 0] += 1

    found = measure("tiny", 1024, 20, tmp_path, Comparison(change_one))
    assert found.different == 1
    assert found.blocks == len(seen) >= 20
    assert found.tensors == 4 * found.blocks  # K and V of two layers
    assert found.cancelled
    assert found.restored_blocks


@pytest.mark.soak
def test_windows_are_compared_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = measure("tiny-windows", 1024, 20, tmp_path, Comparison())
    assert found.holds
    assert found.tensors > 4 * found.blocks  # K and V of two layers, and those of windows
    assert found.restored_blocks
    assert not [record for record in caplog.records if record.exc_info], "all could be kept"
