"""What a bundle says about itself: the model, the token ids, the blocks inside."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from keepwarm.cache.agents.signing import Signature, SigningKey
from keepwarm.errors import BadCacheFile, BadRecord
from keepwarm.prefix.blocks import BlockKey
from keepwarm.prefix.fingerprint import Identity, digest, tenant_of
from keepwarm.prefix.turn import KeptTurn

VERSION = 1


@dataclass(frozen=True)
class Manifest:
    identity: Identity
    tokens: bytes
    blocks: tuple[str, ...]  # keys of the blocks inside, in hex
    turns: tuple[int, ...] = ()
    agent: str = ""
    turn: KeptTurn | None = None  # the messages of the agent, if they were kept
    imported: bool = False  # whoever exported it had it from a bundle, and did not compute it
    records: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by name, if it is signed
    signature: Signature | None = None
    signed_digest: bytes = b""  # of all but the signature

    def to_json(self, key: SigningKey | None = None) -> bytes:
        fields: dict[str, Any] = {
            "version": VERSION,
            "identity": self.identity.to_json(),
            "tokens": b64encode(self.tokens).decode(),
            "blocks": self.blocks,
            "turns": self.turns,
            "agent": self.agent,
            "imported": self.imported,
        }
        if self.turn is not None:
            fields["messages"] = b64encode(self.turn.to_bundle()).decode()
        if key is not None:
            fields["records"] = dict(self.records)
            fields["signature"] = key.sign(_signed_digest(fields)).to_json()
        return json.dumps(fields | {"digest": digest(fields, 32)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        fields: dict[str, Any] = json.loads(text)
        if fields["version"] > VERSION:
            raise BadCacheFile("The bundle was made by a newer Keepwarm; update this one.")
        if fields.pop("digest") != digest(fields, 32):
            raise BadRecord("the manifest does not match its digest")
        if not all(type(n_tokens) is int and n_tokens >= 0 for n_tokens in fields["turns"]):
            raise BadRecord("a turn in it is not a token count")
        if not isinstance(fields["agent"], str):
            raise BadRecord("its agent id is not text")
        options = fields["identity"]["kv_options"].values()
        if not all(value is None or type(value) is int for value in options):
            raise BadRecord("a KV option in it is not a number")
        signature = fields.pop("signature", None)
        messages = b64decode(fields.get("messages", ""))
        return cls(
            identity=Identity(**fields["identity"]),
            tokens=b64decode(fields["tokens"]),
            blocks=tuple(fields["blocks"]),
            turns=tuple(fields["turns"]),
            agent=fields["agent"],
            turn=KeptTurn.from_bundle(messages) if messages else None,
            imported=bool(fields.get("imported", False)),
            records=dict(fields.get("records", {})),
            signature=None if signature is None else Signature.from_json(signature),
            signed_digest=_signed_digest(fields),
        )

    @property
    def keys(self) -> list[BlockKey]:
        return [BlockKey(bytes.fromhex(key)) for key in self.blocks]


def _signed_digest(fields: Mapping[str, Any]) -> bytes:
    return bytes.fromhex(digest(fields, 64))


def model_alone(identity: Identity) -> Identity:
    """The same model without the tenant that its blocks belong to, or the import they came with.

    The rest of the salt stays: from which token on rows are quantised.
    """
    return replace(identity, salt=identity.salt.removeprefix(tenant_of(identity.salt)), origin="")


def for_others(manifest: Manifest) -> Manifest:
    """As a bundle has it: without the tenant, which an agent's id in a shared store starts with.

    Which import the blocks came with is nobody's business, that they came with one is.
    """
    identity, tenant = manifest.identity, tenant_of(manifest.identity.salt)
    agent = manifest.agent.removeprefix(f"{tenant}.") if tenant else manifest.agent
    imported = bool(identity.origin)
    return replace(manifest, identity=model_alone(identity), agent=agent, imported=imported)


def refuse_other_model(theirs: Identity, ours: Identity) -> None:
    """Raise, naming the differences, if blocks of one model cannot serve the other."""
    wanted = asdict(model_alone(ours))
    different = [n for n, value in asdict(model_alone(theirs)).items() if value != wanted[n]]
    if different:
        names = ("quantized_kv_start" if name == "salt" else name for name in different)
        raise BadCacheFile(
            f"The bundle is of another model: {', '.join(names)} differ; "
            "load the model it was made with."
        )
