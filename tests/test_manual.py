"""What the manual must speak of, held against the code and the releases it speaks of."""

import re
from pathlib import Path

import pytest
from fastapi import FastAPI

import keepwarm
from keepwarm import kv
from keepwarm.prefix.fingerprint import Identity
from keepwarm.server.apis import ROUTERS
from tests.kv.files.test_files import GOLDEN_FILES

DOCS = Path(__file__).parent.parent / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def section(name: str, heading: str) -> str:
    """A page's text under a heading, up to the next one."""
    _, text = page(name).split(f"\n## {heading}\n", 1)
    return text.split("\n## ", 1)[0]


def paths() -> list[str]:
    """Every path of the server, its parameters without names."""
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    return [unnamed(path) for path in app.openapi()["paths"]]


def unnamed(text: str) -> str:
    return re.sub(r"\{\w+\}", "{}", text)


def test_the_server_is_documented():
    """Every path it answers; those of the dashboard are for its page alone."""
    text = unnamed(page("serving") + page("operations"))
    assert "/v1/chat/completions" in paths()
    missing = [path for path in paths() if not re.search(rf"[` ]{re.escape(path)}[`?]", text)]
    assert {path.rsplit("/dashboard/", 1)[0] for path in missing} == {"/v1"}


def test_the_library_is_documented():
    """Every public name."""
    text = page("api")
    public = [name for name in keepwarm.__all__ if not name.startswith("_")]
    assert [name for name in public if f"\n### `{name}`\n" not in text] == []


def test_what_makes_a_prompt_cold_is_documented():
    """Every part of a model's identity, and when to remove something by hand."""
    text = section("tuning", "What makes a prompt cold")
    words = {
        "weights": "weights", "config": "model config", "tokenizer": "tokenizer",
        "layout": "dtype of K and V", "adapter": "adapter", "kv_options": "`kv_bits`",
        "salt": "tenant", "block_tokens": "block format", "format_version": "block format",
        "origin": "imported",
    }  # fmt: skip
    assert words.keys() == Identity.__dataclass_fields__.keys()
    assert [word for word in words.values() if word not in text] == []
    assert "keepwarm cache rm" in text


def test_the_api_of_every_version_of_mlx_lm_is_documented():
    """Of all whose files are read here, and of the one that the sources speak of."""
    table = section("caches", "mlx-lm by version")
    (heads,) = re.findall(r"^\| \|(.+)\|$", table, re.MULTILINE)
    versions = {cell.strip() for cell in heads.split("|")}
    read = {stem.split("-", 1)[0] for stem in GOLDEN_FILES}
    assert read - versions == {"0.24.1"}  # older than batches
    for word in ("KVCache.state", "from_state", "BatchGenerator.insert", "Response.prompt_cache"):
        assert f"| `{word}` |" in table


def test_speculative_decoding_is_researched():
    """Which caches it needs, and that mlx-lm has none in batches."""
    text = page("speculative")
    assert "[mlx-lm#1423]" in text
    assert "Rejected tokens are removed with `trim`" in text
    assert "mlx-lm speculates for single sequences only" in text
    assert "mlx-lm does not support it in batches" in page("caches")


def test_what_could_be_faster_is_named_and_measured_first():
    """Rolling, which would gain most, was profiled."""
    text = section("caches", "Tuning")
    (line,) = [line for line in text.splitlines() if line.startswith("- **Going further**")]
    assert "only after profiling" in line
    for word in ("`mx.compile`", "custom kernel", "`mx.set_cache_limit`", "`mx.async_eval`"):
        assert word in line
    assert "**What a custom kernel would gain.**" in page("results/kv")


@pytest.mark.parametrize("column", [1, 2])
def test_the_way_from_single_to_batch_is_described(column):
    """With functions that there are; its program is run with all the others."""
    text = section("caches", "From single to batch")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    named = set(re.findall(r"kv\.(\w+)", " ".join(row[column] for row in rows)))
    assert len(rows) >= 8
    assert len(named) >= 2
    assert [name for name in named if not hasattr(kv, name)] == []


@pytest.mark.parametrize(
    "source",
    [
        "https://huggingface.co/docs/transformers/kv_cache",
        "https://huggingface.co/docs/transformers/cache_explanation",
        "https://arxiv.org/abs/2603.04428",
    ],
)
def test_the_comparison_cites_its_sources(source):
    """Both pages of transformers, and the article on persistent caches."""
    assert f"]({source})" in page("comparison")
