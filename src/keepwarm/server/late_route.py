"""Routes that are imported, and that FastAPI analyses, when they are first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute, Match, Router, compile_path
from starlette.types import Receive, Scope, Send
from typing_extensions import override

ANALYSED = frozenset(APIRoute.__annotations__) | {"app"}


class LateRoute(APIRoute):
    """Analysed at its first request, or for the API's schema.

    FastAPI builds validators for all models of a route: a few milliseconds for each, but a third
    of a second for all of them, while a server starts. Until then a route can only be matched.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.methods = set(options["methods"] or ["GET"])
        self._analyse = partial(super().__init__, path, endpoint, **options)

    def __getattr__(self, name: str) -> Any:
        """What FastAPI finds out about a route; Python calls this for what is not there yet."""
        if name not in ANALYSED:
            raise AttributeError(f"A route has no attribute {name!r}.")
        self._analyse()
        return vars(self)[name]


class LateRoutes(BaseRoute):
    """The last route of a router: stands for more of them until a request is for none before it.

    So it answers nothing itself, not that nothing is there either.
    """

    def __init__(self, router: Router, load: Callable[[], Iterable[BaseRoute]]) -> None:
        self._router, self._load = router, load
        self._loading = threading.Lock()

    @override
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return Match.FULL, {}

    @override
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_in_threadpool(self._put)
        await self._router.app(scope, receive, send)

    def _put(self) -> None:
        with self._loading:
            if self in self._router.routes:
                self._router.routes[-1:] = self._load()
