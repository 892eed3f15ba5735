"""The dashboard in Chromium: it loads, updates, and its buttons work."""

import tarfile
import threading
from contextlib import contextmanager

import pytest

from keepwarm.prefix.blocks import BLOCK_TOKENS, chain
from keepwarm.text.request import Request
from tests.server.conftest import wait_until
from tests.server.dashboard.browsers import chromium, watched
from tests.server.dashboard.test_dashboard import A, B, ask
from tests.store.kit import record

LONG = "The quick brown fox jumps over the lazy dog. " * 40
SECTIONS = ["Now", "Saved", "Forest", "Misses", "Agents", "Health"]


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def own(serving):
    """A server of this module's own, with an agent and a miss."""
    with serving() as live:
        ask(live, LONG, "first")
        ask(live, f"It is nine. {LONG}", "clock")
        ask(live, f"It is ten. {LONG}", "clock")
        yield live


@pytest.fixture(scope="module")
def missed(serving):
    """One on which nothing is deleted: misses quote prompts, so a deletion forgets them."""
    with serving() as live:
        ask(live, f"It is nine. {LONG}", "clock")
        ask(live, f"It is ten. {LONG}", "clock")
        yield live


@pytest.fixture
def page(browser, own):
    with watched(browser, own.url) as found:
        found.goto(f"{own.url}/")
        found.get_by_text("Live", exact=True).wait_for()
        yield found


@contextmanager
def answering(live, agent):
    """While inside, an answer is being made."""
    ends = live.host.engine.model.tokenizer.eos_token_ids
    over = threading.Event()

    def read():
        body = {
            "model": "any",
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 8000,
            "logit_bias": {str(end): -100 for end in ends},
            "extra_headers": {"X-Keepwarm-Agent": agent},
        }
        with live.openai().chat.completions.create(stream=True, **body) as stream:
            for _ in stream:
                if over.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(300)


def agents(live):
    return {agent["id"]: agent for agent in live.get("/v1/agents").json()["data"]}


# It loads.


def test_it_loads_from_its_own_server_only(page):
    """S0-75: all sections are there; `watched` fails on errors and outside requests."""
    assert page.title() == "Keepwarm"
    assert page.get_by_role("heading", level=2).all_inner_texts() == SECTIONS
    assert page.locator("#model").inner_text() == "tiny"
    page.locator("#memory .meter").nth(3).wait_for()
    page.locator("#hit-chart rect").first.wait_for()
    page.get_by_text("2 agents").wait_for()
    page.locator("#health-list dt").first.wait_for()
    assert set(page.locator("#health-list dd").all_inner_texts()) == {"0"}
    budgets = page.locator("#what-if").get_by_role("region", name="Outcome by disk budget")
    assert "no limit" in budgets.inner_text()
    assert "lookups since" in page.locator("#what-if").inner_text()


def test_links_lead_to_their_sections(page):
    """Every section can be reached by keyboard alone, the first in two keys."""
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "now"
    for link in page.get_by_role("navigation").get_by_role("link").all():
        link.press("Enter")
        wanted = link.get_attribute("href")
        assert page.evaluate("location.hash") == wanted
        assert page.locator(wanted).is_visible()


# It updates.


def test_it_follows_a_running_request(page, own):
    """S0-75: live, without a reload."""
    page.get_by_text("No active requests.").wait_for()
    with answering(own, "counter"):
        row = page.locator("#running tr", has_text="counter")
        row.get_by_text("decoding").wait_for()
        n_tokens = row.locator("td").nth(2)
        before = int(n_tokens.inner_text().replace(",", ""))
        wait_until(lambda: int(n_tokens.inner_text().replace(",", "")) > before)
        assert "warm" in row.inner_text()
    page.get_by_text("No active requests.").wait_for()
    page.locator("#ended tr", has_text="counter").first.wait_for()


def test_it_sends_nothing_while_hidden(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    hide(page, True)
    page.get_by_text("Paused").wait_for()
    page.wait_for_timeout(500)  # what was under way is over
    asked.clear()
    page.wait_for_timeout(2500)
    assert asked == []
    hide(page, False)
    page.get_by_text("Live", exact=True).wait_for()
    assert asked


def hide(page, hidden):
    said = "true" if hidden else "false"
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {said}}})"
    )
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_a_server_that_is_gone_is_reported(browser, serving):
    with serving() as live, watched(browser, live.url, allowed="ERR_") as page:
        page.goto(live.url)
        page.get_by_text("Live", exact=True).wait_for()
        page.context.set_offline(True)
        page.get_by_text("The server is not responding.").wait_for()
        page.context.set_offline(False)
        page.get_by_text("Live", exact=True).wait_for()


