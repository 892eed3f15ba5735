"""The list of agents in Chromium: its buttons, dialogs and chat."""

import json
import re
import tarfile

import pytest

from keepwarm import config
from tests.kit.checkpoints import THINKING_CHATML, make_tokenizer, write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.conftest import N_CONTEXT, serve
from tests.server.dashboard.browsers import watched
from tests.server.dashboard.test_dashboard import LONG, ask


@pytest.fixture
def page(browser, own):
    with watched(browser, own.url) as found:
        found.goto(f"{own.url}/dashboard#agents")
        found.get_by_role("button", name="Pin first").wait_for()
        yield found


@pytest.fixture
def thinking(tmp_path):
    """A server whose model begins every answer with a thought."""
    from keepwarm.models.load import load

    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    options = {"tokenizer": tokenizer, "template": THINKING_CHATML, "n_context": N_CONTEXT}
    path = write_checkpoint(tmp_path / "model", **options)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path / "home")})
    with serve(load(str(path), settings), settings) as live:
        yield live


GO_ON = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 4}


def agents(live):
    return {agent["id"]: agent for agent in live.get("/v1/agents").json()["data"]}


def test_an_agent_is_pinned_and_unpinned(page, own):
    page.get_by_role("button", name="Pin first").click()
    page.get_by_role("button", name="Unpin first").wait_for()
    assert agents(own)["first"]["pinned"]
    page.get_by_role("button", name="Unpin first").press("Enter")
    page.get_by_role("button", name="Pin first", exact=True).wait_for()
    assert not agents(own)["first"]["pinned"]


def test_an_agent_is_forked_and_deleted_after_a_question(page, own):
    """Nothing is deleted without confirmation."""
    page.get_by_role("button", name="Fork first").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox").fill("second")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Delete second").click()
    assert "cannot be undone" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert agents(own)["second"]["forked_from"] == "first"
    page.get_by_role("button", name="Delete second").click()
    page.keyboard.press("Escape")
    assert "second" in agents(own)
    page.get_by_role("button", name="Delete second").focus()
    page.keyboard.down("Enter")
    page.keyboard.down("Enter")  # held down: the question stays
    page.keyboard.up("Enter")
    assert dialog.is_visible()
    assert "second" in agents(own)
    page.keyboard.press("Enter")  # which confirms, in every dialog
    page.get_by_text("second deleted").wait_for()
    wait_until(lambda: "second" not in agents(own))
    assert "first" in agents(own)


SAID = """() => {
  window.said = [];
  const toast = document.getElementById("toast");
  new MutationObserver(() => window.said.push(toast.textContent)).observe(toast, {childList: true});
}"""


def test_an_agent_is_rewound_and_exported(page, own, tmp_path):
    ask(own, LONG, "traveller")
    page.evaluate(SAID)
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="Export traveller").click()
    downloaded.value.save_as(tmp_path / "bundle.tar")
    assert downloaded.value.suggested_filename == "traveller.tar"
    with tarfile.open(tmp_path / "bundle.tar") as bundle:
        assert bundle.getnames()
    begun, *under_way, ended = page.evaluate("window.said")
    assert begun == "Preparing the export of traveller."
    assert re.fullmatch(r"Exporting traveller: \S+\s\S?i?B of up to about .+B\.", under_way[0])
    assert ended.startswith("traveller exported, ")
    page.get_by_role("button", name="Rewind traveller").click()
    assert page.get_by_label("Turns to keep").input_value() == ""  # so that Enter deletes nothing
    page.get_by_label("Turns to keep").fill("0")
    page.get_by_role("dialog").get_by_role("button", name="Rewind").click()
    wait_until(lambda: agents(own)["traveller"]["turns"] == [])


