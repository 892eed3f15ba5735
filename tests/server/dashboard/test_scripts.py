"""Functions of the dashboard's scripts, called in Chromium."""

import pytest

from keepwarm.units import format_bytes
from tests.server.dashboard.browsers import watched


@pytest.fixture(scope="module")
def page(browser, live):
    with watched(browser, live.url) as found:
        found.goto(f"{live.url}/dashboard")
        yield found


SAME, NINE, TEN = {"kind": "same"}, {"kind": "del", "text": "nine"}, {"kind": "ins", "text": "ten"}
TREE = "[[null, 0, 2], [0, 2, 1], [1, 3, 4], [0, 2, 3], [null, 0, 9]]"
RUNS = f"{TREE}.map(([parent, first_block, blocks]) => ({{parent, first_block, blocks}}))"


CALLS = {
    "diff.diff('at nine we', 'at ten we')": [
        SAME | {"text": "at "},
        NINE,
        TEN,
        SAME | {"text": " we"},
    ],
    "diff.diff('', 'ten')": [TEN],
    "diff.diff('nine', '')": [NINE],
    "format.seconds(0.25)": "250\u00a0ms",
    "format.seconds(3725)": "1\u00a0h\u00a02\u00a0min",
    "format.saved(0.25)": "250\u00a0ms",
    "format.saved(null)": "unknown",
    "[null, 250].map(format.spared)": ["time saved unknown", "saved\u00a0250\u00a0ms"],
    "[8, 13].map((most) => format.cut('Mend the test', most))": ["Mend th…", "Mend the test"],
    "format.ago(100, 7400)": "2\u00a0h ago",
    "format.bytes(1536)": "1.5\u00a0KiB",
    "format.percent(1, 8)": "13\u00a0%",
    "[0, 0.05, 2.5, 3, 12.4, 12345].map(format.short)": ["0", "0.05", "2.5", "3", "12", "12.3k"],
    f"trees.arrange({RUNS}).placed.map((one) => one.row)": [0, 0, 0, 1, 2],
    f"trees.neighbour(trees.arrange({RUNS}).placed, 2, 'ArrowDown')": 3,
    f"trees.neighbour(trees.arrange({RUNS}).placed, 3, 'ArrowLeft')": 0,
    f"trees.neighbour(trees.arrange({RUNS}).placed, 4, 'ArrowDown')": 4,
}


def test_small_things(page):
    imports = (
        f"{name} = await import('/dashboard/{name}.js')" for name in ("diff", "format", "trees")
    )
    script = f"async () => {{ const {', '.join(imports)}; return [{', '.join(CALLS)}]; }}"
    assert dict(zip(CALLS, page.evaluate(script), strict=True)) == CALLS


SIZES = [0, 1023, 1024, 98_362_432, 200 << 20, 20 << 30, 5 << 50]


def test_sizes_are_those_of_the_command_line(page):
    script = f"async () => {SIZES}.map((await import('/dashboard/format.js')).bytes)"
    sizes = [size.replace("\u00a0", " ") for size in page.evaluate(script)]
    assert sizes == list(map(format_bytes, SIZES))


TICKS = """async (values) => {
  const { columns, lines } = await import('/dashboard/charts.js');
  const { short } = await import('/dashboard/format.js');
  const points = values.map((value) => ({ at: 0, value }));
  const series = [{ name: "any", kind: "any", value: (point) => point.value }];
  return [columns, lines].map((draw) => [...draw(points, series, short, "Any")
    .querySelectorAll("text[text-anchor=end]")].map((mark) => mark.textContent));
}"""


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.04, 0], ["0", "0.02", "0.04"]),
        ([0.3, 0.1], ["0", "0.2", "0.4"]),
        ([0.7], ["0", "0.5", "1"]),
        ([4.2], ["0", "5", "10"]),
        ([1, 0], ["0", "1", "2"]),  # counts
        ([3, 1], ["0", "2", "4"]),
        ([5], ["0", "5", "10"]),
        ([150], ["0", "100", "200"]),
    ],
)
def test_an_axis_is_marked_with_the_values_at_its_marks(page, values, ticks):
    """The middle is half of the top, and no count is a fraction."""
    assert page.evaluate(TICKS, values) == [ticks, ticks]