# Its buttons.


def test_an_agent_is_pinned_and_unpinned(page, own):
    page.get_by_role("button", name="Pin first").click()
    page.get_by_role("button", name="Unpin first").wait_for()
    assert agents(own)["first"]["pinned"]
    page.get_by_role("button", name="Unpin first").press("Enter")
    page.get_by_role("button", name="Pin first", exact=True).wait_for()
    assert not agents(own)["first"]["pinned"]


def test_an_agent_is_forked_and_deleted_after_a_question(page, own):
    """S0-75: nothing is deleted without confirmation."""
    page.get_by_role("button", name="Fork first").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox").fill("second")
    dialog.get_by_role("button", name="Fork").click()
    page.get_by_role("button", name="Delete second").click()
    assert "cannot be undone" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert agents(own)["second"]["forked_from"] == "first"
    page.get_by_role("button", name="Delete second").click()
    page.keyboard.press("Escape")
    assert "second" in agents(own)
    page.get_by_role("button", name="Delete second").click()
    dialog.get_by_role("button", name="Delete").click()
    page.get_by_text("second deleted").wait_for()
    wait_until(lambda: "second" not in agents(own))
    assert "first" in agents(own)


def test_an_agent_is_rewound_and_exported(page, own, tmp_path):
    ask(own, LONG, "traveller")
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="Export traveller").click()
    downloaded.value.save_as(tmp_path / "bundle.tar")
    assert downloaded.value.suggested_filename == "traveller.tar"
    with tarfile.open(tmp_path / "bundle.tar") as bundle:
        assert bundle.getnames()
    page.get_by_role("button", name="Rewind traveller").click()
    page.get_by_role("dialog").get_by_role("button", name="Rewind").click()
    wait_until(lambda: agents(own)["traveller"]["turns"] == [])


def test_errors_are_shown(browser, own):
    with watched(browser, own.url, allowed="400 (Bad Request)") as page:
        page.goto(own.url)
        page.get_by_role("button", name="Fork first").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("textbox").fill("clock")
        dialog.get_by_role("button", name="Fork").click()
        page.get_by_role("alert").get_by_text("Agent 'clock' already exists").wait_for()


# The forest.


def test_the_forest_is_walked_by_keyboard_and_read_as_a_table(page):
    page.locator("#trees").focus()
    page.keyboard.press("ArrowDown")
    chosen = page.locator("#selected")
    first = chosen.inner_text()
    assert first.startswith("Run ")
    assert "its oldest block" in first
    assert "least recently used" in page.locator("#forest-sum").inner_text()
    page.keyboard.press("ArrowDown")
    wait_until(lambda: chosen.inner_text() != first)
    page.get_by_role("button", name="Table").click()
    table = page.get_by_role("region", name="Runs of blocks")
    assert "in memory, on disk" in table.inner_text()
    assert table.get_by_role("columnheader").all_inner_texts()[-1] == "Oldest block"
    page.get_by_label("Find").fill("clock")
    wait_until(lambda: "first" not in table.inner_text())
    assert "clock" in table.inner_text()


def test_zoom_changes_the_picture(page):
    canvas = page.locator("#trees")
    fitted, picture = float(canvas.get_attribute("data-scale")), canvas.screenshot()
    page.get_by_role("button", name="Zoom in").click()
    assert float(canvas.get_attribute("data-scale")) > fitted
    assert canvas.screenshot() != picture
    page.get_by_role("button", name="Fit").click()
    assert float(canvas.get_attribute("data-scale")) == fitted
    page.get_by_label("Colour").select_option("age")
    assert "last 5 min" in page.locator("#forest-legend").inner_text()


def test_ten_thousand_blocks(browser, serving):
    """S0-75: drawing, searching and selecting take less than a second."""
    with serving() as live:
        engine = live.host.engine
        name = engine._lane(Request()).manager.namespace
        for seed in range(100):
            tokens = [1] * (2 * BLOCK_TOKENS) + [2 + seed] * (100 * BLOCK_TOKENS)
            for ref in chain(name, tokens):
                engine.store.memory.put(record(ref, n_bytes=512, namespace=name))
        with watched(browser, live.url) as page:
            page.goto(live.url)
            page.get_by_text("10,000 blocks in").wait_for()
            assert took_ms(page, "document.getElementById('zoom-in').click()") < 1000
            page.locator("#trees").focus()
            page.keyboard.press("ArrowDown")
            first = page.locator("#selected").inner_text()
            assert first.startswith("Run ")
            runs = live.get("/v1/dashboard/forest").json()["runs"]
            page.locator("#find").fill(runs[-1]["id"])
            assert page.locator("#found").inner_text() == "1 runs"
            searching = "document.getElementById('find').dispatchEvent(new Event('input'))"
            assert took_ms(page, searching) < 1000
            page.keyboard.press("Enter")
            assert page.locator("#selected").inner_text().startswith(f"Run {runs[-1]['id']}:")


