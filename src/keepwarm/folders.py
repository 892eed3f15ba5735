"""Where Keepwarm keeps its files.

Configuration is in the user's config folder, agents and blocks in the data folder, downloads in the
cache folder; all of it is in `KEEPWARM_HOME` where that is set. Before, everything was in the
cache folder: a store that is there is used where it is, and never moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import platformdirs

CONFIG = "config.toml"


class Folders(NamedTuple):
    home: Path  # agents, blocks and measurements of this machine
    downloads: Path
    config: Path  # the file, which need not exist


def find(environ: Mapping[str, str]) -> Folders:
    """ValueError, or RuntimeError for an unknown user, if `KEEPWARM_HOME` is not a path."""
    if given := environ.get("KEEPWARM_HOME"):
        home = Path(given).expanduser().absolute()
        return Folders(home, home, home / CONFIG)
    data, cache = (
        platformdirs.user_data_path("keepwarm"),
        platformdirs.user_cache_path("keepwarm"),
    )
    home = cache if _has_store(cache) and not _has_store(data) else data
    files = platformdirs.user_config_path("keepwarm") / CONFIG, cache / CONFIG
    return Folders(home, cache, next((file for file in files if file.is_file()), files[0]))


def _has_store(folder: Path) -> bool:
    return (folder / "store").is_dir()
