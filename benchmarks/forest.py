"""Records the dashboard's forest while ten agents start: python -m benchmarks.forest [FILE]

They share a manual, and those of a team a page more. A tiny random model serves them: what is drawn
does not depend on it. The browser's pictures are put together as they came, in the time `LASTS_S`.
Under a minute; needs Chromium.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import N_CONTEXT, Live, serve
from tests.server.dashboard.browsers import chromium, watched

from keepwarm import config
from keepwarm.models.load import load

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "images" / "forest.webp"
TEAMS = {
    "docs/sharing.md": ("planner", "coder", "reviewer", "tester"),
    "docs/serving.md": ("keeper", "engineer", "clerk", "pilot"),
    "docs/tuning.md": ("writer", "reader"),
}
MANUAL = "docs/operations.md"
N_MANUAL, N_RULES, N_TASK = 3600, 1800, 1500  # characters; the model has a token for each or two
LASTS_S = 12.0
SIZE = {"width": 860, "height": 640}
MOST_FRAMES = 70
CORNER = (20, 5)  # a pixel where nothing is drawn
END_S = 3.0  # that the end is shown
PATIENCE_MS = 600_000


class Frame(NamedTuple):
    at_s: float
    picture: bytes  # PNG


def prompts() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """What each agent is sent: the manual, the page of its team, and a task of its own."""
    manual = (ROOT / MANUAL).read_text()[:N_MANUAL]
    for page, agents in TEAMS.items():
        text = (ROOT / page).read_text()
        system = {"role": "system", "content": manual + text[:N_RULES]}
        for number, agent in enumerate(agents, 1):
            task = text[N_RULES + number * N_TASK // 3 :][:N_TASK]
            yield agent, [system, {"role": "user", "content": f"You are the {agent}. {task}"}]


def start(live: Live, agent: str, messages: Sequence[dict[str, str]]) -> threading.Thread:
    body = {"messages": messages, "max_tokens": 8}
    headers = {"X-Keepwarm-Agent": agent}
    path = "/v1/chat/completions"
    thread = threading.Thread(target=live.post, args=(path, body), kwargs=headers)
    thread.start()
    return thread


def record(live: Live, page: Any) -> Iterator[Frame]:
    """Pictures of the forest until all have answered, and one of its rest."""
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{live.url}/dashboard#forest")
    page.locator("#trees[data-scale]").wait_for()
    began = time.monotonic()
    threads = [start(live, *prompt) for prompt in prompts()]
    while any(thread.is_alive() for thread in threads):
        yield Frame(time.monotonic() - began, page.locator("#trees").screenshot())
    page.locator("#trees[data-lit='0'][data-names='10']").wait_for()
    yield Frame(time.monotonic() - began, page.locator("#trees").screenshot())


def write(frames: Sequence[Frame], file: Path) -> None:
    """One animated picture, as high as the highest frame."""
    frames = [*frames[: -1 : -(-len(frames) // MOST_FRAMES)], frames[-1]]
    pictures = [Image.open(io.BytesIO(frame.picture)).convert("RGB") for frame in frames]
    size = max(picture.size for picture in pictures)
    pages = [Image.new("RGB", size, picture.getpixel(CORNER)) for picture in pictures]
    for page, picture in zip(pages, pictures, strict=True):
        page.paste(picture)
    shown = [1000 * LASTS_S * frame.at_s / frames[-1].at_s for frame in frames]
    lasting = [round(b - a) for a, b in itertools.pairwise(shown)]
    first, *others = pages
    duration = [*lasting, round(1000 * END_S)]
    first.save(file, save_all=True, append_images=others, duration=duration, loop=0, quality=60)


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="keepwarm-forest-") as home:
        settings = config.load({"KEEPWARM_HOME": home})
        model = load(str(write_checkpoint(Path(home, "tiny"), n_context=N_CONTEXT)), settings)
        with (
            serve(model, settings) as live,
            chromium() as browser,
            watched(browser, live.url, viewport=SIZE) as page,
        ):
            frames = list(record(live, page))
    write(frames, file)
    print(f"{file}: {len(frames)} frames of {frames[-1].at_s:.0f} s, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
