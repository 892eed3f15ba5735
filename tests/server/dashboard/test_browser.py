"""The dashboard in Chromium: views, updates, dialogs, keys, both sizes and schemes."""

import re
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest
from openai import APIError

from tests.kit.waiting import wait_until
from tests.server.admin.test_verify import slow_drive
from tests.server.dashboard.browsers import watched
from tests.server.dashboard.test_dashboard import LONG, A, B, ask

VIEWS = ["Overview", "Requests", "Forest", "Misses", "Agents", "Models", "Health", "Connect"]
SIZES = [(1280, 900), (390, 844)]
WHY = "These totals cover all keys; the admin key is needed to see them."
UUID = "3f0c6f0e-8a5e-4c1e-9b59-2f3d0c1a7b71"  # as coding agents name themselves
UUIDS = [f"{number:08x}{UUID[8:]}" for number in range(40)]
LONG_NAME = "a-name-of-a-hundred-characters." + "0123456789" * 6 + "-ends.here"


@pytest.fixture(scope="module")
def missed(serving):
    """One on which nothing is deleted: misses quote prompts, so a deletion forgets them."""
    with serving(admin_key="admin") as live:
        ask(live, f"It is nine. {LONG}", "clock")
        ask(live, f"It is ten. {LONG}", "clock")
        ask(live, "請修復這個測試。" * 20, UUID)
        ask(live, "Mend the test, and say what was wrong with it.", LONG_NAME)
        live.post(f"/v1/agents/{UUID}/fork", {"ids": UUIDS}).raise_for_status()
        yield live


@pytest.fixture
def page(browser, own):
    with watched(browser, own.url) as found:
        found.goto(f"{own.url}/")
        found.get_by_text("Live", exact=True).wait_for()
        yield found


@contextmanager
def answering(live, agent):
    """While inside, an answer is being made, unless it is cancelled from elsewhere."""
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
        with (
            suppress(APIError),
            live.openai().chat.completions.create(stream=True, **body) as stream,
        ):
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


# It loads.


def test_written_today_is_of_today(browser, own):
    """Nothing on a day without writes, whatever the day before had."""

    def on_days_before(route):
        found = route.fetch().json()
        route.fulfill(json={**found, "written_by_day": {"2026-11-16": 5 << 30}})

    with watched(browser, own.url) as page:
        page.route("**/v1/dashboard/saved?*", on_days_before)
        page.goto(f"{own.url}/dashboard")
        page.locator("#saved-tiles").get_by_text("0\u00a0B written today").wait_for()


def test_it_loads_from_its_own_server_only(page):
    """All views are there; `watched` fails on errors and outside requests."""
    assert page.title() == "Keepwarm"
    assert page.locator("#model").inner_text() == "tiny"
    page.locator("#memory .meter").nth(3).wait_for()
    page.locator("#hit-chart rect.fill").first.wait_for()
    # A line of equal times has no height, so the browser would call it hidden.
    page.locator("#latency-chart :is(circle, polyline)").first.wait_for(state="attached")
    page.get_by_role("link", name="Forest").click()
    page.get_by_text("2 agents").wait_for()
    page.get_by_role("link", name="Health").click()
    page.locator("#health-list dt").first.wait_for()
    assert set(page.locator("#health-list dd").all_inner_texts()) == {"0"}
    page.get_by_label("changed only").uncheck()
    page.locator("#settings").get_by_role("row", name="disk_bytes").wait_for()


def test_the_time_shown_can_begin_with_the_server(page):
    page.locator("#hit-chart rect.fill").first.wait_for()
    page.get_by_role("button", name="Since start").click()
    page.locator("[aria-pressed=true]", has_text="Since start").wait_for()
    n_points = page.locator("#hit-chart rect.hover").count()
    assert 0 < n_points < 60  # minutes: the server is younger than an hour
    assert page.locator("#hit-chart rect.fill").count() > 0


def test_a_new_server_offers_a_request_and_demo_traffic(browser, serving):
    """No dashes and no charts; after the traffic the handbook is stored once, and reused."""
    with serving() as live, watched(browser, live.url) as page:
        page.goto(f"{live.url}/dashboard")
        page.get_by_role("heading", name="Send a first request").wait_for()
        assert page.locator("#saved-tiles .tile").count() == 0
        page.get_by_role("button", name="send demo traffic").click()
        wait_until(lambda: len(live.get("/v1/agents").json()["data"]) == 3)
        page.locator("#saved-tiles .tile").first.wait_for()
        assert page.get_by_role("heading", name="Send a first request").count() == 0
        wait_until(lambda: len(live.get("/v1/dashboard/requests").json()["data"]) == 6)
        receipts = [one["receipt"] for one in live.get("/v1/dashboard/requests").json()["data"]]
        computed = [receipt["recomputed"] for receipt in reversed(receipts)]
        assert max(computed[1:]) < computed[0] / 4


