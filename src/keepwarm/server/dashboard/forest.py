"""The forest of blocks that the viewer may see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from keepwarm.agents.agent import Agent
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.forest import BlockRun, build_forest
from keepwarm.cache.store import Store
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.prefix.fingerprint import tenant_of
from keepwarm.server.dashboard.totals import JsonObject
from keepwarm.server.http.keys import Viewer
from keepwarm.store.tier import StoredBlock

ID_DIGITS = 16
NAMESPACE_DIGITS = 8


class NamespaceOwners:
    """Finds the tenant of a namespace, which is part of its salt."""

    def __init__(self, disk_store: AgentStore, viewer: Viewer) -> None:
        self._viewer = viewer
        self._disk_store = disk_store
        self.tenant_of = cache(self._tenant_of)
        self.hidden: set[BlockKey] = set()

    def visible(self, blocks: Iterable[StoredBlock]) -> Iterator[StoredBlock]:
        """Yield the viewer's blocks; count the others in `hidden`."""
        for block in blocks:
            if self._viewer.may_see(self.tenant_of(block.namespace)):
                yield block
            else:
                self.hidden.add(block.key)

    def sees(self, agent: Agent) -> bool:
        return self._viewer.may_see(self.tenant_of(agent.namespace))

    def _tenant_of(self, name: Namespace) -> str | None:
        try:
            return tenant_of(self._disk_store.identity_of(name).salt)
        except BadInput:
            return None


def forest_out(store: Store, viewer: Viewer) -> JsonObject:
    """Reads the index of every tier; call it in a thread."""
    disk_store = store.on_disk
    owners = NamespaceOwners(disk_store, viewer)
    agents = [agent for agent in disk_store.agents.all() if owners.sees(agent)]
    visible = {name: owners.visible(blocks) for name, blocks in store.blocks().items()}
    forest = build_forest(visible, agents)
    positions = {agent.id: position for position, agent in enumerate(agents)}
    rows = {run.key: row for row, run in enumerate(forest.runs)}
    named = [
        {
            "id": viewer.agent_name(a.id, owners.tenant_of(a.namespace)) or "",
            "key": viewer.key_label(owners.tenant_of(a.namespace)),
        }
        for a in agents
    ]
    return {
        "object": "dashboard.forest",
        "agents": named,
        "runs": [_run(run, rows, positions) for run in forest.runs],
        "blocks": forest.n_blocks,
        "omitted_blocks": forest.left_out,
        "other_blocks": len(owners.hidden),
    }


def _run(run: BlockRun, rows: dict[BlockKey, int], positions: dict[str, int]) -> JsonObject:
    return {
        "id": run.key.hex()[:ID_DIGITS],
        "parent": None if run.parent is None else rows[run.parent],
        "namespace": run.namespace.hex()[:NAMESPACE_DIGITS],
        "first_block": run.number,
        "blocks": run.n_blocks,
        "tokens": run.n_tokens,
        "bytes": run.n_bytes,
        "oldest": run.oldest,
        "used": run.used,
        "memory": "memory" in run.tiers,
        "disk": "disk" in run.tiers,
        "pinned": run.pinned,
        "agents": [positions[agent] for agent in run.agents],
        "ends": [positions[agent] for agent in run.ends],
    }
