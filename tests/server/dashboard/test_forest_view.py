"""The forest in Chromium: sharing, folding, the map, names, keyboard, and 10,000 blocks."""

import pytest

from keepwarm.agents.agent import Branch
from keepwarm.prefix.blocks import BLOCK_TOKENS, chain
from tests.kit.waiting import wait_until
from tests.server.dashboard.browsers import watched
from tests.server.dashboard.test_browser import beat, settled
from tests.server.dashboard.test_dashboard import LONG, A, B, ask, show
from tests.server.dashboard.test_views import started
from tests.store.kit import record


@pytest.fixture
def page(browser, own):
    with watched(browser, own.url) as found:
        found.goto(f"{own.url}/dashboard#forest")
        found.locator("#trees[data-scale]").wait_for()
        yield found


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


def test_what_is_found_is_drawn_though_another_model_was_chosen(browser, own):
    def of_two_models(route):
        found = route.fetch().json()
        for agent in found["agents"]:
            agent["model"] = f"model-of-{agent['id']}"
        route.fulfill(json=found)

    with watched(browser, own.url) as page:
        page.route("**/v1/dashboard/forest", of_two_models)
        page.goto(f"{own.url}/dashboard#forest")
        page.locator("#forest-model").select_option("model-of-first")
        page.locator("#find").fill("clock")
        page.keyboard.press("Enter")
        assert page.locator("#forest-model").input_value() == ""
        assert "clock" in page.locator("#selected").inner_text()


def test_the_pointer_is_told_what_a_block_is(page):
    canvas = page.locator("#trees").bounding_box()
    page.mouse.move(canvas["x"] + 18, canvas["y"] + 27)  # the first block of the first row
    tip = page.locator("#forest-tip")
    wait_until(lambda: tip.inner_text().startswith("Block 0 of 0 to "))
    assert "used by" in tip.inner_text()
    page.mouse.move(canvas["x"] + 5, canvas["y"] + 5)
    tip.wait_for(state="hidden")


def test_a_drag_that_has_ended_ends_once(page):
    """Nothing is chosen when a later touch is taken away."""
    canvas = page.locator("#trees")
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + 18, box["y"] + 27)  # the first block of the first row
    chosen = page.locator("#selected")
    first = chosen.inner_text()
    assert first.startswith("Run ")
    page.keyboard.press("ArrowDown")
    wait_until(lambda: chosen.inner_text() != first)
    canvas.dispatch_event("pointercancel")
    assert chosen.inner_text() != first


def test_colour_shows_sharing_first_and_every_agent_has_its_name(page):
    legend = page.locator("#forest-legend").inner_text()
    assert "one agent" in legend
    assert "5 agents or more" in legend
    assert page.locator("#trees").get_attribute("data-names") == "2"


@pytest.fixture(scope="module")
def crowd(serving):
    """100 agents whose 1,002 blocks begin with two shared ones."""
    with serving() as live:
        store = live.host.engine.store
        name = live.host.engine.lane_of().restorer.namespace
        for seed in range(100):
            tokens = [1] * (2 * BLOCK_TOKENS) + [2 + seed] * (10 * BLOCK_TOKENS)
            for ref in chain(name, tokens):
                store.memory.put(record(ref, n_bytes=512, namespace=name))
            store.on_disk.agents.create(f"agent-{seed:02}", Branch.of(name, tokens, [len(tokens)]))
        yield live


def test_blocks_of_a_hundred_agents_are_drawn_found_and_selected(browser, crowd):
    """Rows stay readable."""
    with watched(browser, crowd.url) as page:
        page.goto(f"{crowd.url}/dashboard#forest")
        page.get_by_text("1,002 blocks in").wait_for()
        page.get_by_text("2 blocks shared by several").wait_for()
        canvas = page.locator("#trees")
        assert canvas.get_attribute("data-rows") == "100"
        n_names = int(canvas.get_attribute("data-names"))
        assert n_names >= canvas.bounding_box()["height"] // 22 - 1  # one in every row in sight
        canvas.focus()
        page.keyboard.press("ArrowDown")
        assert page.locator("#selected").inner_text().startswith("Run ")
        runs = crowd.get("/v1/dashboard/forest").json()["runs"]
        page.locator("#find").fill(runs[-1]["id"])
        assert page.locator("#found").inner_text() == "1 run"
        page.keyboard.press("Enter")
        assert page.locator("#selected").inner_text().startswith(f"Run {runs[-1]['id']}:")
        page.locator("#find").fill("agent-42")
        page.keyboard.press("Enter")
        assert "agent-42" in page.locator("#selected").inner_text()


def test_runs_are_folded_and_the_map_moves_the_drawing(browser, crowd):
    with watched(browser, crowd.url) as page:
        page.goto(f"{crowd.url}/dashboard#forest")
        canvas = page.locator("#trees[data-rows='100']")
        canvas.wait_for()
        before = canvas.screenshot()
        small = page.locator("#minimap").bounding_box()
        page.mouse.click(small["x"] + 10, small["y"] + small["height"] - 5)
        assert canvas.screenshot() != before
        canvas.focus()
        page.keyboard.press("ArrowDown")  # the first run: what all agents share
        page.keyboard.press("Enter")
        page.locator("#trees[data-rows='1']").wait_for()
        assert "100 runs folded" in page.locator("#forest-sum").inner_text()
        page.locator("#find").fill("agent-07")
        page.locator("#find").press("Enter")  # unfolds what leads there
        page.locator("#trees[data-rows='100']").wait_for()
        assert "agent-07" in page.locator("#selected").inner_text()


