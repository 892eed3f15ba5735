"""The docs site builds from the pages, lists all of them, and every link in it leads somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / ".ci" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(program, tmp_path_factory):
    return program.build(tmp_path_factory.mktemp("docs"), "https://code.example.org/keepwarm")


def test_every_link_leads_somewhere(program, site):
    assert len(list(site.rglob("*.html"))) > 40
    assert program.broken(site) == []


def test_a_broken_link_is_seen(program, site):
    page = site / "index.html"
    whole = page.read_text()
    for link, target in (("serving.html#branches", "#gone"), ("sharing.html", "gone.html")):
        assert f'href="{link}"' in whole
        page.write_text(whole.replace(f'href="{link}"', f'href="{target}"'))
        assert set(program.broken(site)) == {f"index.html: {target}"}
    page.write_text(whole)


def test_files_outside_of_the_pages_are_linked_in_the_repository(program, site):
    page = (site / "library.html").read_text()
    assert 'href="https://code.example.org/keepwarm/blob/main/examples/session.py"' in page
    text = "[a](../examples/b.py) [c](d.md)\n```sh\n[a](../b)\n```\n"
    plain = program.outward(text, ROOT / "docs" / "library.md", "")
    assert plain == "a [c](d.md)\n```sh\n[a](../b)\n```\n"


def test_the_site_loads_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        assert (
            re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="?https?:', page.read_text()) == []
        )


def test_a_list_begins_after_an_empty_line(program):
    """Without it a list or a table is a part of the paragraph before it, but not on GitHub."""
    begins = re.compile(r"^(?![-|<]|\d+\. |  )\S.*\n(?:- |\d+\. |\|)", re.MULTILINE)
    for page in program.DOCS.rglob("*.md"):
        text = program.CODE.sub("", page.read_text())
        assert begins.findall(text) == [], page


def test_its_navigation_is_the_list_of_pages():
    """In the order and under the headings of the index."""
    (home, *sections) = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert home == "index.md"
    index, _, _ = (ROOT / "docs" / "index.md").read_text().partition("\n## Glossary\n")
    parts = re.split(r"^## (.+)$", index, flags=re.MULTILINE)[1:]
    listed = [
        {heading: re.findall(r"\]\(([\w/-]+\.md)\)", text)}
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    assert sections == listed