def test_a_refused_request_shows_why(page, own):
    own.post("/v1/chat/completions", {"messages": []})
    page.goto(f"{own.url}/dashboard#requests")
    page.locator("#ended tr", has_text="messages is invalid: it is empty.").wait_for()


def test_every_view_has_an_address(page, own):
    """By keyboard alone; one view is shown, and it is the one of the address."""
    for name in VIEWS:
        page.get_by_role("navigation").get_by_role("link", name=name).press("Enter")
        page.locator(f"#{name.lower()}:focus").wait_for()
        assert page.get_by_role("heading", level=2).all_inner_texts() == [name]
        assert page.evaluate("location.hash") == f"#{name.lower()}"
        assert page.locator("[aria-current]").inner_text() == name
    page.go_back()
    page.get_by_role("heading", name="Health").wait_for()
    page.goto(f"{own.url}/dashboard#misses")
    page.get_by_role("heading", name="Misses").wait_for()
    page.goto(f"{own.url}/dashboard#no-such-view")
    page.get_by_role("heading", name="Overview").wait_for()
    page.reload()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#overview:focus").wait_for()


def test_each_client_has_lines_to_copy(browser, own):
    with watched(browser, own.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.goto(f"{own.url}/dashboard#connect")
        page.get_by_role("button", name="Copy the lines for Claude Code").click()
        page.get_by_text("Copied.").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert f"ANTHROPIC_BASE_URL={own.url}" in copied
        assert copied.splitlines()[-1] == "claude"


# It updates.


def test_running_request_is_followed_cancelled_filtered_and_opened(page, own):
    """Live, without a reload; the time to its first token while it still streams."""
    page.goto(f"{own.url}/dashboard#requests")
    page.get_by_text("No active requests.").wait_for()
    with answering(own, "counter"):
        row = page.locator("#running tr", has_text="counter")
        row.get_by_text("decoding").wait_for()
        n_tokens = row.locator("td").nth(2)
        before = int(n_tokens.inner_text().replace(",", ""))
        wait_until(lambda: int(n_tokens.inner_text().replace(",", "")) > before)
        assert "warm" in row.inner_text()
        assert row.locator("td").nth(3).inner_text().endswith("s")  # not a dash
        row.get_by_role("button", name="Cancel").click()
        page.get_by_text("is cancelled").wait_for()
    page.get_by_text("No active requests.").wait_for()
    ended = page.locator("#ended tr", has_text="counter")
    ended.get_by_text("cancelled").wait_for()
    page.get_by_label("State").select_option("cancelled")
    page.get_by_text("done").first.wait_for(state="hidden")
    page.get_by_label("Filter").first.fill("nobody")
    page.get_by_text("No recent request matches").wait_for()
    page.get_by_label("Filter").first.fill("COUNTER")
    ended.get_by_role("button", name="Details").click()
    dialog = page.get_by_role("dialog", name="Request #")
    assert '"prompt_tokens"' in dialog.inner_text()
    wait_until(lambda: "path=/v1/chat/completions" in dialog.inner_text())


PREFILLING = """() => {
  window.fetched = window.fetched ?? window.fetch;
  const change = (data) => {
    const one = {number: 1, seconds: 1, answer_tokens: 0, ended: null, ttft_ms: null};
    Object.assign(one, {state: "prefilling", prefilled: 10});
    one.receipt = {prompt_tokens: 100, recomputed: 60, reused: {disk: 40}, saved_ms: 9};
    return {...data, running: [one]};
  };
  window.fetch = async (path, options) => {
    const answer = await window.fetched(path, options);
    if (!path.endsWith("/now")) return answer;
    return new Response(JSON.stringify(change(await answer.json())));
  };
}"""


def test_the_bar_grows_with_the_prefill(page, own):
    """40 of 100 tokens were found, 10 are computed so far: the bar is half full."""
    page.evaluate(PREFILLING)
    page.evaluate("location.hash = 'requests'")
    row = page.locator("#running tr", has_text="prefilling")
    assert "50 of 100 prefilled (50\u00a0%) disk\u00a040, computed\u00a010" in row.inner_text()
    bars = "[...document.querySelectorAll('#running .stack .fill')].map((one) => one.style.width)"
    assert page.evaluate(bars) == ["40%", "10%"]


TIMERS = """() => {
  const set = window.setTimeout;
  window.timers = 0;
  window.setTimeout = (...given) => { window.timers += 1; return set(...given); };
}"""
MUTATIONS = """() => {
  window.mutations = 0;
  new MutationObserver((seen) => { window.mutations += seen.length; }).observe(document.body,
    {subtree: true, childList: true, attributes: true, characterData: true});
}"""


@pytest.mark.parametrize("view", ["overview", "requests", "forest", "agents"])
def test_an_idle_page_asks_for_one_thing_and_draws_nothing(browser, own, view):
    """Only whether something has changed; what has not is not drawn again."""
    own.host.engine.wait_until_saved()
    with settled(browser, own, view) as (page, asked):
        for _ in range(4):
            beat(page)
        assert set(asked) == {"/v1/dashboard/now"}
        assert page.evaluate("window.mutations") == 0


def test_ages_are_written_anew_on_an_idle_page(browser, own):
    own.host.engine.wait_until_saved()
    with settled(browser, own, "requests") as (page, asked):
        age = page.locator("#ended .state + .quiet").first
        before = age.inner_text()
        for _ in range(15):
            beat(page, 6)
        assert age.inner_text() != before
        assert set(asked) == {"/v1/dashboard/now"}


def test_a_view_that_cannot_be_drawn_does_not_stop_the_page(browser, own):
    """Its ages are written anew after half a minute, and it is asked for after a whole one."""
    own.host.engine.wait_until_saved()
    with settled(browser, own, "overview", allowed="firstElementChild") as (page, asked):
        page.evaluate("document.getElementById('disk').remove()")
        for _ in range(12):
            beat(page, 6)
        assert {path.split("?")[0] for path in asked} == {
            "/v1/dashboard/now",
            "/v1/dashboard/saved",
        }


@contextmanager
def settled(browser, live, view, script="() => {}", **options):
    """A page whose clock only `beat` moves, and what it asks for once speeds and lists rest; the
    script runs before its own."""
    asked = []
    with watched(browser, live.url, **options) as page:
        page.clock.install()
        page.add_init_script(f"({script})()")
        page.goto(f"{live.url}/dashboard#{view}")
        page.get_by_text("Live", exact=True).wait_for()
        now = datetime.fromtimestamp(page.evaluate("Date.now()") / 1000, UTC)
        page.clock.pause_at(now + timedelta(minutes=1))
        page.evaluate(TIMERS)
        for _ in range(4):
            beat(page)
        page.evaluate(MUTATIONS)
        page.on("request", lambda request: asked.append(request.url.removeprefix(live.url)))
        yield page, asked


def beat(page, seconds=3):
    """Let time pass on the page's clock, in which it asks, until it waits to ask again."""
    before = page.evaluate("window.timers")
    page.clock.run_for(1000 * seconds)
    wait_until(lambda: page.evaluate("window.timers") > before)


def test_hidden_page_sends_nothing(browser, own):
    asked = []
    with watched(browser, own.url) as page:
        page.clock.install()
        page.goto(f"{own.url}/")
        page.get_by_text("Live", exact=True).wait_for()
        hide(page, True)
        page.get_by_text("Paused").wait_for()
        page.wait_for_load_state("networkidle")  # what was under way is over
        page.on("request", lambda request: asked.append(request.url))
        page.clock.run_for(20_000)
        assert asked == []
        hide(page, False)
        page.get_by_text("Live", exact=True).wait_for()
        assert asked


def test_what_was_under_way_when_it_was_hidden_leads_to_nothing(page, own):
    """The answer that comes is neither shown as live nor followed by what has changed."""
    held, asked = [], []
    page.goto(f"{own.url}/dashboard#requests")
    page.locator("#ended tbody tr").first.wait_for()
    page.route("**/v1/dashboard/now", lambda route: held.insert(0, route))
    ask(own, LONG, "meanwhile")
    wait_until(lambda: page.locator("#status").inner_text() == "Live" and held)
    hide(page, True)
    page.on("request", lambda request: asked.append(request.url))
    with page.expect_response("**/v1/dashboard/now"):
        held[0].continue_()
    page.wait_for_timeout(500)
    assert page.locator("#status").inner_text() == "Paused"
    assert asked == []


def hide(page, hidden):
    said = "true" if hidden else "false"
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {said}}})"
    )
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_a_server_that_is_gone_is_reported(browser, own):
    with watched(browser, own.url, allowed="ERR_") as page:
        page.goto(own.url)
        page.get_by_text("Live", exact=True).wait_for()
        page.context.set_offline(True)
        page.get_by_text("The server is not responding.").wait_for()
        page.context.set_offline(False)
        page.get_by_text("Live", exact=True).wait_for()
        page.evaluate("timeout = AbortSignal.timeout, AbortSignal.timeout = () => timeout(1000)")
        page.route("**/v1/dashboard/now", lambda route: None)  # it hangs
        page.get_by_text("The server is not responding.").wait_for()
        page.unroute_all()
        page.get_by_text("Live", exact=True).wait_for()