def test_the_map_follows_no_touch_that_was_taken_away(browser, crowd):
    with watched(browser, crowd.url) as page:
        page.goto(f"{crowd.url}/dashboard#forest")
        canvas = page.locator("#trees[data-rows='100']")
        canvas.wait_for()
        small = page.locator("#minimap").bounding_box()
        page.mouse.move(small["x"] + 10, small["y"] + 5)
        page.mouse.down()
        page.locator("#minimap").dispatch_event("pointercancel")
        before = canvas.screenshot()
        page.mouse.move(small["x"] + 10, small["y"] + small["height"] - 5)
        assert canvas.screenshot() == before


def test_runs_of_no_agent_can_be_left_out(browser, serving):
    with serving() as live:
        ask(live, LONG, "kept")
        ask(live, f"Somebody else. {LONG}")
        with watched(browser, live.url) as page:
            page.goto(f"{live.url}/dashboard#forest")
            page.locator("#trees[data-rows='2']").wait_for()
            page.get_by_label("Unnamed runs").uncheck()
            page.locator("#trees[data-rows='1']").wait_for()
            assert "folded" in page.locator("#forest-sum").inner_text()


RUNNING = """() => {
  const fetched = window.fetch;
  const run = {tokens: 0, bytes: 0, oldest: 0, used: 0, pinned: false, namespace: ""};
  const trunk = {...run, id: "a", parent: null, first_block: 0, blocks: 4, memory: true};
  const branch = {...run, id: "b", parent: 0, first_block: 4, blocks: 4};
  const named = (id) => ({id, title: "", model: "m", key: null});
  const forest = {agents: [named("new"), named("old")], blocks: 4, omitted_blocks: 0,
    other_blocks: 0, requests: [{number: 1, agent: 0}],
    runs: [{...trunk, agents: [0, 1], ends: [1]}, {...branch, agents: [0], ends: [0]}]};
  const request = {number: 1, state: "prefilling", seconds: 1, answer_tokens: 0, ended: null,
    prompt_tokens: 2048, ttft_ms: null, agent: "new", receipt: null};
  const made = (data) => new Response(JSON.stringify(data));
  window.processed = 0;
  window.fetch = async (path, options) => {
    const answer = await fetched(path, options);
    if (path.endsWith("/forest")) return made(forest);
    const running = [{...request, processed: window.processed}];
    return path.endsWith("/now") ? made({...await answer.json(), running}) : answer;
  };
}"""


def test_bars_grow_and_light_up_while_a_prompt_is_computed(browser, own):
    """From the trunk on, within 250 ms of the page's clock, and without asking for all blocks."""
    with settled(browser, own, "forest", RUNNING, reduced_motion="reduce") as (page, asked):
        page.locator("#trees[data-lit='0'][data-rows='2']").wait_for()
        for n_blocks in (2, 4, 7):
            page.evaluate(f"window.processed = {256 * n_blocks + 9}")
            beat(page, 0.25)
            assert page.locator("#trees").get_attribute("data-lit") == str(n_blocks)
        assert set(asked) == {"/v1/dashboard/now"}
        assert "to be computed" in page.locator("#forest-legend").inner_text()
        page.get_by_role("button", name="Table").click()
        assert "not computed yet" in page.get_by_role("region", name="Runs of blocks").inner_text()


STEADY = """async (ranks) => {
  const { steady } = await import('/dashboard/trees.js');
  const runs = [["r", null], ["x", 0], ["x1", 1], ["y", 0], ["z", 0]];
  const given = runs.map(([id, parent]) => ({ id, parent }));
  return steady(given, new Map(ranks)).map(({ id, parent }) => [id, parent]);
}"""


def test_rows_stay_where_they_are_and_new_ones_come_last(page):
    ranks = [["r", 0], ["y", 1], ["x", 2], ["x1", 3]]
    placed = [["r", None], ["y", 0], ["x", 0], ["x1", 2], ["z", 0]]
    assert page.evaluate(STEADY, ranks) == placed


def test_a_running_request_is_in_the_forest(serving):
    """With the blocks that it will have, for its own key alone."""
    with serving(api_keys="a,b", admin_key="admin") as live:
        ask(live, LONG, "old", **A)
        thread, _ = started(live, "new", A, LONG + "And now. " * 60)
        found = show(live, "forest", **A)
        (request,) = found["requests"]
        assert found["agents"][request["agent"]]["id"] == "new"
        (end,) = [run for run in found["runs"] if request["agent"] in run["ends"]]
        assert found["runs"][0]["agents"] == [0, 1]
        assert end["parent"] is not None
        assert show(live, "forest", **B)["requests"] == []
        again, _ = started(live, "new", A, LONG + "And then. " * 60)
        wait_until(lambda: len(show(live, "now", **A)["running"]) == 2)
        found = show(live, "forest", **A)
        names = [found["agents"][each["agent"]]["id"] for each in found["requests"]]
        assert names == ["new", f"#{found['requests'][1]['number']}"]
        live.post(f"/v1/dashboard/requests/{found['requests'][1]['number']}/cancel", {}, **A)
        again.join(300)
        number = show(live, "now", **A)["running"][0]["number"]
        assert number == request["number"]
        live.post(f"/v1/dashboard/requests/{number}/cancel", {}, **A)
        thread.join(300)
        assert show(live, "forest", **A)["requests"] == []
