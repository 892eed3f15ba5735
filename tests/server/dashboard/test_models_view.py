"""The models in Chromium: what is loaded, loading, unloading, pinning, pulling, and who may."""

import threading

import pytest

from keepwarm import config
from keepwarm.server.ollama.models import Pulls
from tests.server.conftest import serve
from tests.server.dashboard.browsers import watched
from tests.server.dashboard.test_dashboard import ADMIN, show


@pytest.fixture(scope="module")
def gate():
    """Opened when the hub has sent everything."""
    return threading.Event()


@pytest.fixture(scope="module")
def models(served_model, gate, tmp_path_factory):
    """A server with an admin key, whose hub waits for the gate."""

    def fetch(name, announce):
        announce(1 << 20)
        assert gate.wait(300)

    def replace_hub(app):
        app.state.pulls = Pulls(fetch)

    home = str(tmp_path_factory.mktemp("home"))
    settings = config.load({"KEEPWARM_HOME": home}, admin_key="admin", on_demand="org/*")
    with serve(served_model, settings, around=replace_hub) as live:
        yield live


@pytest.fixture
def page(browser, models):
    with watched(browser, models.url, allowed="400 (Bad Request)") as found:
        found.add_init_script("sessionStorage.setItem('keepwarm-key', 'admin')")
        found.goto(f"{models.url}/dashboard#models")
        found.get_by_role("button", name="Pin tiny").wait_for()
        yield found


def test_what_is_loaded_and_what_fits(models):
    found = show(models, "models", **ADMIN)
    (tiny,) = found["data"]
    assert (tiny["name"], tiny["loaded"], tiny["loading"], tiny["idle_s"]) == (
        *("tiny", True, None),
        None,
    )
    assert tiny["n_bytes"] == found["weights"]["n_bytes"] > 0
    assert found["weights"]["max_bytes"] > 0
    assert 0 < len(found["fitting"]) <= found["n_choices"]
    assert all(one["weights_bytes"] < found["machine_bytes"] for one in found["fitting"])
    assert not any(one["may_load"] for one in found["fitting"])  # none is of org


def test_a_model_is_pinned_unloaded_and_loaded(page):
    page.get_by_role("button", name="Pin tiny").click()
    unpin = page.get_by_role("button", name="Unpin tiny")
    unpin.wait_for()
    page.get_by_role("button", name="Unload tiny").click()
    page.get_by_role("alert").get_by_text("tiny is pinned and stays loaded").wait_for()
    unpin.click()
    page.get_by_role("button", name="Pin tiny", exact=True).wait_for()
    page.get_by_role("button", name="Unload tiny").click()
    page.get_by_text("not loaded", exact=True).wait_for()
    page.get_by_role("button", name="Load tiny", exact=True).click()
    page.get_by_role("button", name="Unload tiny").wait_for()


# The answer to a pin comes after the page has drawn it.
LATE = """() => {
  const ask = window.fetch;
  window.fetch = async (path, options) => {
    const answer = await ask(path, options);
    const verb = path === "/v1/admin/load" && (JSON.parse(options.body).pinned ? "Unpin" : "Pin");
    while (verb && !document.querySelector(`[aria-label="${verb} tiny"]`)) {
      await new Promise((done) => setTimeout(done, 20));
    }
    return answer;
  };
}"""


def test_buttons_are_enabled_again_when_what_they_did_was_drawn_before(page):
    page.evaluate(LATE)
    page.get_by_role("button", name="Pin tiny", exact=True).click()
    page.get_by_role("button", name="Unpin tiny").click(timeout=10_000)
    page.get_by_role("button", name="Pin tiny", exact=True).click(timeout=10_000, trial=True)


def test_a_download_shows_how_far_it_is(page, gate):
    page.get_by_label("Hub id").fill("elm")
    page.get_by_role("button", name="Pull", exact=True).click()
    page.get_by_role("alert").get_by_text("'elm' cannot be downloaded").wait_for()
    page.get_by_label("Hub id").fill("org/oak")
    page.get_by_label("Hub id").press("Enter")
    page.get_by_role("meter", name="pulling org/oak").wait_for()
    page.get_by_text("0 B of 1.0 MiB").wait_for()
    page.reload()
    page.get_by_role("meter", name="pulling org/oak").wait_for()
    gate.set()
    page.get_by_role("meter", name="pulling org/oak").wait_for(state="hidden")


def test_without_the_admin_key_nothing_can_be_changed(browser, models):
    with watched(browser, models.url) as page:
        page.goto(f"{models.url}/dashboard#models")
        unload = page.get_by_role("button", name="Unload tiny")
        page.locator("#manage-why").wait_for()
        assert unload.is_disabled()
        assert page.get_by_role("button", name="Pin tiny").is_disabled()
        assert page.get_by_role("button", name="Pull", exact=True).is_disabled()
