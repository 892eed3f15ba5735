"""A server with several models, as `keepwarm serve` starts it."""

from contextlib import contextmanager

import pytest

from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.server.app import create_app
from keepwarm.server.models.models import Models
from keepwarm.text.sandbox.process import SandboxProcess
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import running

START = SandboxProcess.start


@pytest.fixture(scope="package", autouse=True)
def _late_processes():
    """Processes that prepare start with their first task: a start takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SandboxProcess, "start", lambda self: self)
        yield


@pytest.fixture
def early_processes(monkeypatch):
    """They start before the model is loaded, as they do elsewhere."""
    monkeypatch.setattr(SandboxProcess, "start", START)


@pytest.fixture(scope="session")
def big(checkpoint):
    return checkpoint


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Another model: other weights and another context."""
    return write_checkpoint(tmp_path_factory.mktemp("small"), seed=1, n_context=512)


@pytest.fixture(scope="session")
def third(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("third"), seed=2, n_context=1024)


@pytest.fixture(scope="session")
def several(tmp_path_factory):
    """A function: a server with these models, `name=path`, started unless that is left out."""

    @contextmanager
    def start(*models, is_started=True, **values):
        home = str(tmp_path_factory.mktemp("home"))
        given = {"model": models[0], "more_models": ",".join(models[1:]), **values}
        settings = config.load({"KEEPWARM_HOME": home}, **given)
        with Store(settings=settings) as store:
            made = Models.of(settings, store)
            with running(create_app(made, settings), settings) as live:
                if is_started:
                    made.start()
                yield live

    return start
