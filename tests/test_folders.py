"""Configuration, data and downloads are where the system wants them."""

import sys
from pathlib import Path

import pytest

from keepwarm import config
from keepwarm.config import find_folders
from keepwarm.errors import BadInput

pytestmark = pytest.mark.linux  # the variables below are Linux's


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user's folders, all empty: config, data and cache."""
    for name, folder in (("CONFIG", "config"), ("DATA", "data"), ("CACHE", "cache")):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / folder))
    assert sys.platform == "linux"
    return tmp_path


def test_a_new_user_has_one_folder_of_each_kind(user):
    found = config.load({})
    assert found.home == user / "data" / "keepwarm"
    assert found.store == found.home / "store"
    assert found.models == user / "cache" / "keepwarm" / "models"
    assert find_folders({}).config == user / "config" / "keepwarm" / "config.toml"
    assert list(user.iterdir()) == []


def test_the_file_in_the_config_folder_is_read(user):
    folder = user / "config" / "keepwarm"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("port = 99")
    assert config.load({}).port == 99


def test_everything_is_in_keepwarm_home_where_it_is_set(user):
    home = user / "mine"
    environ = {"KEEPWARM_HOME": str(home)}
    found = config.load(environ)
    assert (found.home, found.store, found.models) == (home, home / "store", home / "models")
    assert find_folders(environ).config == home / "config.toml"


def test_downloads_can_be_elsewhere(user):
    assert config.load({"KEEPWARM_DOWNLOADS": "/big"}).models == Path("/big/models")
    assert config.Settings(home=user, store=user).models == user / "models"
    (user / "config.toml").write_text('downloads = ""')
    assert config.load({"KEEPWARM_HOME": str(user)}).models == user / "models"


def test_the_folder_of_downloads_is_a_path_as_others_are(user, monkeypatch):
    """Wherever the program is started, and wherever it goes."""
    monkeypatch.setenv("HOME", str(user))
    assert config.load({"KEEPWARM_DOWNLOADS": "~/big"}).models == user / "big" / "models"
    monkeypatch.chdir(user)
    found = config.load({"KEEPWARM_DOWNLOADS": "big"})
    monkeypatch.chdir("/")
    assert found.models == user / "big" / "models"
    with pytest.raises(BadInput, match=r"downloads is .*; it must be a path"):
        config.load({"KEEPWARM_DOWNLOADS": "~no-such-user-here/x"})
