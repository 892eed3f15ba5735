"""Settings, frozen. The defaults stand here once; file, environment and command line override them.

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
    "encryption_key": "put it into a file of its own and name that as encryption_key_file",
    "api_keys": "put them into a file of their own and name that as api_key_file",
}
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Settings:
    home: Path  # everything the program keeps
    store: Path  # the block store alone
    model: str = "smollm2"
    max_tokens: int = 512
    temperature: float = 0.0
    memory_bytes: int = 0  # blocks kept in memory; 0 is a share of this machine's
    disk_bytes: int = 20 << 30  # everything under the store directory together
    disk_writes_per_day: int = 0  # bytes; 0 is no limit

    encryption_key: str = field(default="", repr=False)  # from the environment only
    encryption_key_file: str = ""  # holds the key and is nobody else's to read

    host: str = "127.0.0.1"  # anything wider needs a key
    port: int = 8181
    api_keys: str = field(default="", repr=False)  # commas between; from the environment only
    api_key_file: str = ""  # one key a line, nobody else's to read
    admin_key: str = field(default="", repr=False)  # from the environment only
    allowed_hosts: str = ""  # names in a Host header, beside those of this machine
    allowed_origins: str = ""  # web pages of other origins that may call
    share_cache: bool = False  # all keys find each other's blocks
    allow_model_paths: bool = False  # a request may name any directory as a model
    scrub: str = ""  # which noise of coding agents is removed, as `-billing-header,date`
    strict_model: bool = False  # another model's name is refused, not answered by the one here
    max_body_bytes: int = 32 << 20
    max_concurrency: int = 128  # requests of one key under way at once
    max_queue: int = 256  # requests of all that wait or run
    audit_share: float = 0.0  # of the answers from a cache, computed again cold and compared
    request_timeout_s: float = 3600.0
    rate_per_minute: int = 0  # requests a key; 0 is no limit
    drain_s: float = 20.0  # what a stopping server gives its running answers

    def read_encryption_key(self) -> str:
        """The key of the block store, or "": from the environment, else from the key file."""
        if self.encryption_key or not self.encryption_key_file:
            return self.encryption_key
        return _read_secret(Path(self.encryption_key_file).expanduser())

    def read_api_keys(self) -> tuple[str, ...]:
        """Every API key that is accepted; if there are none, no key is needed."""
        written = self.api_keys.replace(",", "\n")
        if self.api_key_file:
            written += "\n" + _read_secret(Path(self.api_key_file).expanduser())
        return tuple(dict.fromkeys(written.split()))

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
        raise BadInput(f"{path} is not TOML ({error}); mend or remove it.") from error
    for name in SECRETS & values.keys():
        raise BadInput(
            f"The setting {name} does not belong into {path}; "
            f"{SECRET_FILES.get(name, f'set KEEPWARM_{name.upper()} instead')}."
        )
    return values


def _read_secret(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise BadInput(f"Others may read the key in {path}; run: chmod 600 {path}")
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The key file {path} cannot be read ({type(error).__name__}).") from error
    if not secret:
        raise BadInput(f"The key file {path} is empty; write a key or a passphrase into it.")
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
            changes[name] = _flag(value) if kinds[name] is bool else kinds[name](value)
        except (KeyError, TypeError, ValueError) as error:
            wanted = kinds[name].__name__
            raise BadInput(f"Setting {name!r} in {source} is {value!r}, not {wanted}.") from error
    if "store" in changes:
        changes["store"] = changes["store"].expanduser().absolute()
    return replace(settings, **changes)


def _flag(value: bool | str) -> bool:
    return value if isinstance(value, bool) else FLAGS[value.lower()]
