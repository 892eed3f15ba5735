"""Signatures of bundles: Ed25519, with keys in PEM files as `openssl genpkey` writes them.

What is signed is a digest of the manifest, which has the SHA-256 of every record. The digests of
records do not serve here: xxh3 finds damage, but whoever wants to can make two records with one.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from keepwarm.config import Settings, read_secret_file, user_path
from keepwarm.errors import BadInput, BadRecord

PURPOSE = b"keepwarm bundle 1\n"  # so that a signature for anything else is none for a bundle
KEY_BYTES, SIGNATURE_BYTES = 32, 64
T = TypeVar("T")


class Signature(NamedTuple):
    key: bytes  # the public key of whoever signed
    value: bytes

    def to_json(self) -> dict[str, str]:
        return {name: b64encode(value).decode() for name, value in self._asdict().items()}

    @classmethod
    def from_json(cls, fields: dict[str, str]) -> Signature:
        made = cls(b64decode(fields["key"]), b64decode(fields["value"]))
        if (len(made.key), len(made.value)) != (KEY_BYTES, SIGNATURE_BYTES):
            raise BadRecord("its signature is not one of Ed25519")
        return made

    def check(self, digest: bytes) -> None:
        """Raise unless the owner of the key has signed this digest."""
        ed25519, _ = _cryptography()
        from cryptography.exceptions import InvalidSignature

        try:
            ed25519.Ed25519PublicKey.from_public_bytes(self.key).verify(
                self.value, PURPOSE + digest
            )
        except (InvalidSignature, ValueError) as error:
            raise BadRecord("its signature does not match what is in it") from error


class SigningKey:
    """A private key from a file that only its owner may read."""

    def __init__(self, path: Path) -> None:
        ed25519, serialization = _cryptography()
        text = read_secret_file(path).encode()
        key = _load(path, lambda: serialization.load_pem_private_key(text, password=None))
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise _not_a_key(path)
        self._key = key

    def sign(self, digest: bytes) -> Signature:
        public = self._key.public_key().public_bytes_raw()
        return Signature(public, self._key.sign(PURPOSE + digest))


def read_public_key(path: Path) -> bytes:
    """The 32 bytes of a public key from its file."""
    ed25519, serialization = _cryptography()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadInput(f"The key file {path} cannot be read ({error.strerror}).") from error
    key = _load(path, lambda: serialization.load_pem_public_key(text))
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _not_a_key(path)
    return bytes(key.public_bytes_raw())


@dataclass(frozen=True)
class BundleKeys:
    """What exports are signed with, and whose signatures make an import trusted."""

    signing: SigningKey | None = None
    trusted: frozenset[bytes] = frozenset()
    required: bool = False  # refuse a bundle that is not trusted, instead of marking it

    @classmethod
    def of(
        cls, settings: Settings, sign: Path | None = None, trust: Collection[Path] = ()
    ) -> BundleKeys:
        """The keys of the settings. `sign` takes the place of theirs; with `trust` only bundles
        that are signed by one of these keys are imported.
        """
        file = sign or _path(settings.signing_key_file)
        return cls(
            SigningKey(file) if file else None,
            frozenset(map(read_public_key, trust or _paths(settings.trusted_keys))),
            required=bool(trust),
        )

    def trust(self, signature: Signature | None, digest: bytes) -> bool:
        """Whether a bundle is by someone trusted; raises if its signature is false."""
        is_trusted = signature is not None and signature.key in self.trusted
        if signature is not None and is_trusted:
            signature.check(digest)
        return is_trusted


NO_KEYS = BundleKeys()


def _path(text: str) -> Path | None:
    return user_path(text) if text else None


def _paths(texts: str) -> Iterable[Path]:
    return (user_path(text.strip()) for text in texts.split(",") if text.strip())


def _load(path: Path, load: Callable[[], T]) -> T:
    try:
        return load()
    except (ValueError, TypeError) as error:  # TypeError: it is protected by a passphrase
        raise _not_a_key(path) from error


def _not_a_key(path: Path) -> BadInput:
    return BadInput(
        f"{path} is not an Ed25519 key in PEM without a passphrase; "
        f"make one with: openssl genpkey -algorithm ed25519 -out {path.name}"
    )


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BadInput(
            "Signatures need the package cryptography; "
            "install it with: pip install 'keepwarm[encryption]'"
        ) from error
    return ed25519, serialization