FETCHES = """() => {
  const fetched = window.fetch;
  window.fetches = 0;
  window.fetch = (...given) => { window.fetches += 1; return fetched(...given); };
}"""


def test_a_page_shown_again_while_the_server_is_gone_asks_once_in_a_while(browser, own):
    own.host.engine.wait_until_saved()
    with settled(browser, own, "overview", FETCHES, allowed="ERR_") as (page, _):
        page.context.set_offline(True)
        before = page.evaluate("window.fetches")
        hide(page, True)
        hide(page, False)
        page.get_by_text("The server is not responding.").wait_for()
        page.clock.run_for(2000)
        assert page.evaluate("window.fetches") == before + 1
        page.context.set_offline(False)
        beat(page, 6)
        page.get_by_text("Live", exact=True).wait_for()


def test_nothing_of_the_server_before_is_shown_after_a_restart(browser, own):
    """Its numbers begin at one again, and it may have other models. Before, ages grow."""

    def before(route):
        found = route.fetch(url=route.request.url.split("?")[0]).json()
        models = ["tiny", "old"]
        chosen = models[route.request.url.endswith("old")]
        route.fulfill(json=found | {"models": models, "model": chosen})

    def after(route):
        if route.request.url.endswith("model=old"):
            route.fulfill(status=404, json={"error": "There is no model old."})
            return
        found = route.fetch().json()
        if "revision" in found:
            found["revision"] += "again"
        for one in found.get("data", []):
            one["request_id"] = "a-new-one"
            if "when" in one:
                one.update(when=one["when"] + 1, wasted=98765)
        route.fulfill(json=found)

    own.host.engine.wait_until_saved()
    with settled(browser, own, "misses", allowed="404") as (page, _):
        age = page.locator("#missed .agent").first
        shown = age.inner_text()
        for _ in range(15):
            beat(page, 6)
        assert age.inner_text() != shown
        page.route("**/v1/dashboard/connect*", before)
        page.evaluate("location.hash = 'connect'")
        page.locator("#connect-model").select_option("old")
        page.get_by_text("model old").wait_for()
        page.evaluate("location.hash = 'requests'")
        page.locator("#ended tbody tr").first.wait_for()
        page.unroute_all()
        page.route("**/v1/dashboard/**", after)
        with page.expect_response("**/v1/dashboard/requests"):
            beat(page, 6)
        page.get_by_role("button", name="Details").first.click()
        page.get_by_role("dialog").get_by_text("a-new-one").wait_for()
        page.keyboard.press("Escape")
        page.evaluate("location.hash = 'misses'")
        beat(page, 6)
        page.get_by_text("98,765 tokens recomputed").first.wait_for()
        page.evaluate("location.hash = 'connect'")
        for _ in range(3):
            beat(page, 6)
        page.get_by_text("model tiny;").wait_for()


