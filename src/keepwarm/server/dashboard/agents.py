"""The agents that the viewer may see: the admin those of every key."""

from __future__ import annotations

from keepwarm.cache.store import Store
from keepwarm.server.dashboard.forest import NamespaceOwners
from keepwarm.server.dashboard.shapes import ListedAgentOut
from keepwarm.server.http.viewer import Viewer
from keepwarm.server.manage.agents import agent_out


def agents_out(store: Store, viewer: Viewer) -> list[ListedAgentOut]:
    """Reads files and the index; call it in a thread."""
    disk_store = store.on_disk
    owners = NamespaceOwners(disk_store, viewer)
    found: list[ListedAgentOut] = []
    for agent in disk_store.agents.all():
        tenant = owners.tenant_of(agent.namespace)
        if viewer.may_see(tenant):
            listed = agent_out(disk_store, agent, tenant or "")
            found.append({**listed, "key": viewer.key_label(tenant)})
    return found
