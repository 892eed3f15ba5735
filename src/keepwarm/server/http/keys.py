"""API keys: who a caller is, by the key that was sent.

A tenant is named after the digest of its key. A key with a name keeps the tenant that the name had
first, so that its key can be replaced without losing what is cached for it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from fastapi import Depends, Request

from keepwarm.config import Settings
from keepwarm.errors import BadInput, Forbidden, Refused
from keepwarm.state_file import DAMAGE, StateFile

TENANTS = "tenants.json"
TENANT_DIGITS = 16
LABEL_DIGITS = 8
ADMIN = "admin"


class Caller(NamedTuple):
    """The owner of an API key."""

    tenant: str  # whose blocks it can reuse
    admin: bool
    owner: str  # whose requests count against the limits
    name: str = ""  # of the key; the begin of its digest if it has none, "" without keys


class TenantsFile:
    """The tenant of every name, in a small file in the home directory."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, "tenants", _tenants)

    def tenant_of(self, name: str, digest: str) -> str:
        """That of the first key that had this name."""
        if not name:
            return digest
        return self._read().get(name) or self._add(name, digest)

    def _read(self) -> dict[str, str]:
        try:
            return self._file.read_strictly()
        except (OSError, *DAMAGE) as error:
            raise BadInput(
                f"{self._file.path} is damaged; it maps names of keys to their caches. "
                "Restore it, or delete it: keys that were never replaced do not need it."
            ) from error

    def _add(self, name: str, digest: str) -> str:
        try:
            return self._file.change(lambda names: {name: digest, **names})[name]
        except OSError as error:
            raise BadInput(
                f"{self._file.path} cannot be written ({error.strerror}), so a named key would "
                "lose its cache when it is replaced; check the directory."
            ) from error


def _tenants(kept: Mapping[str, str]) -> dict[str, str]:
    return {str(name): str(tenant) for name, tenant in kept.items()}


class _AcceptedKey(NamedTuple):
    digest: bytes
    tenant: str
    name: str


class ApiKeys:
    """Accepted keys as digests; every wrong key takes the same time to compare."""

    def __init__(self, settings: Settings) -> None:
        self._keys = _accepted(settings)
        admin = settings.read_secret("admin_key")
        self._admin = _digest(admin) if admin else None
        # With an admin key alone there are no tenants.
        self._shared = settings.share_cache or not self._keys
        self.labels = {key.tenant: key.name for key in self._keys}  # of tenants

    @property
    def n_keys(self) -> int:
        """Without the admin's."""
        return len(self._keys)

    @property
    def in_use(self) -> bool:
        return bool(self._keys) or self._admin is not None

    def check(self, headers: Mapping[str, str]) -> Caller:
        """The caller; raises if the key is not accepted."""
        given = _digest(_sent_key(headers))
        admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        matches = [key for key in self._keys if hmac.compare_digest(given, key.digest)]
        if not self._keys and not admin:
            return Caller("", False, "")
        if not admin and not matches:
            raise Refused(
                "The API key is missing or wrong; send it as Authorization: Bearer or x-api-key."
            )
        owner = matches[0].tenant if matches else _tenant(given)
        name = matches[0].name if matches else ADMIN
        return Caller("" if self._shared else owner, admin, owner, name)


def _accepted(settings: Settings) -> list[_AcceptedKey]:
    tenants = TenantsFile(settings.home / TENANTS)
    found = []
    for name, key in settings.read_named_keys():
        digest = _digest(key)
        tenant = tenants.tenant_of(name, _tenant(digest))
        found.append(_AcceptedKey(digest, tenant, name or tenant[:LABEL_DIGITS]))
    return found


def _tenant(digest: bytes) -> str:
    return digest.hex()[:TENANT_DIGITS]


def _sent_key(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Viewer(NamedTuple):
    tenant: str
    admin: bool
    key_needed: bool
    may_read_texts: bool  # not where keys share one cache: prompts there have no known owner
    may_see_totals: bool  # where keys are isolated, totals over all keys are for the admin
    may_see_addresses: bool  # of other machines: the admin, or who has the server alone
    labels: Mapping[str, str]  # names of keys by tenant

    @classmethod
    def of(cls, request: Request) -> Self:
        settings: Settings = request.app.state.settings
        keys: ApiKeys = request.app.state.keys
        texts = not (keys.n_keys and settings.share_cache)
        tenant, admin = request.state.tenant, request.state.admin
        is_only_key = keys.n_keys == 1 and not settings.admin_key
        totals = admin or not tenant or is_only_key
        addresses = admin or is_only_key or not keys.in_use
        return cls(tenant, admin, keys.n_keys > 0, texts, totals, addresses, keys.labels)

    def may_see(self, tenant: str | None) -> bool:
        """Whether this tenant's entries are shown; None is an unknown tenant."""
        return self.admin or tenant == self.tenant

    def may_read(self, tenant: str | None) -> bool:
        """Whether the text of this tenant's prompts is shown: only to the tenant itself."""
        return self.may_read_texts and tenant == self.tenant

    def key_label(self, tenant: str | None) -> str | None:
        """The name of another tenant's key, or a short form of it; None for the viewer's own."""
        if tenant == self.tenant:
            return None
        if tenant is None:
            return "unknown"
        return self.labels.get(tenant) or tenant[:LABEL_DIGITS] or "none"

    def agent_name(self, agent: str | None, tenant: str | None) -> str | None:
        """An agent's id as its own tenant writes it; None is an unknown tenant."""
        if agent is None or tenant is None:
            return agent
        return agent.removeprefix(tenant_agent_id(tenant, ""))


CurrentViewer = Annotated[Viewer, Depends(Viewer.of)]


def require_totals(you: CurrentViewer) -> None:
    """Reject a caller who may not see totals over all keys."""
    if not you.may_see_totals:
        raise Forbidden("These totals cover all API keys; send the admin key to see them.")


def tenant_agent_id(tenant: str, agent: str) -> str:
    """The id under which a tenant's agent is stored: two tenants may use the same name."""
    return f"{tenant}.{agent}" if tenant else agent
