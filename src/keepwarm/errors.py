"""All exceptions, in one tree, with their HTTP statuses.

    KeepwarmError                    500   the root of all
    ├── BadInput                     400   the request is invalid
    │   ├── UnknownModel             404   no model of that name, locally or on the hub
    │   ├── UnknownAgent             404   no agent with that id
    │   ├── UnknownResponse          404   no stored response with that id
    │   ├── UnknownRequest           404   no recent request with that number
    │   ├── BadModelFile             422   a model file or directory that is damaged or incomplete
    │   ├── UnsupportedModel         422   a model of an architecture that MLX does not run
    │   ├── BadCacheFile             422   a prompt-cache file or bundle that cannot be read
    │   ├── BadField                 400   an invalid field of a request; names the field
    │   │   └── NoThreads            400   a conversation that the server would have to store
    │   ├── TooLarge                 413   a body over the size limit
    │   ├── SlowBody                 408   a body that comes too slowly
    │   ├── ContextTooLong           400   more tokens than the model's context length
    │   └── RepeatedToolCall         400   the model repeats a tool call with the same arguments
    ├── Refused                      401   the API key is missing or wrong
    ├── Forbidden                    403   this API key or web origin is not allowed to do this
    ├── Busy                         429   the queue is full, or a limit is reached
    ├── Cancelled                    499   the caller cancelled the request
    ├── TimedOut                     504   the deadline of a request has passed
    ├── Stopping                     503   the engine or server is shutting down
    ├── Overloaded                   503   the server did not come to a request in time
    ├── StillLoading                 503   the model is being loaded
    ├── EngineFailed                 500   a request failed inside the model; others continue
    ├── Unreachable                  502   the network, the hub or a package index does not answer
    ├── WrongDigest                  502   a download does not have the expected digest
    ├── InsufficientResources        507   too little disk or memory
    ├── NoBackend                    500   no build of MLX is installed, or it does not load
    └── CacheError                   500   a cache, record or store that cannot be used
        ├── UnsupportedCache         501   an unknown cache class, or an unsupported use of one
        ├── CacheMismatch            409   shape, dtype, heads or kind differ from what is expected
        ├── CorruptBlock             500   a block that lacks tensors its layer needs
        ├── BadRecord                500   a damaged record
        ├── NewerFormat              501   written by a newer Keepwarm; left unchanged
        └── StoreFailed              503   the disk or the index of a store does not answer

A message is one sentence: what happened, why, what to do.
"""

from __future__ import annotations

from keepwarm.units import printable

MAX_MESSAGE = 1000  # characters


class KeepwarmError(Exception):
    """Root of the tree; `status` is the HTTP status.

    A message may quote a name from a file. So a long one is cut in its middle, and what is not
    printable, as a line break or the escapes of a terminal, becomes a space.
    """

    status = 500

    def __init__(self, message: str = "") -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 + 3 :]}"
        super().__init__(printable(message))

    def __reduce__(self) -> tuple[object, ...]:
        """From another process; made without `__init__`, whose arguments are not kept."""
        return type(self).__new__, (type(self), *self.args), vars(self)


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
    """`param` names the field, as `messages[0].content`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class NoThreads(BadField):
    pass


class TooLarge(BadInput):
    status = 413


class SlowBody(BadInput):
    status = 408


class ContextTooLong(BadInput):
    """`n_tokens` is the prompt's length or a lower bound; `most` the model's limit."""

    def __init__(self, message: str, n_tokens: int, most: int) -> None:
        super().__init__(message)
        self.n_tokens = n_tokens
        self.most = most


class RepeatedToolCall(BadInput):
    """`text` is what the model had generated before the repeated call."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class Refused(KeepwarmError):
    status = 401


class Forbidden(KeepwarmError):
    status = 403


class Busy(KeepwarmError):
    """`retry_after_s` is when a retry may succeed."""

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


class Overloaded(KeepwarmError):
    """The request was not answered in time, because others were."""

    status = 503


class StillLoading(KeepwarmError):
    status = 503


class EngineFailed(KeepwarmError):
    pass


class Unreachable(KeepwarmError):
    status = 502


class WrongDigest(KeepwarmError):
    status = 502


class InsufficientResources(KeepwarmError):
    status = 507


class NoBackend(KeepwarmError, ImportError):
    pass


class CacheError(KeepwarmError):
    pass


class UnsupportedCache(CacheError):
    status = 501


class CacheMismatch(CacheError):
    """`where` names the tensor or layer."""

    status = 409

    def __init__(self, where: str, what: str, expected: object, got: object) -> None:
        super().__init__(f"{where}: {what} is {got}, expected {expected}.")
        self.where = where
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
