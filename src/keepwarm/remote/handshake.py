"""The mark of a shared place: whether its records are sealed, and what makes their key.

Plain and sealed records never mix, nor those of two keys. The first machine leaves the mark: of a
sealed place that is its `sealed.json`, with the salt, from which the same passphrase makes the same
key on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.errors import BadInput
from keepwarm.records.cipher import Cipher
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import Backend, at_most
from keepwarm.store.marker import make_mark, opens

STORE_META = "meta/keepwarm.store.1"
PLAIN = b"plain.2"  # the number is that of names and records
MARK_S = 5.0  # the longest it may take
MAX_BYTES = 4096


def check_mark(
    backend: Backend,
    cipher: Cipher | None,
    own: bytes,
    deadline: CallDeadline,
    is_known: bool = False,
) -> None:
    """Leave the mark of the local store, `own`, where there is none, unless there must be one.

    Raises BadInput if there is one, and it is of another kind or of another key.
    """
    own = PLAIN if cipher is None else own or make_mark(cipher, {})
    mark = read_mark(backend, deadline) if is_known else put_mark(backend, own, deadline)
    if mark is None:
        raise BadInput(
            "Its mark is gone: it is not mounted, or was emptied. Mount it, or name another place."
        )
    check_kind(mark, cipher is not None)
    if cipher is not None and not opens(cipher, mark):
        raise BadInput(
            "It was encrypted with another key, or with the same passphrase and another salt; "
            "use its key, or begin with an empty store while it can be reached: that takes its "
            "salt."
        )


def check_kind(mark: bytes, is_sealed: bool) -> None:
    """Raise BadInput if a place holds sealed records for a plain store, or the reverse."""
    if mark.startswith(b"plain") and mark != PLAIN:
        raise BadInput("Another version of Keepwarm has filled it; name an empty one instead.")
    if mark != PLAIN and not is_sealed:
        raise BadInput(
            "It has encrypted blocks; set KEEPWARM_ENCRYPTION_KEY to their key to use it."
        )
    if mark == PLAIN and is_sealed:
        raise BadInput("Its blocks are not encrypted; name an empty one instead.")


def put_mark(backend: Backend, mark: bytes, deadline: CallDeadline) -> bytes:
    """Leave a mark if there is none; the one that is there then. Raises CallError."""
    if (found := read_mark(backend, deadline)) is None:
        backend.put(STORE_META, [mark], deadline.left_s())
        found = read_mark(backend, deadline)
    if found is None:
        raise CallError("it does not keep what is put")
    return found


def handshake(addresses: Sequence[str], password: str) -> Callable[[bytes], bytes]:
    """For a new sealed store: takes its mark, and returns that of the first shared place which
    answers. That is its own if there was none.
    """

    def take(mark: bytes) -> bytes:
        for address in addresses:
            with closing(open_backend(address, password)) as backend:
                try:
                    found = put_mark(backend, mark, CallDeadline(MARK_S))
                except CallError:
                    continue
            if found != PLAIN:
                return found
        return mark

    return take


def read_mark(backend: Backend, deadline: CallDeadline) -> bytes | None:
    """None if nobody has left one."""
    found = backend.read(STORE_META, at_most(MAX_BYTES), deadline.left_s(), n_bytes=MAX_BYTES)
    return None if found is None else bytes(found)