def test_an_old_agent_is_rewound_by_the_turns_that_it_has_now(browser, serving):
    """What its buttons show has not changed since they were drawn."""

    def age(route):
        found = route.fetch().json()
        for agent in found["data"]:
            agent["created"] -= 2 * 86400
        route.fulfill(json=found)

    with serving() as live, watched(browser, live.url) as page:
        page.route("**/v1/dashboard/agents", age)
        ask(live, LONG, "old")
        page.goto(f"{live.url}/dashboard#agents")
        branches = page.get_by_role("button", name="1 branch of old")
        turns = branches.locator("xpath=ancestor::tr").locator("[data-name=Turns]")
        turns.get_by_text("1", exact=True).wait_for()
        for n_turns in (2, 3):
            live.post("/v1/agents/old/chat/completions", GO_ON)
            turns.get_by_text(str(n_turns), exact=True).wait_for()
        page.get_by_role("button", name="Rewind old").click()
        assert page.get_by_label("Turns to keep, 0 to 3").input_value() == "2"
        page.keyboard.press("Escape")
        branches.click()
        dialog = page.get_by_role("dialog", name="Branches of old")
        assert dialog.locator("[data-name=Turns]").inner_text() == "3"


def test_errors_are_shown(browser, own):
    with watched(browser, own.url, allowed="400 (Bad Request)") as page:
        page.goto(f"{own.url}/dashboard#agents")
        page.get_by_role("button", name="Fork first").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("textbox").fill("clock")
        dialog.get_by_role("button", name="Fork").click()
        page.get_by_role("alert").get_by_text("Agent 'clock' already exists").wait_for()


def test_agents_are_filtered_sorted_and_paged(browser, serving):
    with serving() as live:
        ask(live, LONG, "zero")
        live.post("/v1/agents/zero/fork", {"ids": [f"copy-{n:02}" for n in range(30)]})
        ask(live, LONG, "zero")
        with watched(browser, live.url) as page:
            page.goto(f"{live.url}/dashboard#agents")
            page.get_by_text("Page 1 of 2").wait_for()
            names = page.locator("#agent-list tbody th strong")
            assert names.first.inner_text() == "zero"  # the last used
            page.get_by_label("Sort").select_option("id")
            assert names.first.inner_text() == "copy-00"
            page.get_by_role("button", name="Next").click()
            assert names.last.inner_text() == "zero"
            page.get_by_label("Filter").last.fill("Y-2")
            assert names.all_inner_texts() == [f"copy-{n}" for n in range(20, 30)]
            page.get_by_label("Filter").last.fill("nobody")
            page.get_by_text("No agent matches").wait_for()
            page.get_by_label("Filter").last.fill("zero")
            page.get_by_role("button", name="1 branch of zero").click()
            assert "head" in page.get_by_role("dialog", name="Branches of zero").inner_text()


def test_an_agent_is_tried_in_a_chat(page, own):
    """A new one, then its second turn, which is warm."""
    page.get_by_label("Agent", exact=True).fill("tried")
    for turn in (1, 2):
        page.get_by_label("Message").fill(f"Turn {turn}. {LONG}")
        page.get_by_label("Message").press("Enter")
        wait_until(lambda turn=turn: len(agents(own).get("tried", {}).get("turns", [])) == turn)
        page.locator("#chat-send:enabled").wait_for()
    said = page.get_by_role("log", name="Conversation")
    assert said.locator("p").count() == 4
    assert said.locator(".text").last.inner_text()
    receipt = page.locator("#chat-receipt").inner_text()
    assert "prompt tokens warm" in receipt
    assert not receipt.startswith("0 of")
    page.get_by_role("button", name="Chat first").click()
    assert page.get_by_label("Agent", exact=True).input_value() == "first"
    assert page.locator("#chat-receipt").inner_text() == "", "it was of another agent"
    refused = 'data: {"error": {"message": "No such name."}}\n\n'
    page.route("**/chat/completions", lambda route: route.fulfill(body=refused))
    page.get_by_label("Agent", exact=True).fill("狐")  # no header could say it
    page.get_by_label("Message").fill("Hello.")
    with page.expect_request("**/chat/completions") as sent:
        page.get_by_label("Message").press("Enter")
    assert sent.value.post_data_json["keepwarm"] == {"agent": "狐"}
    page.get_by_text("No such name.").wait_for()