# Misses.


def test_a_miss_shows_what_changed(browser, missed):
    """The change as a text diff."""
    with watched(browser, missed.url) as page:
        page.goto(f"{missed.url}/dashboard#misses")
        item = page.locator("#missed li", has_text="clock").first
        item.get_by_text("Show the difference").click()
        assert "nine" in item.locator("pre del").first.inner_text()
        assert "ten" in item.locator("pre ins").first.inner_text()
        assert "tokens recomputed" in item.inner_text()


def test_a_miss_is_drawn_again_when_its_texts_can_be_read(browser, missed):
    """As once its model is loaded, or with another key."""

    def unread(route):
        found = route.fetch().json()
        route.fulfill(json=found | {"data": [one | {"text": None} for one in found["data"]]})

    with settled(browser, missed, "requests") as (page, _):
        page.route("**/v1/dashboard/misses", unread)
        page.evaluate("location.hash = 'misses'")
        item = page.locator("#missed li", has_text="clock").first
        item.wait_for()
        assert item.locator("details").count() == 0
        page.unroute_all()
        hide(page, True)
        hide(page, False)
        item.get_by_text("Show the difference").wait_for()


# Keys.


def test_it_asks_for_the_key_and_shows_no_more_than_it_opens(browser, serving):
    """No data without a key, no other key's data with one, and totals to the admin key only."""
    with serving(api_keys="a,b", admin_key="admin") as live:
        ask(live, LONG, "alice", **A)
        ask(live, LONG, "bob", **B)
        with watched(browser, live.url, allowed="401") as page:
            page.goto(live.url)
            dialog = page.get_by_role("dialog", name="API key")
            dialog.wait_for()
            give(dialog, "“a”")  # no header could say it
            dialog.get_by_text("The server does not accept this key.").wait_for()
            give(dialog, "wrong")
            dialog.get_by_text("The server does not accept this key.").wait_for()
            assert "alice" not in page.content()
            give(dialog, "a")
            page.get_by_text("Live", exact=True).wait_for()
            page.goto(f"{live.url}/dashboard#agents")
            page.get_by_role("button", name="Pin alice").wait_for()
            page.goto(f"{live.url}/dashboard#forest")
            page.get_by_text("blocks of other keys").wait_for()
            assert "bob" not in page.content()
            page.goto(f"{live.url}/dashboard#health")
            page.reload()
            verify = page.get_by_role("button", name="Verify every record")
            page.locator("#verify-why").wait_for()
            assert verify.is_disabled()
            page.get_by_role("button", name="API key…").click()
            give(dialog, "admin")
            verify.click()
            page.get_by_text("are intact").wait_for()
            assert page.locator("#verify-why").is_hidden()
            page.goto(f"{live.url}/dashboard#agents")
            page.locator("#agent-list tr", has_text="bob").get_by_text(
                "with its own key"
            ).wait_for()
            page.get_by_role("button", name="API key…").click()
            give(dialog, "a")
            page.get_by_text("bob").wait_for(state="hidden")
        with watched(browser, live.url, allowed="401") as page:  # another tab knows no key
            page.goto(live.url)
            dialog = page.get_by_role("dialog", name="API key")
            dialog.wait_for()
            for key, opened in (("a", False), ("admin", True), ("b", False)):
                if not dialog.is_visible():
                    page.get_by_role("button", name="API key…").click()
                give(dialog, key)
                page.get_by_text(WHY).first.wait_for(state="hidden" if opened else "visible")
                page.get_by_text("0 queued").wait_for()
                for name in ("Memory and disk by budget", "Prompt tokens by source"):
                    assert page.get_by_role("heading", name=name).is_visible() is opened
                if opened:
                    page.get_by_text("after the first turn").wait_for()


