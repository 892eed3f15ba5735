"""What a look-up finds of windows of 1,024 tokens, in twelve requests to a bucket."""

from collections import Counter
from itertools import product

import pytest

from keepwarm.cache.restore.plan import Needs
from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockRef, block_key, chain, pack
from keepwarm.records.record import Part, encode_record
from keepwarm.remote.health import RemoteSpeed
from keepwarm.remote.lookup import MAX_REQUESTS, Finder, KnownRecords
from keepwarm.remote.records import RemoteNames, RemoteRecord
from keepwarm.store.tier import RemoteLookup
from keepwarm.store.tiers import Tiers
from tests.kit.restorers import planner_over
from tests.remote.conftest import CLASS, SOON
from tests.remote.test_lookup import N_BLOCKS, REFS, STORED, CountedDirectory
from tests.store.kit import NAMESPACE, record, root_key, tokens_of

OTHER = tokens_of((N_BLOCKS + 1) * BLOCK_TOKENS - 60, seed=1)
WINDOW = 1024
NAMES = RemoteNames(CLASS)
NEEDS = {
    "windows": Needs(True, WINDOW, False),
    "only windows": Needs(False, WINDOW, False),
    "wide windows": Needs(True, 4 * WINDOW, False),
}


class Asked:
    """A directory that is asked as a bucket is, by a machine that knows nothing of it yet."""

    def __init__(self, path, cipher=None):
        path.mkdir()
        self._cipher = cipher
        self.seen = Counter()
        self.place = CountedDirectory(path, self.seen)

    def put(self, ref, part=Part.DELTA, w_rows=None):
        """With one byte a row for K, and one for V."""
        n_bytes = 2 * (ref.n_tokens if w_rows is None else w_rows)
        made = record(ref, part, n_bytes, w_rows)
        name = NAMES.of(RemoteRecord.of(made.header))
        assert self.place.put(name, encode_record(made, self._cipher), SOON)

    def put_window(self, n_tokens, first_rows=BLOCK_TOKENS, model="windows"):
        """What restores the stored prompt at a point, beside the rows of whole blocks."""
        numbers = NEEDS[model].window_blocks(n_tokens)
        for number in range(numbers.start, n_tokens // BLOCK_TOKENS):
            self.put(REFS[number], Part.WINDOW, first_rows if number == numbers.start else None)
        n_whole, n_open = divmod(n_tokens, BLOCK_TOKENS)
        if n_open:
            ref = REFS[n_whole]
            tokens = pack(STORED[n_whole * BLOCK_TOKENS : n_tokens])
            key = block_key(NAMESPACE, ref.parent, tokens)
            for part in (Part.DELTA, Part.WINDOW):
                self.put(BlockRef(key, ref.parent, n_whole, tokens), part)

    def lose_window(self, number):
        name = NAMES.of(RemoteRecord.of(record(REFS[number], Part.WINDOW).header))
        self.place.delete([name], SOON)

    def restorable(self, n_common, model="windows", n_requests=MAX_REQUESTS):
        """How much is planned to be restored of a prompt that shares so many tokens."""
        tokens, known, needs = [*STORED[:n_common], *OTHER[n_common:]], KnownRecords(), NEEDS[model]
        refs = list(chain(NAMESPACE, tokens))
        planner = planner_over(Tiers([("shared", known)]), needs)
        n_window = needs.window // BLOCK_TOKENS + 1
        finder = Finder(self.place, NAMES, known, RemoteSpeed())
        self.seen.clear()
        finder.find(
            RemoteLookup(
                NAMESPACE, refs, len(refs) - 1, 0, needs.delta, n_window, has_states=False
            ),
            CallDeadline(SOON),
        )
        assert 0 < sum(self.seen.values()) <= n_requests, (n_common, self.seen)
        return planner.plan(tokens).n_tokens


@pytest.fixture
def asked(tmp_path):
    """With the rows of the stored prompt."""
    made = Asked(tmp_path / "place")
    for ref in REFS:
        made.put(ref)
    return made


EDGES = {*range(8), *range(96, 106), 194, 195, 196, 197, *range(N_BLOCKS - 7, N_BLOCKS + 1)}


@pytest.mark.parametrize("model", NEEDS)
@pytest.mark.parametrize(
    "numbers",
    [sorted(EDGES), pytest.param(range(N_BLOCKS + 1), marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_whole_windows_are_found_wherever_a_prompt_parts(tmp_path, model, numbers):
    asked = Asked(tmp_path / "place")
    parts = (Part.DELTA, Part.WINDOW) if NEEDS[model].delta else (Part.WINDOW,)
    for ref, part in product(REFS, parts):
        asked.put(ref, part)
    for number in numbers:
        for n_tokens in (256 * number, 256 * number + 100):
            assert asked.restorable(n_tokens, model) >= 256 * number


@pytest.mark.parametrize("n_tokens", [256 * 3 + 7, 256 * 101 + 90, 256 * 196 + 100, 256 * 387 + 5])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_conversation_goes_on_inside_a_block(asked, n_tokens, is_long):
    """After a long answer the window begins inside a block too."""
    n_before = max(0, n_tokens - WINDOW) % BLOCK_TOKENS if is_long else 0
    asked.put_window(n_tokens, BLOCK_TOKENS - n_before)
    assert asked.restorable(n_tokens) == n_tokens


@pytest.mark.parametrize("number", [4, 100, 196, 388])
def test_the_end_of_the_block_before_is_found(asked, number):
    """A prompt that parts a block after the point; two blocks after it there is nothing."""
    asked.put_window(256 * number)
    assert asked.restorable(256 * number) == 256 * number
    assert asked.restorable(256 * (number + 1)) == 256 * number
    assert asked.restorable(256 * (number + 2)) == 0


@pytest.mark.parametrize("n_before", [1, 2, 3])
def test_a_window_that_begins_later_is_not_presumed(asked, n_before):
    asked.put_window(256 * 200)
    assert asked.restorable(256 * (200 - n_before)) == 0


def test_the_last_block_must_have_rows_too(tmp_path):
    """Without other rows every block has a record, perhaps with none."""
    asked = Asked(tmp_path / "place")
    for ref in REFS:
        asked.put(ref, Part.WINDOW, BLOCK_TOKENS if 190 <= ref.number < 196 else 0)
    assert asked.restorable(256 * 196, "only windows") == 256 * 196
    assert asked.restorable(256 * 198, "only windows") == 0


def test_the_first_blocks_of_all_prompts_are_not_listed(asked):
    """They may be many, and what follows some block tells more."""
    asked.put_window(256 * 150)
    assert asked.restorable(256 * 150) == 256 * 150
    folders = {NAMES.folder(NAMESPACE, REFS[number].parent) for number in (149, 150)}
    assert set(asked.place.folders) > folders
    assert NAMES.folder(NAMESPACE, root_key()) not in asked.place.folders


def test_a_directory_is_asked_for_every_block_of_a_window(asked):
    """What is between the first and the last is presumed of a bucket only."""
    asked.put_window(256 * 196, model="wide windows")
    asked.lose_window(185)
    assert asked.restorable(256 * 196, "wide windows") == 256 * 196
    asked.place.is_distant = False
    assert asked.restorable(256 * 196, "wide windows", n_requests=40) == 0