@pytest.mark.parametrize("named", ["another", None])
def test_an_agent_is_continued_by_its_own_model(page, own, named):
    """Not by the server's default; a new one by that, and one whose model has a new name."""

    def of_another_model(route):
        found = route.fetch().json()
        changes = {"model": "another", "is_served": bool(named)}
        found["data"] = [agent | changes for agent in found["data"]]
        route.fulfill(json=found)

    page.route("**/v1/dashboard/agents", of_another_model)
    page.reload()
    page.get_by_role("button", name="Chat first").click()
    page.route("**/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    sent = {}
    for agent in ("first", "unheard-of"):
        page.get_by_label("Agent", exact=True).fill(agent)
        page.get_by_label("Message").fill("Go on.")
        with page.expect_request("**/chat/completions") as asked:
            page.get_by_label("Message").press("Enter")
        sent[agent] = asked.value.post_data_json.get("model")
        page.locator("#chat-send:enabled").wait_for()
    assert sent == {"first": named, "unheard-of": None}


COMPOSED = """(init) => {
  const place = document.getElementById("chat-text");
  place.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, ...init }));
  return place.value;
}"""


def test_enter_that_chooses_a_word_sends_nothing(page):
    """As with an input method for Japanese. Then Enter sends."""
    page.route("**/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    page.get_by_label("Agent", exact=True).fill("fox")
    page.get_by_label("Message").fill("きつね")
    assert page.evaluate(COMPOSED, {"isComposing": True}) == "きつね"
    assert page.evaluate(COMPOSED, {"keyCode": 229}) == "きつね"
    assert page.evaluate(COMPOSED, {}) == ""
    page.locator("#chat-send:enabled").wait_for()


def test_an_old_list_does_not_make_an_agent_new_again(page, own):
    """It was asked for before the agent's first turn, and arrives after it."""
    held = []
    page.route("**/v1/dashboard/agents", lambda route: held.append((route, route.fetch())))
    ask(own, LONG, "other")
    wait_until(lambda: page.locator("#chat-send").is_enabled() and len(held) == 1)
    page.get_by_label("Agent", exact=True).fill("late")
    page.get_by_label("Message").fill(LONG)
    page.get_by_label("Message").press("Enter")
    page.locator("#chat-receipt:not(:empty)").wait_for()
    page.locator("#chat-send:enabled").wait_for()
    route, old = held[0]
    route.fulfill(response=old)
    wait_until(lambda: page.locator("#chat-send").is_enabled() and len(held) == 2)
    page.get_by_label("Message").fill("Go on.")
    with page.expect_request("**/chat/completions") as sent:
        page.get_by_label("Message").press("Enter")
    assert sent.value.url == f"{own.url}/v1/agents/late/chat/completions"
    assert sent.value.post_data_json["model"] == "tiny"
    page.locator("#chat-send:enabled").wait_for()


def test_thoughts_are_shown_and_the_chat_is_stopped(browser, thinking):
    """The model thinks and never ends by itself."""
    ends = thinking.host.engine.model.tokenizer.eos_token_ids

    def endless(route):
        bias = {str(end): -100 for end in ends}
        body = {**route.request.post_data_json, "logit_bias": bias, "max_tokens": 12000}
        route.continue_(post_data=json.dumps(body))

    with watched(browser, thinking.url) as page:
        page.route("**/chat/completions", endless)
        page.goto(f"{thinking.url}/dashboard#agents")
        page.get_by_label("Agent", exact=True).fill("thinker")
        page.get_by_label("Message").fill(LONG)
        page.get_by_label("Message").press("Enter")
        page.locator("#chat-said .thought:not(:empty)").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.locator("#chat-send:enabled").wait_for()
        assert page.get_by_role("alert").inner_text() == ""
    wait_until(lambda: not thinking.get("/v1/dashboard/now").json()["running"])
    ended = thinking.get("/v1/dashboard/requests").json()["data"][0]
    assert (ended["agent"], ended["state"]) == ("thinker", "cancelled")
