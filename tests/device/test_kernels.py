"""Kernels that MLX compiles for CUDA, in the files that it writes."""

from __future__ import annotations

import zipfile

import pytest

from keepwarm.device import kernels
from keepwarm.device.kernels import pack, unpack


@pytest.fixture
def own(tmp_path):
    """What MLX wrote: code, names and source; long names are split into folders."""
    folder = tmp_path / "own"
    (folder / ("n" * 200)).mkdir(parents=True)
    for name in ("gather", f"{'n' * 200}/rest"):
        for suffix in (".ptx", ".txt", ".cu"):
            (folder / f"{name}{suffix}").write_bytes(f"{name}{suffix}".encode() * 50)
    return folder


def content(folder):
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_another_process_finds_code_and_names(own, tmp_path):
    pack(own, tmp_path / "home" / "kept.zip")
    unpack(tmp_path / "home" / "kept.zip", tmp_path / "other")
    wanted = {name: data for name, data in content(own).items() if not name.endswith(".cu")}
    assert content(tmp_path / "other") == wanted


def test_the_archive_is_written_only_if_something_is_new(own, tmp_path):
    kept = tmp_path / "kept.zip"
    pack(own, kept)
    first = kept.stat().st_ino
    pack(own, kept)
    assert kept.stat().st_ino == first
    (own / "new.ptx").write_bytes(b"code")
    pack(own, kept)
    assert kept.stat().st_ino != first
    assert "new.ptx" in zipfile.ZipFile(kept).namelist()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_archive_is_not_used(own, tmp_path, damage):
    kept, other = tmp_path / "kept.zip", tmp_path / "other"
    other.mkdir()
    pack(own, kept)
    data = bytearray(kept.read_bytes())
    data[data.index(b"gather.ptxgather.ptx") + 25] ^= 1
    kept.write_bytes({"flip": bytes(data), "cut": bytes(data[:-30]), "empty": b""}[damage])
    unpack(kept, other)
    assert content(other) == {}
    assert not kept.exists()
    pack(own, kept)  # and the next one is whole
    unpack(kept, other)
    assert len(content(other)) == 4


def test_a_home_that_cannot_be_written_costs_nothing(own, tmp_path, caplog):
    (tmp_path / "home").write_text("a file")
    pack(own, tmp_path / "home" / "kernels" / "kept.zip")
    assert "cannot be kept" in caplog.text


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (kernels.VARIABLE, kernels.CHECK):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def test_without_cuda_nothing_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "are_compiled", lambda: False)
    kernels.start(tmp_path)
    assert not {kernels.VARIABLE, kernels.CHECK} & {*kernels.os.environ}


def test_each_process_has_a_directory_of_its_own(tmp_path, monkeypatch, own):
    monkeypatch.setattr(kernels, "are_compiled", lambda: True)
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(tmp_path))
    pack(own, kernels.archive(tmp_path))
    kernels.start(tmp_path)
    first = kernels.os.environ[kernels.VARIABLE]
    assert (tmp_path / first / "gather.ptx").exists()
    kernels.start(tmp_path)  # again in the same process
    assert kernels.os.environ[kernels.VARIABLE] == first
    (tmp_path / first / "later.ptx").write_bytes(b"code")
    kernels.keep(tmp_path)
    assert kernels.n_kept(tmp_path) == 3


def test_mlx_counts_no_shapes_to_fail_at_some_number(tmp_path, monkeypatch, own):
    """Also where the kernels are the user's; what the user wants is left."""
    monkeypatch.setattr(kernels, "are_compiled", lambda: True)
    monkeypatch.setenv(kernels.VARIABLE, str(own))
    kernels.start(tmp_path)
    assert kernels.os.environ[kernels.CHECK] == "0"
    monkeypatch.setenv(kernels.CHECK, "1")
    kernels.start(tmp_path)
    assert kernels.os.environ[kernels.CHECK] == "1"


def test_a_directory_of_the_users_is_left_alone(tmp_path, monkeypatch, own):
    monkeypatch.setattr(kernels, "are_compiled", lambda: True)
    monkeypatch.setenv(kernels.VARIABLE, str(own))
    kernels.start(tmp_path)
    kernels.keep(tmp_path)
    assert kernels.os.environ[kernels.VARIABLE] == str(own)
    assert kernels.n_kept(tmp_path) == 0
