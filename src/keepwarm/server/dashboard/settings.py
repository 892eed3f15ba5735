"""The settings in force; a secret is only said to be set."""

from __future__ import annotations

from dataclasses import MISSING, fields

from keepwarm.config import SECRETS, Settings
from keepwarm.server.dashboard.shapes import SettingOut

FOLDERS = frozenset({"home", "store", "downloads"})  # each machine has its own


def settings_out(settings: Settings) -> list[SettingOut]:
    return [
        _setting(
            field.name,
            getattr(settings, field.name),
            MISSING if field.name in FOLDERS else field.default,
        )
        for field in fields(settings)
    ]


def _setting(name: str, value: object, default: object) -> SettingOut:
    return {
        "name": name,
        "value": ("set" if value else "") if name in SECRETS else _text(value),
        "default": None if default is MISSING else _text(default),
        "changed": default is not MISSING and value != default,
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