def test_verify_waits_for_the_key_and_for_itself(browser, missed):
    """Disabled until the page knows its key, and while it runs."""
    with watched(browser, missed.url) as page:
        page.route("**/v1/dashboard/now", lambda route: None)  # an answer that does not come
        page.goto(f"{missed.url}/dashboard#health")
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
        wait_until(lambda: verify.is_disabled() and held)
        held[0].continue_()
        page.get_by_text("are intact").wait_for()
        page.locator("#verify:enabled").wait_for()  # a little later: when the stream has ended


def test_verify_says_how_far_it_is(browser, missed):
    with slow_drive(missed) as drive, watched(browser, missed.url) as page:
        page.add_init_script("sessionStorage.setItem('keepwarm-key', 'admin')")
        page.goto(f"{missed.url}/dashboard#health")
        page.get_by_role("button", name="Verify every record").click()
        # 100 % where the one that is held back is the short end of a prompt
        share = r"\(([1-9]\d?|100)\s%\)"
        said = page.get_by_text(re.compile(rf"Checked [1-9]\S*\s\S+B of \S+\s\S+B {share}"))
        said.wait_for()
        drive.spin()
        page.get_by_text("are intact").wait_for()
        assert said.is_hidden()


def give(dialog, key):
    """With Enter, as everyone does."""
    dialog.get_by_label("Key", exact=True).fill(key)
    dialog.get_by_label("Key", exact=True).press("Enter")


# Accessibility.