def test_one_value_does_not_flatten_the_others(page):
    _, ticks = page.evaluate(TICKS, [0.2, 0.3, 0.4, 90])
    assert ticks == ["0.1", "1", "10", "100"]


ROWS = """async () => {
  const { h, put, table } = await import('/dashboard/dom.js');
  const columns = [{ name: "Name" }, { name: "Number" }];
  const place = h("div");
  const show = (...rows) => put(place, table("Any", columns, rows));
  show(["a", "1"], ["b", "2"], ["c", "3"]);
  const before = [...place.querySelectorAll("tbody tr")];
  const cell = before[0].cells[1].firstChild;
  show(["new", "0"], ["a", "1"], ["c", "4"]);
  const after = [...place.querySelectorAll("tbody tr")];
  const stayed = after.map((row) => before.indexOf(row));
  return [stayed, after.map((row) => row.textContent), after[1].cells[1].firstChild === cell];
}"""


def test_unchanged_rows_are_kept(page):
    """An update replaces only cells that changed."""
    assert page.evaluate(ROWS) == [[-1, 0, 2], ["new0", "a1", "c4"], True]


COLUMNS = """async () => {
  const { h, put, table } = await import('/dashboard/dom.js');
  const place = h("div");
  const show = (...names) => {
    const columns = names.map((name) => ({ name }));
    put(place, table("Any", columns, [names.map((_, index) => `${index}`)]));
    const texts = ({ cells }) => [...cells].map((cell) => cell.textContent);
    return [...place.querySelectorAll("tr")].map(texts);
  };
  return [show("Time", "disk"), show("Time", "shared", "disk"), show("Time", "disk")];
}"""


def test_a_table_whose_columns_come_and_go_is_drawn_anew(page):
    """Every figure stands under its own heading."""
    few, more = [["Time", "disk"], ["0", "1"]], [["Time", "shared", "disk"], ["0", "1", "2"]]
    assert page.evaluate(COLUMNS) == [few, more, few]


DRAFTS = """async () => {
  const { show } = await import('/dashboard/now.js?alone');
  const at = (time, generated, accepted) => show({ time, models: [{ name: 'm', loaded: true }],
    running: [], others: {}, memory: null, prefilled_tokens: 0,
    generated_tokens: generated, accepted_tokens: accepted });
  const said = () => document.getElementById('now-tiles').children[1].textContent;
  at(1000, 10, 0); at(1001, 20, 0);
  const without = said();
  at(1002, 110, 50);
  const drafted = said();
  at(2000, 9999, 50);
  return [without, drafted, said()];
}"""


def test_the_tokens_that_came_from_drafts_are_named_where_there_are_any(page):
    without, drafted, slept = page.evaluate(DRAFTS)
    assert without.endswith("tokens/s now")
    assert drafted.endswith("tokens/s now, 50 % from drafts")
    assert slept == "Decode\u2013tokens/s now", "what was made while the tab slept is not of now"


LEAFED = """async () => {
  const { byId, h, pages } = await import('/dashboard/dom.js');
  document.body.append(h("div", { id: "leafed" }));
  const turn = (to) => pages("leafed", to, 3, turn);
  turn(0);
  const press = (name) => {
    const buttons = [...byId("leafed").querySelectorAll("button")];
    const button = buttons.find((one) => one.textContent === name);
    button.focus();
    button.click();
    return document.activeElement.textContent;
  };
  return ["Next", "Next", "Previous", "Previous"].map(press);
}"""


def test_who_leafs_by_keyboard_keeps_the_focus(page):
    """On the button that was pressed, or on the other one where that can go no further."""
    assert page.evaluate(LEAFED) == ["Next", "Previous", "Previous", "Next"]
