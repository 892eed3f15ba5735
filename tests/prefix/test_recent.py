"""A miss is explained by the most similar earlier prompt."""

import random

import pytest

from keepwarm.prefix.recent import MissExplanation, NearestPrompt, RecentPrompts, StoredPrefix


def tokens_of(n, seed=0):
    return random.Random(seed).choices(range(50_000), k=n)


SYSTEM, FIRST, SECOND = tokens_of(40, 1), tokens_of(30, 2), tokens_of(30, 3)
EARLIER = [*SYSTEM, *FIRST, *SECOND]
CUTS = [40, 70, 100]


@pytest.fixture
def recent():
    recent = RecentPrompts()
    recent.remember("ours", EARLIER, CUTS)
    return recent


def test_nothing_like_it_was_seen(recent):
    prompt = tokens_of(50, 9)
    assert recent.explain("ours", prompt, restored=0) == MissExplanation("new", 0)


def test_the_opening_of_a_template_is_no_likeness(recent):
    prompt = [*SYSTEM[:5], *tokens_of(50, 9)]
    assert recent.explain("ours", prompt, restored=5) == MissExplanation("new", 5)


def test_a_prompt_that_goes_on_is_new_there(recent):
    """All that was seen was restored; what follows nobody could know."""
    prompt = [*EARLIER, *tokens_of(20, 9)]
    assert recent.explain("ours", prompt, restored=100) == MissExplanation("new", 100)


def test_an_edited_message_diverges_there(recent):
    prompt = [*SYSTEM, *FIRST[:10], 1, *FIRST[11:], *SECOND]
    found = recent.explain("ours", prompt, restored=50)
    assert found == MissExplanation("diverged", 50)


def test_what_was_the_same_further_on_was_evicted(recent):
    prompt = [*EARLIER, 5, 6]
    assert recent.explain("ours", prompt, restored=64) == MissExplanation("evicted", 100)
    assert recent.explain("ours", prompt, restored=0) == MissExplanation("evicted", 100)


def test_state_layers_go_back_to_a_cut_and_that_is_no_eviction(recent):
    prompt = [*SYSTEM, *FIRST[:10], 1, *FIRST[11:], *SECOND]

    def reason(restored):
        return recent.explain("ours", prompt, restored, StoredPrefix(has_rows=False)).reason

    assert reason(40) == "diverged"
    assert reason(0) == "evicted"


def test_what_a_cut_short_prompt_had_left_was_not_computed():
    """The same again, one that parts in what was not computed, and one that parts before."""
    recent = RecentPrompts()
    recent.remember("ours", EARLIER, CUTS, n_computed=64)

    def explained(prompt, restored):
        return recent.explain("ours", prompt, restored)

    assert explained(EARLIER, 64) == ("not computed", 64)
    assert explained([*EARLIER[:90], *tokens_of(20, 9)], 64) == ("not computed", 64)
    assert explained([*EARLIER[:50], *tokens_of(50, 9)], 50) == ("diverged", 50)
    assert explained(EARLIER, 32) == ("evicted", 64)
    recent.remember("ours", EARLIER, CUTS)
    assert explained(EARLIER, 64) == ("evicted", 100)


def test_what_is_stored_tells_of_prompts_that_nobody_remembers():
    prompt, nobody = EARLIER, RecentPrompts()

    def explained(restored, *stored):
        return nobody.explain("ours", prompt, restored, StoredPrefix(*stored))

    assert explained(64, 64, True) == ("diverged", 64)
    assert explained(64, 64, False) == ("new", 64)
    assert explained(8, 8, True) == ("new", 8), "the opening of a template"
    assert explained(10, 64, True, True) == ("no checkpoint", 64)
    assert explained(40, 64, True, True) == ("diverged", 64), "the larger part"
    assert explained(0, 100, False, True) == ("no checkpoint", 100)


def test_all_that_can_be_restored_is_no_miss(recent):
    """The last token is always fed."""
    assert recent.explain("ours", EARLIER, restored=99) is None


def test_nobody_learns_of_anothers_prompts(recent):
    """Same tokens, another tenant: as if nothing had been seen."""
    assert recent.nearest("theirs", EARLIER) == NearestPrompt(0, None)
    assert recent.explain("theirs", EARLIER, restored=0).reason == "new"


def test_the_nearest_of_many_is_found():
    recent = RecentPrompts()
    for n in (10, 70, 30, 69):
        recent.remember("ours", [*EARLIER[:n], 1, 2])
    found = recent.nearest("ours", EARLIER)
    assert found.n_common == 70
    assert found.entry.n_tokens == 72


def test_a_conversation_takes_one_place():
    recent = RecentPrompts()
    for n in (20, 40, 60):
        recent.remember("ours", EARLIER[:n])
    assert len(recent) == 1
    recent.remember("ours", [1, *EARLIER])
    assert len(recent) == 2


def test_memory_is_bounded_and_the_oldest_goes():
    recent = RecentPrompts(max_bytes=2 * 4 * 100)
    for seed in range(5):
        recent.remember("ours", tokens_of(40, seed))
    assert len(recent) == 2
    assert recent.nearest("ours", tokens_of(40, 4)).n_common == 40
    assert recent.nearest("ours", tokens_of(40, 0)).n_common == 0
    recent.remember("ours", tokens_of(101))
    assert len(recent) == 0


def test_prompts_as_characters_are_within_the_bound():
    recent = RecentPrompts(max_bytes=1000)
    for seed in range(50):
        recent.remember(f"owner {seed % 3}", [2**16 + token for token in tokens_of(20, seed)])
    texts = [text for owner in range(3) for text in recent.latest(f"owner {owner}")]
    assert 4 < len(texts) == len(recent)
    assert sum(8 * len(text) for text in texts) <= 1000  # packed, and four bytes a character


def test_the_latest_are_the_owners_own_and_the_latest_first():
    recent = RecentPrompts()
    for owner, tokens in (("ours", [1]), ("theirs", [2]), ("ours", [3]), ("ours", [1, 4])):
        recent.remember(owner, tokens)
    assert list(recent.latest("ours")) == ["\x01\x04", "\x03"]
    assert list(recent.latest("theirs")) == ["\x02"]
    assert not list(recent.latest("nobody"))
    recent.clear()
    assert not list(recent.latest("ours"))


def test_owners_without_prompts_are_forgotten():
    recent = RecentPrompts(max_bytes=8 * 100)
    for number in range(50):
        recent.remember(number, tokens_of(40, number))
    assert list(recent._seen) == [48, 49]
