"""Tiny models for every test of the engine."""

import pytest

from tests.kit.engines import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