def took_ms(page, script):
    return page.evaluate(
        f"() => {{ const t = performance.now(); {script}; return performance.now() - t }}"
    )


# Misses.


def test_a_miss_shows_what_changed(browser, missed):
    """S0-75: the change as a text diff."""
    with watched(browser, missed.url) as page:
        page.goto(missed.url)
        item = page.locator("#missed li", has_text="clock").first
        item.get_by_text("Show the difference").click()
        assert "nine" in item.locator("pre del").first.inner_text()
        assert "ten" in item.locator("pre ins").first.inner_text()
        assert "tokens recomputed" in item.inner_text()


# Keys.


def test_it_asks_for_the_key_and_shows_no_more_than_it_opens(browser, serving):
    """S0-75: no data without a key, and no other key's data with one."""
    with serving(api_keys="a,b", admin_key="admin") as live:
        ask(live, LONG, "alice", **A)
        ask(live, LONG, "bob", **B)
        with watched(browser, live.url, allowed="401") as page:
            page.goto(live.url)
            dialog = page.get_by_role("dialog", name="API key")
            dialog.wait_for()
            give(dialog, "wrong")
            dialog.get_by_text("The API key is missing or wrong").wait_for()
            assert "alice" not in page.content()
            give(dialog, "a")
            page.get_by_text("Live", exact=True).wait_for()
            page.get_by_role("button", name="Pin alice").wait_for()
            page.get_by_text("blocks of other keys").wait_for()
            assert "bob" not in page.content()
            page.reload()
            page.get_by_role("button", name="Pin alice").wait_for()
            verify = page.get_by_role("button", name="Verify every record")
            assert verify.is_disabled()
            page.get_by_text("Needs the admin key").wait_for()
            page.get_by_role("button", name="Key…").click()
            give(dialog, "admin")
            verify.click()
            page.get_by_text("are intact").wait_for()
            assert page.get_by_text("Needs the admin key").is_hidden()
            page.get_by_role("button", name="Key…").click()
            give(dialog, "a")
            page.get_by_text("Needs the admin key").wait_for()
            assert verify.is_disabled()
        with watched(browser, live.url, allowed="401") as page:  # another tab knows no key
            page.goto(live.url)
            page.get_by_role("dialog", name="API key").wait_for()


def test_verify_waits_for_the_key_and_for_itself(browser, serving):
    """Disabled until the page knows its key, and while it runs."""
    with serving(admin_key="admin") as live, watched(browser, live.url) as page:
        page.route("**/v1/dashboard/now", lambda route: None)  # an answer that does not come
        page.goto(f"{live.url}/dashboard")
        verify = page.get_by_role("button", name="Verify every record")
        assert verify.is_disabled()
        page.unroute_all()
        page.evaluate("sessionStorage.setItem('keepwarm-key', 'admin')")
        page.reload()
        held = []
        page.route("**/v1/cache/verify", lambda route: held.insert(0, route))
        verify.click()
        page.get_by_text("Checking every record").wait_for()
        with page.expect_response("**/v1/dashboard/now"):
            pass  # which tells the page that it may verify
        page.wait_for_timeout(100)
        assert verify.is_disabled()
        held[0].continue_()
        page.get_by_text("are intact").wait_for()
        assert verify.is_enabled()


def give(dialog, key):
    dialog.get_by_label("Key", exact=True).fill(key)
    dialog.get_by_role("button", name="Use key").click()


# Accessibility.


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(browser, missed, scheme):
    """Every text has the contrast that WCAG AA asks for, 4.5 to 1."""
    with watched(browser, missed.url, color_scheme=scheme) as page:
        page.goto(missed.url)
        page.locator("#missed li").first.wait_for()
        page.locator("#agent-list button").first.wait_for()
        weak = page.evaluate(CONTRAST)
        assert weak == []


def test_it_fits_a_narrow_window(browser, own):
    with watched(browser, own.url, viewport={"width": 390, "height": 800}) as page:
        page.goto(own.url)
        page.locator("#agent-list button").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.disabled) continue;
    const style = getComputedStyle(element);
    const colour = numbers(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [a, b] = [light(colour), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.push([element.id, element.textContent]);
  }
  return weak;
}"""