@pytest.mark.parametrize(
    ("scheme", "size"),
    [("light", SIZES[0]), ("light", (1024, 768)), ("dark", SIZES[1])],
    ids=["light-wide", "light-medium", "dark-narrow"],
)
def test_every_view_fits_and_can_be_read(browser, missed, scheme, size):
    """Nothing is beyond the edge or under the header, and every text has the contrast that WCAG AA
    asks for, 4.5 to 1, and every colour of a drawing 3 to 1."""
    width, height = size
    viewport = {"width": width, "height": height}
    with watched(browser, missed.url, color_scheme=scheme, viewport=viewport) as page:
        page.goto(missed.url)
        page.get_by_text("Live", exact=True).wait_for()
        for name in VIEWS:
            with page.expect_response(lambda answer: "/v1/dashboard/" in answer.url):
                page.get_by_role("link", name=name, exact=True).click()
            page.locator(f"#{name.lower()} {FILLED[name]}").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate(CONTRAST) == [], name
            assert page.evaluate(OUTSIDE) == [], name
            assert page.evaluate(OVER) == [], name
            assert page.evaluate(CUT) == [], name
            assert page.evaluate(OVERLAPS) == [], name
            if width >= 1024:
                assert page.evaluate(SCROLLS) == [], name
            heading = page.get_by_role("heading", level=2, name=name).bounding_box()
            header = page.locator("header").bounding_box()
            assert heading["y"] >= header["y"] + header["height"], name


FILLED = {
    "Overview": "rect.fill",
    "Requests": "#ended tbody tr",
    "Forest": "#forest-legend li",
    "Misses": "#missed li",
    "Agents": "#agent-list button",
    "Models": "#fitting table",
    "Health": "#health-list dt",
    "Connect": "pre",
}
OUTSIDE = """() => [...document.querySelectorAll("button, input, select, canvas")]
  .filter((one) => one.checkVisibility())
  .map((one) => [one.id || one.textContent, one.getBoundingClientRect()])
  .filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([name]) => name)"""


OVER = """() => [...document.querySelectorAll("tbody :is(th, td) *")]
  .filter((one) => one.checkVisibility())
  .map((one) => [one.textContent, one.getBoundingClientRect(), one.closest("th, td")])
  .filter(([, box, cell]) => box.right > cell.getBoundingClientRect().right + 1)
  .map(([text]) => text)"""
# Every line of text that is shown: what it says, and its box as far as the elements around it show
# it. What is cut must be whole in a title.
WRITTEN = """() => {
  const around = (one) => (one ? [one, ...around(one.parentElement)] : []);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const { data, parentElement: of } = walker.currentNode;
    if (!data.trim() || !of.checkVisibility()) continue;
    if (of.closest(".unseen, .skip, #toast, select, title")) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const edges = around(of).filter((one) => getComputedStyle(one).overflowX === "hidden");
    for (const { left, top, bottom, right } of range.getClientRects()) {
      const most = Math.min(right, ...edges.map((one) => one.getBoundingClientRect().right));
      const isCut = left < 0 || (right > most + 1 && !edges.some((one) => one.title));
      found.push({ text: data.trim(), of, left, top, bottom, right: most, isCut });
    }
  }
  return found;
}"""
CUT = f"() => ({WRITTEN})().filter((one) => one.isCut).map((one) => one.text)"
OVERLAPS = f"""() => {{
  const all = ({WRITTEN})().sort((a, b) => a.top - b.top);
  const isOver = (one, other) => one.of !== other.of && other.top < one.bottom - 4
    && Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2;
  return all.flatMap((one, index) => all.slice(index + 1).filter((other) => isOver(one, other))
    .map((other) => [one.text, other.text]));
}}"""
SCROLLS = """() => [...document.querySelectorAll("main div")]
  .filter((one) => one.checkVisibility() && getComputedStyle(one).overflowX === "auto")
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.id)"""


def test_the_forest_has_most_of_a_narrow_window(browser, missed):
    with watched(browser, missed.url, viewport={"width": 390, "height": 844}) as page:
        page.goto(f"{missed.url}/dashboard#forest")
        page.locator("#trees[data-scale]").wait_for()
        longest = max(
            run["first_block"] + run["blocks"]
            for run in missed.get("/v1/dashboard/forest").json()["runs"]
        )
        drawn = float(page.locator("#trees").get_attribute("data-scale")) * longest
        assert drawn >= min(40 * longest, 390 / 2)


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
  for (const key of document.querySelectorAll(".key.fill")) { // of what is drawn
    const colour = numbers(getComputedStyle(key).backgroundColor);
    const [a, b] = [light(colour), light(behind(key.parentElement))].sort((x, y) => y - x);
    if (key.checkVisibility() && (a + 0.05) / (b + 0.05) < 3) weak.push(key.className);
  }
  return weak;
}"""
