"""Whoever looks at the dashboard or at what is counted, and what is theirs to see."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Self

from fastapi import Depends, Request

from keepwarm.config import Settings
from keepwarm.errors import Forbidden
from keepwarm.server.http.wire import owned, settings_of

KEY_DIGITS = 8


class Viewer(NamedTuple):
    tenant: str
    admin: bool
    key_needed: bool
    texts: bool  # where keys share one cache, nobody can say whose prompt it was
    sums: bool  # where keys are apart, what is counted over all of them is for the admin

    @classmethod
    def of(cls, request: Request) -> Self:
        settings = settings_of(request)
        key_needed = bool(settings.read_api_keys())
        texts = not (key_needed and settings.share_cache)
        tenant, admin = request.state.tenant, request.state.admin
        sums = admin or not tenant or _is_only_key(settings)
        return cls(tenant, admin, key_needed, texts, sums)

    def sees(self, tenant: str | None) -> bool:
        """Whether that which is this tenant's is shown; None is nobody knows whose."""
        return self.admin or tenant == self.tenant

    def reads(self, tenant: str) -> bool:
        """Whether the texts of this tenant's prompts are shown: to itself alone."""
        return self.texts and tenant == self.tenant

    def key_of(self, tenant: str | None) -> str | None:
        """Short for a foreign key; None where it is one's own."""
        if tenant == self.tenant:
            return None
        return "unknown" if tenant is None else tenant[:KEY_DIGITS] or "none"

    def name_of(self, agent: str | None) -> str | None:
        """An agent as its owner calls it."""
        if agent is None:
            return None
        return agent.removeprefix(owned(self.tenant, ""))


def _is_only_key(settings: Settings) -> bool:
    return len(settings.read_api_keys()) == 1 and not settings.admin_key


Who = Annotated[Viewer, Depends(Viewer.of)]


def needs_sums(you: Who) -> None:
    """Refuses whoever would be told what others have done."""
    if not you.sums:
        raise Forbidden("This is counted over all keys; ask with the admin key.")
