"""Everything that can go wrong, in one tree.

    KeepwarmError                    500
    ├── BadInput                     400   what was asked for makes no sense
    │   ├── UnknownModel             404   no model of that name, here or on the hub
    │   ├── UnknownAgent             404   no agent of that id
    │   ├── UnknownResponse          404   no response of that id is kept
    │   ├── UnknownRequest           404   no request of that number is remembered
    │   ├── BadModelFile             422   a file or directory that is not a whole model
    │   ├── UnsupportedModel         422   a whole model, of an architecture MLX does not run
    │   ├── BadCacheFile             422   a prompt-cache file nobody here can read
    │   ├── BadField                 400   a field of a request, named, that is not what it must be
    │   │   └── NoThreads            400   a conversation that the server would have to remember
    │   ├── TooLarge                 413   more bytes than anybody here reads
    │   ├── ContextTooLong           400   more tokens than the model reads
    │   └── RepeatedToolCall         400   a model that calls the same tool in the same way again
    ├── Refused                      401   no key, or a wrong one, where one is needed
    ├── Forbidden                    403   a key, or a web page, that may not do this
    ├── Busy                         429   the queue is full, or a limit is reached
    ├── Cancelled                    499   whoever asked does not want the answer any more
    ├── TimedOut                     504   the deadline of a request has passed
    ├── Stopping                     503   the engine or server is shutting down
    ├── EngineFailed                 500   a request failed inside the model; others go on
    ├── Unreachable                  502   the network or an index does not answer
    ├── WrongDigest                  502   what arrived is not what was pinned
    ├── InsufficientResources        507   too little disk or memory
    └── CacheError                   500
        ├── UnsupportedCache         501   a cache class, or a use of one, that nobody here knows
        ├── CacheMismatch            409   shape, dtype, heads or kind differ from what is expected
        ├── CorruptBlock             500   a block without the tensors its layer needs
        ├── BadRecord                500   bytes that are not the record they claim to be
        ├── NewerFormat              501   what a newer Keepwarm wrote; it is left alone
        └── StoreFailed              503   the disk or the index of a store does not answer

A message is one sentence: what happened, why, what to do.
"""

from __future__ import annotations


class KeepwarmError(Exception):
    """Root of the tree; `status` is the HTTP status that stands for it."""

    status = 500


class BadInput(KeepwarmError):
    status = 400


class UnknownModel(BadInput):
    status = 404


class UnknownAgent(BadInput):
    status = 404


class UnknownResponse(BadInput):
    status = 404


class UnknownRequest(BadInput):
    status = 404


class BadModelFile(BadInput):
    status = 422


class UnsupportedModel(BadInput):
    status = 422


class BadCacheFile(BadInput):
    status = 422


class BadField(BadInput):
    """`param` says which, as `messages[0].content`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class NoThreads(BadField):
    pass


class TooLarge(BadInput):
    status = 413


class ContextTooLong(BadInput):
    pass


class RepeatedToolCall(BadInput):
    """The model asks for what it was just given; `text` is what it had said until then."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class Refused(KeepwarmError):
    status = 401


class Forbidden(KeepwarmError):
    status = 403


class Busy(KeepwarmError):
    """`retry_after_s` says when it may be worth to ask again."""

    status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(KeepwarmError):
    status = 499


class TimedOut(KeepwarmError):
    status = 504


class Stopping(KeepwarmError):
    status = 503


class EngineFailed(KeepwarmError):
    pass


class Unreachable(KeepwarmError):
    status = 502


class WrongDigest(KeepwarmError):
    status = 502


class InsufficientResources(KeepwarmError):
    status = 507


class CacheError(KeepwarmError):
    pass


class UnsupportedCache(CacheError):
    status = 501


class CacheMismatch(CacheError):
    """A tensor or layer that does not fit; names the place, what was expected and what came."""

    status = 409

    def __init__(self, place: str, what: str, expected: object, got: object) -> None:
        super().__init__(f"{place}: {what} is {got}, expected {expected}.")
        self.place = place
        self.expected = expected
        self.got = got


class CorruptBlock(CacheError):
    def __init__(self, layer: str, block: int, why: str) -> None:
        super().__init__(f"Layer {layer}, block {block}: {why}.")
        self.layer = layer
        self.block = block


class BadRecord(CacheError):
    pass


class NewerFormat(CacheError):
    status = 501


class StoreFailed(CacheError):
    status = 503
