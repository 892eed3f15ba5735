"""Routes that FastAPI analyses when they are first needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import compile_path

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
