"""JSON keys that have a better name now and are kept for one release."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def renamed_to(new: str) -> Any:
    """Marks a key as deprecated in the OpenAPI document; docs/operations.md lists all of them."""
    return Field(deprecated=True, description=f"Renamed to `{new}`.")
