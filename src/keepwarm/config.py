"""Settings and their defaults; file, environment and command line override them.

Order, last wins: defaults, `config.toml` in the home directory, `KEEPWARM_…` variables, arguments.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import platformdirs

from keepwarm.errors import BadInput

SECRETS = frozenset({"encryption_key", "api_keys", "admin_key"})
SECRET_FILES = {
    "encryption_key": "put it in a separate file and set encryption_key_file to its path",
    "api_keys": "put them in a separate file and set api_key_file to its path",
}
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Settings:
    home: Path  # all data of Keepwarm
    store: Path  # the block store
    model: str = "smollm2"
    max_tokens: int = 512
    temperature: float = 0.0
    memory_bytes: int = 0  # blocks in memory; 0 is a share of this machine's memory
    disk_bytes: int = 20 << 30  # total size of the store directory
    disk_writes_per_day: int = 0  # bytes; 0 is no limit

    encryption_key: str = field(default="", repr=False)  # from the environment only
    encryption_key_file: str = ""  # a file with the key, readable by its owner only

    host: str = "127.0.0.1"  # other than loopback needs an API key
    port: int = 8181
    api_keys: str = field(default="", repr=False)  # separated by commas; from the environment only
    api_key_file: str = ""  # one key per line, readable by its owner only
    admin_key: str = field(default="", repr=False)  # from the environment only
    allowed_hosts: str = ""  # accepted Host headers besides this machine's names
    allowed_origins: str = ""  # web origins that may call the server
    share_cache: bool = False  # all API keys share cached blocks
    allow_model_paths: bool = False  # requests may name any directory as a model
    scrub: str = ""  # scrub rules to turn on, or off with `-`, as `-billing-header,date`
    strict_model: bool = False  # refuse requests that name another model than the loaded one
    max_body_bytes: int = 32 << 20
    max_concurrency: int = 128  # concurrent requests of one key
    max_queue: int = 256  # waiting and running requests of all keys
    audit_share: float = 0.0  # share of cached answers that is recomputed cold and compared
    request_timeout_s: float = 3600.0
    rate_per_minute: int = 0  # requests per key; 0 is no limit
    drain_s: float = 20.0  # how long a stopping server waits for running answers

    def read_encryption_key(self) -> str:
        """The key of the block store, or "": from the environment, else from the key file."""
        if self.encryption_key or not self.encryption_key_file:
            return self.encryption_key
        return _read_secret(Path(self.encryption_key_file).expanduser())

    def read_api_keys(self) -> tuple[str, ...]:
        """Every API key that is accepted; if there are none, no key is needed."""
        listed = self.api_keys.replace(",", "\n")
        if self.api_key_file:
            listed += "\n" + _read_secret(Path(self.api_key_file).expanduser())
        return tuple(dict.fromkeys(listed.split()))

    @property
    def models(self) -> Path:
        """Downloaded and converted models."""
        return self.home / "models"


def load(environ: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """Settings from all four sources. Arguments that are None count as not given."""
    environ = os.environ if environ is None else environ
    home = Path(environ.get("KEEPWARM_HOME") or platformdirs.user_cache_path("keepwarm"))
    home = home.expanduser().absolute()
    settings = Settings(home=home, store=home / "store")
    settings = _override(settings, _from_file(home / "config.toml"), "config.toml")
    settings = _override(settings, _from_environment(environ), "the environment")
    given = {key: value for key, value in arguments.items() if value is not None}
    return _override(settings, given, "the arguments")


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML ({error}); fix or delete it.") from error
    for name in SECRETS & values.keys():
        raise BadInput(
            f"The setting {name} is not allowed in {path}; "
            f"{SECRET_FILES.get(name, f'set KEEPWARM_{name.upper()} instead')}."
        )
    return values


def _read_secret(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise BadInput(f"Other users can read the key in {path}; run: chmod 600 {path}")
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = type(error).__name__
        raise BadInput(f"The key file {path} cannot be read ({reason}); check it.") from error
    if not secret:
        raise BadInput(f"The key file {path} is empty; write a key or a passphrase to it.")
    return secret


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    names = {field.name for field in fields(Settings)} - {"home"}
    found = {name: environ.get(f"KEEPWARM_{name.upper()}") for name in names}
    return {name: value for name, value in found.items() if value}


def _override(settings: Settings, values: Mapping[str, Any], source: str) -> Settings:
    kinds = get_type_hints(Settings)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            raise BadInput(f"Unknown setting {name!r} in {source}; known are {known}.")
        try:
            changes[name] = _parse_flag(value) if kinds[name] is bool else kinds[name](value)
        except (KeyError, TypeError, ValueError) as error:
            must = f"must be {kinds[name].__name__}, not {value!r}"
            raise BadInput(f"Setting {name!r} in {source} {must}.") from error
    if "store" in changes:
        changes["store"] = changes["store"].expanduser().absolute()
    return replace(settings, **changes)


def _parse_flag(value: bool | str) -> bool:
    return value if isinstance(value, bool) else FLAGS[value.lower()]
