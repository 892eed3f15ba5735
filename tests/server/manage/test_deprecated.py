"""JSON keys and metrics that were renamed: the old name is kept for one release, beside the new."""

import re
from pathlib import Path

from tests.server.dashboard.test_dashboard import LONG, ask

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
ROW = re.compile(r"^\| `(?:GET|POST) (\S+)` \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


def documented():
    """Pairs of old and new name in the table of the manual."""
    return {
        (old.split(".")[-1], new.split(".")[-1]) for _, old, new in ROW.findall(PAGE.read_text())
    }


def test_the_manual_lists_every_deprecated_key(live):
    schemas = live.get("/openapi.json").json()["components"]["schemas"].values()
    fields = [item for schema in schemas for item in schema.get("properties", {}).items()]
    marked = {
        (old, field["description"].split("`")[1])
        for old, field in fields
        if field.get("deprecated")
    }
    assert marked == documented()


def pairs(value):
    """Old and new values wherever both names stand in one object."""
    if isinstance(value, dict):
        yield from ((o, n, value[o], value[n]) for o, n in documented() if {o, n} <= value.keys())
        for inner in value.values():
            yield from pairs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pairs(inner)


def test_both_names_have_one_value(live):
    ask(live, f"It is nine. {LONG}", "old")
    ask(live, f"It is ten. {LONG}", "old")
    body = {"messages": [{"role": "user", "content": LONG}]}
    told = [live.get(f"/v1/dashboard/{name}").json() for name in ("now", "saved", "forest")]
    told += [live.get(f"/v1/dashboard/{name}").json() for name in ("misses",)]
    told += [live.get("/v1/cache").json(), live.post("/v1/cache/lookup", body).json()]
    found = list(pairs(told))
    assert [each for each in found if each[2] != each[3]] == []
    elsewhere = {("before", "previous")}
    assert {each[:2] for each in found} == documented() - elsewhere
