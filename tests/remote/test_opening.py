"""Who shares with whom: numbers, and a disk to share from."""

import pytest

from keepwarm import config
from keepwarm.blas import Blas
from keepwarm.cache.store import Budgets, Store
from keepwarm.remote import opening
from keepwarm.remote.records import CLASS

MADE = {
    "machine.backend": "cpu",
    "machine.architecture": "aarch64",
    "blas.in_use": Blas("nvpl", "", "seq", 1),
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
}
GPU = {"machine.backend": "metal", "machine.architecture": "applegpu_g14s"}


@pytest.fixture
def class_of(monkeypatch, tmp_path):
    def make(other=()):
        made = MADE | dict(other)
        for name in ("machine.backend", "machine.architecture", "blas.in_use"):
            monkeypatch.setattr(f"keepwarm.remote.opening.{name}", lambda name=name: made[name])
        monkeypatch.setattr(opening, "version", lambda package: made[package])
        monkeypatch.setattr("keepwarm.remote.opening.blas.start", lambda _: None)
        return opening.compute_class(tmp_path)

    return make


@pytest.mark.parametrize(
    "other",
    [
        {"machine.architecture": "x86_64"},
        {"blas.in_use": Blas("openblas", "", "pthreads", 1)},
        {"blas.in_use": None},
        {"mlx": "0.33.0"},
        {"mlx-lm": "0.33.0"},
        GPU,
    ],
)
def test_what_computes_other_numbers_is_another_class(class_of, other):
    assert class_of(other) != class_of()
    assert CLASS.fullmatch(class_of(other))


def test_what_computes_the_same_numbers_is_one_class(class_of):
    same = {"mlx": "0.32.9", "mlx-lm": "0.32.0", "blas.in_use": Blas("nvpl", "", "gomp", 8)}
    assert class_of(same) == class_of()
    assert class_of(GPU | {"blas.in_use": None}) == class_of(GPU), "a GPU does not use it"
    assert class_of(GPU | {"machine.architecture": "applegpu_g16s"}) != class_of(GPU)


def test_a_strange_name_is_still_a_name(class_of):
    assert CLASS.fullmatch(class_of({"blas.in_use": Blas("libblas+x.so 3", "", "", 1)}))


def test_a_store_without_a_disk_shares_nothing(tmp_path):
    """It has no key and remembers no mark: a plain one would lock out an encrypted fleet."""
    (tmp_path / "place").mkdir()
    remote = (tmp_path / "place").as_uri()
    settings = config.load({"KEEPWARM_HOME": str(tmp_path / "home")}, remote=remote)
    with Store(budgets=Budgets(disk=False), settings=settings) as store:
        assert list(store.tier_stats()) == ["memory"]
    assert list((tmp_path / "place").iterdir()) == []
