"""Who views the dashboard or the metrics, and what they may see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Self

from fastapi import Depends, Request

from keepwarm.config import Settings
from keepwarm.errors import Forbidden
from keepwarm.server.http.request_fields import settings_of, tenant_agent_id
from keepwarm.server.keys import LABEL_DIGITS


class Viewer(NamedTuple):
    tenant: str
    admin: bool
    key_needed: bool
    may_read_texts: bool  # not where keys share one cache: prompts there have no known owner
    may_see_totals: bool  # where keys are isolated, totals over all keys are for the admin
    labels: Mapping[str, str]  # names of keys by tenant

    @classmethod
    def of(cls, request: Request) -> Self:
        settings = settings_of(request)
        key_needed = bool(settings.read_api_keys())
        texts = not (key_needed and settings.share_cache)
        tenant, admin = request.state.tenant, request.state.admin
        totals = admin or not tenant or _is_only_key(settings)
        return cls(tenant, admin, key_needed, texts, totals, request.app.state.keys.labels)

    def may_see(self, tenant: str | None) -> bool:
        """Whether this tenant's entries are shown; None is an unknown tenant."""
        return self.admin or tenant == self.tenant

    def may_read(self, tenant: str) -> bool:
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


def _is_only_key(settings: Settings) -> bool:
    return len(settings.read_api_keys()) == 1 and not settings.admin_key


CurrentViewer = Annotated[Viewer, Depends(Viewer.of)]


def require_totals(you: CurrentViewer) -> None:
    """Reject a caller who may not see totals over all keys."""
    if not you.may_see_totals:
        raise Forbidden("These totals cover all API keys; send the admin key to see them.")
