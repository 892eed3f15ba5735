"""Any prefix as one file: an agent's first tokens or turns, or a prompt without a name."""

import errno
import re
import shutil
from dataclasses import replace

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.bundle import MANIFEST, Manifest, manifest_in, write_archive
from keepwarm.agents.rewriting import prefix_blocks, prefix_records, trimmed
from keepwarm.agents.shares import AgentLimits
from keepwarm.cache.restore.records import block_of, records_of
from keepwarm.cache.store import Budgets, Store
from keepwarm.errors import (
    BadCacheFile,
    BadInput,
    InsufficientResources,
    KeepwarmError,
    StoreFailed,
)
from keepwarm.kv.layout import probe
from keepwarm.kv.slices import cut_blocks
from keepwarm.prefix.blocks import block_key, chain, pack
from keepwarm.prefix.fingerprint import FORMAT_VERSION
from keepwarm.records.record import Part, encode_record
from keepwarm.store.disk.disk import INDEX_ROOM, DiskLimits
from tests.agents.test_agents import IDENTITY, LIMITS, NAME, holds_tokens, turn
from tests.kit.compare import assert_same
from tests.kit.runs import cold, continue_from, prefill, prompt_of
from tests.store.kit import BrokenFiles, record, tokens_of


@pytest.fixture
def disk_store(tmp_path):
    with AgentStore(tmp_path / "store", LIMITS) as opened:
        opened.register(IDENTITY)
        yield opened


@pytest.fixture
def other(tmp_path):
    with AgentStore(tmp_path / "other", LIMITS) as opened:
        yield opened


@pytest.mark.parametrize("n_tokens", [1, 256, 257, 768])
def test_the_first_tokens_travel_and_no_later_one(n_tokens, disk_store, other, tmp_path):
    """A bundle of a prefix tells nothing of what was said after it."""
    tokens, bundle = tokens_of(768), tmp_path / "a.kw"
    turn(disk_store, "a", tokens[:320])
    turn(disk_store, "a", tokens)
    disk_store.export_agent(disk_store.find("a", n_tokens), bundle)
    made = other.import_agent(bundle, IDENTITY)
    assert (made.n_tokens, other.tokens_of(made)) == (n_tokens, tokens[:n_tokens])
    assert made.turns == tuple(n for n in (320, 768) if n <= n_tokens)
    (tmp_path / "alone").mkdir()
    bundle.rename(tmp_path / "alone" / "a.kw")
    assert not holds_tokens(tmp_path / "alone", tokens[n_tokens:])
    assert [ref.key for ref in chain(made.namespace, tokens[:n_tokens])] == list(made.blocks)
    assert other.disk.have(made.blocks).keys() == set(made.blocks)


def test_a_turn_is_a_prefix(disk_store, other, tmp_path):
    tokens = tokens_of(700)
    turn(disk_store, "a", tokens[:300])
    turn(disk_store, "a", tokens)
    disk_store.export_agent(disk_store.find("a", turn=1), tmp_path / "a.kw")
    made = other.import_agent(tmp_path / "a.kw", IDENTITY, "b")
    assert (made.id, made.turns, other.tokens_of(made)) == ("b", (300,), tokens[:300])


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"n_tokens": 0}, "0 tokens were asked for"),
        ({"n_tokens": 701}, "700 are stored"),
        ({"turn": 2}, "there is no turn 2"),
        ({"turn": 0}, "there is no turn 0"),
    ],
)
def test_what_is_not_there_is_refused(wanted, says, disk_store):
    turn(disk_store, "a", tokens_of(700))
    with pytest.raises(BadInput, match=says):
        disk_store.find("a", **wanted)


def test_checkpoints_inside_blocks_travel(disk_store):
    """Those of this conversation, in every block; not those of others that part from it."""
    tokens = tokens_of(700)
    agent = turn(disk_store, "a", tokens)
    parts = [*tokens[:290], *tokens_of(10, seed=1)]
    states = [[*chain(NAME, t)][-1] for t in (tokens[:100], tokens[:300], parts)]
    for ref in states:
        disk_store.disk.put(record(ref, Part.STATE, namespace=NAME))
    held = prefix_blocks(disk_store.disk, NAME, pack(tokens), agent.blocks)
    inside = [(key, number) for key, number in held if key not in agent.blocks]
    assert sorted(inside) == sorted((ref.key, ref.number) for ref in states[:2])


def test_a_block_of_which_no_row_is_left_travels_as_its_tokens(disk_store):
    """The rows of a window and a state belong to its end, which is cut off; one record is left."""
    (ref,) = chain(NAME, tokens_of(200))
    for part, rows in ((Part.WINDOW, 8), (Part.STATE, None)):
        disk_store.disk.put(record(ref, part, w_rows=rows, namespace=NAME))
    packed = pack(tokens_of(100))
    held = prefix_blocks(disk_store.disk, NAME, packed, [ref.key])
    (left,) = prefix_records(disk_store.disk, held, packed)
    assert (left.header.tokens, left.header.w_rows, left.tensors) == (packed, 0, ())


def test_window_rows_are_left_out_where_none_of_a_narrower_window_are_left():
    (ref,) = chain(NAME, tokens_of(200))
    made = record(ref, Part.WINDOW, n_bytes=400, namespace=NAME)
    extra = {"first_rows": {"0": 0, "1": 168}, "w_rows": 200}
    made = replace(made, header=replace(made.header, extra=extra))
    assert trimmed(made, 168) is None
    assert trimmed(made, 200) is made


def test_a_block_that_goes_while_it_is_exported_is_missed(disk_store):
    """The only one of its agent: no bundle without it is called whole."""
    agent = turn(disk_store, "a", tokens_of(200))
    export = disk_store.export(agent)
    disk_store.disk.delete_all([agent.blocks[0]])
    with pytest.raises(BadCacheFile, match="evicted or deleted meanwhile"):
        list(export.pieces)


@pytest.mark.parametrize("first_gone", [0, 2])
def test_an_agent_of_which_blocks_were_evicted_is_not_exported_in_part(
    first_gone, disk_store, tmp_path
):
    agent = turn(disk_store, "a", tokens_of(700))
    for key in agent.blocks[first_gone:]:
        disk_store.disk.delete_all([key])
    with pytest.raises(BadCacheFile, match="so nothing was exported"):
        disk_store.export_agent("a", tmp_path / "a.kw")
    assert not (tmp_path / "a.kw").exists()


@pytest.mark.parametrize(
    ("agent_id", "says"),
    [(None, "already exists"), ("a", "already exists"), ("no id", "not an agent id")],
)
def test_a_bundle_under_a_name_that_cannot_be_is_refused_before_its_blocks_are_stored(
    agent_id, says, disk_store, other, tmp_path
):
    turn(disk_store, "a", tokens_of(700))
    disk_store.export_agent("a", tmp_path / "a.kw")
    other.import_agent(tmp_path / "a.kw", IDENTITY)
    before = sorted(block.key for block in other.disk.walk())
    with pytest.raises(BadInput, match=says):
        other.import_agent(tmp_path / "a.kw", IDENTITY, agent_id)
    assert sorted(block.key for block in other.disk.walk()) == before


def test_a_key_with_too_many_agents_takes_in_no_blocks(disk_store, other, tmp_path):
    turn(disk_store, "a", tokens_of(700))
    disk_store.export_agent("a", tmp_path / "a.kw")
    other.limit(AgentLimits(n_agents=0))
    with pytest.raises(BadInput, match="may have 0"):
        other.import_agent(tmp_path / "a.kw", IDENTITY)
    assert not list(other.disk.walk())


def test_work_is_told_as_it_is_done(disk_store, other, tmp_path):
    turn(disk_store, "a", tokens_of(700))
    told = []
    disk_store.export_agent("a", tmp_path / "a.kw", lambda *step: told.append(step))
    assert told == [(1, 3), (2, 3), (3, 3)]
    told.clear()
    other.import_agent(tmp_path / "a.kw", IDENTITY, progress=lambda *step: told.append(step))
    assert len(told) == 3
    assert told == sorted(told)
    assert told[-1][0] <= told[-1][1]
    told.clear()
    disk_store.agents.delete("a", lambda *step: told.append(step))
    assert told == [(3, 3)]


def test_a_bundle_with_a_newer_record_is_refused_as_such(disk_store, other, tmp_path, monkeypatch):
    turn(disk_store, "a", tokens_of(300))
    read = disk_store.disk.read

    def newer(*args, **options):
        made = read(*args, **options)
        return replace(made, header=replace(made.header, version=FORMAT_VERSION + 1))

    monkeypatch.setattr(disk_store.disk, "read", newer)
    disk_store.export_agent("a", tmp_path / "a.kw")
    with pytest.raises(BadCacheFile, match="made by a newer Keepwarm"):
        other.import_agent(tmp_path / "a.kw", IDENTITY)
    assert not list(other.disk.walk())


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_trimmed_rows_are_those_of_a_shorter_prompt(name, tiny_model):
    """Bit for bit what a cache of the first tokens holds."""
    model = tiny_model(name)
    prompt = prompt_of(200, seed=1)
    (whole,) = cut_blocks(prefill(model, make_prompt_cache(model), prompt), len(prompt))
    ref = next(chain(NAME, prompt))
    for made in records_of(NAME, ref, whole):
        first = trimmed(made, 150)
        if made.header.part is Part.STATE:
            assert first is None
            continue
        assert first.header.tokens == pack(prompt[:150])
        assert first.header.key == block_key(NAME, ref.parent, pack(prompt[:150]))
        held, kept = block_of(made), block_of(first)
        rows, left = (held.delta or held.window), (kept.delta or kept.window)
        for tensor in rows:
            n_left = left[tensor].shape[-2]
            assert n_left == rows[tensor].shape[-2] - 50
            assert (left[tensor].words == rows[tensor].words[..., :n_left, :]).all()


BUDGETS = Budgets(min_free_disk_bytes=0)
PROMPT = prompt_of(600, seed=3)
TURNS = (300, 600)


@pytest.fixture
def away(tmp_path):
    store = Store(tmp_path / "away", BUDGETS)
    yield store
    store.close()


def talk(store, restorer, model):
    """Two turns of an agent, each kept to its last token, as an engine does."""
    caches = make_prompt_cache(model)
    capture = restorer.open(PROMPT)
    for start, end in ((0, 256), (256, 300), (300, 512), (512, 600)):
        caches = prefill(model, caches, PROMPT[start:end])
        capture.capture(caches, end, checkpoint=end in TURNS)
    store.flush()
    for end in TURNS:
        store.on_disk.agents.advance("a", restorer.namespace, PROMPT[:end])


def bundle_of(tmp_path, model, whose="", **wanted):
    """What a store of its own exports of an agent."""
    home, file = Store(tmp_path / "home", BUDGETS), tmp_path / "a.kw"
    identity = replace(IDENTITY, salt=whose)
    talk(home, home.make_restorer(identity, probe(model, make_prompt_cache(model))), model)
    home.on_disk.export_agent(home.on_disk.find("a", **wanted), file)
    home.close()
    return file


def restorer_of(store, agent, model):
    """The restorer that finds an imported agent's blocks, as an engine makes it."""
    identity = store.on_disk.identity_of(agent.namespace)
    return store.make_restorer(identity, probe(model, make_prompt_cache(model)))


def assert_goes_on(restorer, model, n_restored, n_prompt):
    restored = restorer.restore(PROMPT[:n_prompt])
    assert restored.n_tokens == n_restored
    run = continue_from(model, restored.caches, PROMPT[n_restored:n_prompt], 3)
    assert_same(cold(model, PROMPT[:n_prompt], 3), run)


@pytest.mark.parametrize(
    ("name", "wanted", "n_restored", "n_prompt"),
    [
        ("gemma3_text", {"turn": 1}, 300, 500),
        ("gemma3_text", {"n_tokens": 400}, 400, 500),
        ("mamba2", {"n_tokens": 400}, 300, 500),
        ("mamba2", {}, 300, 310),
        ("llama", {}, 309, 310),
    ],
)
def test_an_imported_prefix_goes_on_there(
    name, wanted, n_restored, n_prompt, tiny_model, away, tmp_path
):
    """To its last token; with states, which cannot be cut, from the last one before.

    The whole agent too, and back: the checkpoints of all turns went along.
    """
    model = tiny_model(name)
    made = away.on_disk.import_agent(bundle_of(tmp_path, model, **wanted), IDENTITY)
    assert away.on_disk.tokens_of(made) == PROMPT[: made.n_tokens]
    restorer = restorer_of(away, made, model)
    if not wanted:
        assert restorer.restore([*PROMPT, 1, 2, 3]).n_tokens == 600
    assert_goes_on(restorer, model, n_restored, n_prompt)


def test_an_agent_of_states_alone_travels(tiny_model, away, tmp_path):
    """Blocks that hold nothing say their tokens, so that whoever looks finds the whole prompt."""
    model = tiny_model("mamba2")
    home, file = Store(tmp_path / "home", BUDGETS), tmp_path / "a.kw"
    restorer = home.make_restorer(IDENTITY, probe(model, make_prompt_cache(model)))
    restorer.open(PROMPT).finish(PROMPT, prefill(model, make_prompt_cache(model), PROMPT))
    home.flush()
    home.on_disk.agents.create("a", Branch.of(restorer.namespace, PROMPT))
    home.on_disk.export_agent("a", file)
    home.close()
    made = away.on_disk.import_agent(file, IDENTITY)
    assert away.on_disk.tokens_of(made) == PROMPT
    restorer = restorer_of(away, made, model)
    assert restorer.restore([*PROMPT, 1]).n_tokens == len(PROMPT)


@pytest.mark.parametrize(("theirs", "ours"), [("k-ada", "k-bob"), ("k-ada", "")])
def test_a_bundle_becomes_that_of_whoever_takes_it_in(theirs, ours, tiny_model, away, tmp_path):
    """An importer finds every block, by the agent's name; under either key alone nobody does."""
    model = tiny_model("llama")
    file = bundle_of(tmp_path, model, theirs)
    assert not theirs or theirs.encode() not in file.read_bytes()
    mine = replace(IDENTITY, salt=ours)
    layout = probe(model, make_prompt_cache(model))
    made = away.on_disk.import_agent(file, mine)
    assert away.on_disk.identity_of(made.namespace).salt == ours
    assert_goes_on(restorer_of(away, made, model), model, 599, 600)
    for key in (theirs, ours):
        restorer = away.make_restorer(replace(IDENTITY, salt=key), layout)
        assert restorer.plan(PROMPT).n_tokens == 0


def blocks_of(disk_store, name):
    """Blocks of 300 tokens, put under the names of one key."""
    made = [record(ref, namespace=name) for ref in chain(name, tokens_of(300))]
    for one in made:
        disk_store.disk.put(one)
    return made


def test_where_quantisation_starts_is_nobodys_name(disk_store, other, tmp_path):
    late = replace(IDENTITY, salt="ada exact to 500")
    name = disk_store.register(late)
    blocks_of(disk_store, name)
    disk_store.agents.advance("a", name, tokens_of(300))
    disk_store.export_agent("a", tmp_path / "a.kw")
    for refused in ("", "ada", "bob exact to 600"):
        with pytest.raises(BadCacheFile, match="quantized_kv_start differ"):
            other.import_agent(tmp_path / "a.kw", replace(IDENTITY, salt=refused))
    made = other.import_agent(tmp_path / "a.kw", replace(IDENTITY, salt="bob exact to 500"))
    assert other.tokens_of(made) == tokens_of(300)


def test_labels_and_the_name_of_the_model_travel(disk_store, other, tmp_path):
    """Of a directory only its last part; the importer calls the model as it does."""
    late = replace(IDENTITY, salt="ada")
    name = disk_store.register(late, "0a1b2c")
    blocks_of(disk_store, name)
    disk_store.agents.advance("ada.a", name, tokens_of(300), model="/home/of/somebody/tiny")
    disk_store.agents.update("ada.a", metadata={"team": "web", "note": "of the\ndemo"})
    disk_store.export_agent(disk_store.find("ada.a", 256), tmp_path / "a.kw")
    assert b"somebody" not in (tmp_path / "a.kw").read_bytes()
    said = manifest_in(tmp_path / "a.kw")
    assert (said.agent, said.model, said.revision) == ("a", "tiny", "0a1b2c")
    assert re.fullmatch("tiny, revision 0a1b2c, weights [0-9a-f]{32}", said.model_text)
    with pytest.raises(BadCacheFile, match=r"made with .tiny, revision 0a1b2c, weights"):
        other.import_agent(tmp_path / "a.kw", replace(IDENTITY, config="another"))
    made = other.import_agent(tmp_path / "a.kw", IDENTITY, model="here")
    assert (made.metadata, made.head.model) == ({"team": "web", "note": "of the\ndemo"}, "here")
    other.export_agent(made, tmp_path / "b.kw")
    assert manifest_in(tmp_path / "b.kw").revision == "0a1b2c"


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"metadata": {"n": 1}}, "a label or the name of its model is not text"),
        ({"metadata": {str(n): "" for n in range(17)}}, "at most 16 labels"),
        ({"model": "a\x1b[2Jb"}, "the name of its model is none"),
        ({"model": "a" * 201}, "the name of its model is none"),
    ],
)
def test_labels_and_names_of_strangers_are_checked_first(lies, says, disk_store, other, tmp_path):
    records = blocks_of(disk_store, NAME)
    said = Manifest(IDENTITY, pack(tokens_of(300)), ())
    forged(tmp_path / "a.kw", replace(said, **lies), records)
    with pytest.raises(KeepwarmError, match=says):
        other.import_agent(tmp_path / "a.kw", IDENTITY)
    assert not list(other.disk.walk())
    forged(tmp_path / "b.kw", said, records)
    assert other.import_agent(tmp_path / "b.kw", IDENTITY).n_tokens == 300


@pytest.mark.parametrize("extra", [{"codec": "q8"}, {"at_rest": "q4"}, {"codec": ["q8"]}])
def test_rounded_blocks_do_not_come_where_blocks_are_exact(extra, disk_store, other, tmp_path):
    records = blocks_of(disk_store, NAME)
    records[0] = replace(records[0], header=replace(records[0].header, extra=extra))
    forged(tmp_path / "a.kw", Manifest(IDENTITY, pack(tokens_of(300)), ()), records)
    with pytest.raises(BadCacheFile, match="its codec is not exact"):
        other.import_agent(tmp_path / "a.kw", IDENTITY)
    assert not list(other.disk.walk())


def forged(file, said, records):
    """A bundle by somebody who knows the format and tells lies."""
    keys = tuple(one.header.key.hex() for one in records)
    entries = {f"{one.header.key.hex()}.d.safetensors": encode_record(one) for one in records}
    write_file(file, {MANIFEST: [replace(said, blocks=keys).to_json()]} | entries)


def write_file(path, entries):
    path.write_bytes(b"".join(write_archive(entries.items())))


def test_nobody_brings_blocks_under_anothers_names(disk_store, other, tmp_path):
    """A bundle that says it is of one key and holds blocks of another's."""
    records = blocks_of(disk_store, disk_store.register(replace(IDENTITY, salt="victim")))
    forged(tmp_path / "a.kw", Manifest(IDENTITY, pack(tokens_of(300)), ()), records)
    with pytest.raises(BadCacheFile, match="does not follow"):
        other.import_agent(tmp_path / "a.kw", IDENTITY)
    assert not list(other.disk.walk())


def test_a_block_that_says_it_stands_elsewhere_is_refused(disk_store, other, tmp_path):
    """Its key does not cover its number; put at a wrong place it could never be restored."""
    first, second = blocks_of(disk_store, NAME)
    moved = replace(second, header=replace(second.header, number=7))
    forged(tmp_path / "a.kw", Manifest(IDENTITY, pack(tokens_of(300)), ()), [first, moved])
    with pytest.raises(BadCacheFile, match="does not follow"):
        other.import_agent(tmp_path / "a.kw", IDENTITY)


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"tokens": pack(tokens_of(300, seed=1))}, "do not match its tokens"),
        ({"turns": ("x",)}, "turn in it"),
        ({"turns": (-1,)}, "turn in it"),
        ({"agent": 7}, "agent id is not text"),
    ],
)
def test_a_bundle_whose_manifest_lies_is_refused(lies, says, disk_store, other, tmp_path):
    told = {"identity": IDENTITY, "tokens": pack(tokens_of(300)), "blocks": (), **lies}
    forged(tmp_path / "a.kw", Manifest(**told), blocks_of(disk_store, NAME))
    with pytest.raises(BadCacheFile, match=says):
        other.import_agent(tmp_path / "a.kw", IDENTITY)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [(b"[" * 100_000, "recursion"), (b"[]", "must be"), (b"{}", "version"), (b"\xff", "decode")],
)
def test_a_manifest_that_is_none_is_refused(manifest, says, other, tmp_path):
    write_file(tmp_path / "a.kw", {MANIFEST: [manifest]})
    with pytest.raises(BadCacheFile, match=says):
        other.import_agent(tmp_path / "a.kw", IDENTITY)


def test_a_manifest_of_many_items_is_not_parsed(other, tmp_path):
    """Sixty megabytes of empty lists would take two gigabytes of memory."""
    manifest = b"[" + b"[]," * (1 << 18) + b"[]]"
    write_file(tmp_path / "a.kw", {MANIFEST: [manifest]})
    with pytest.raises(BadCacheFile, match="manifest has more than 262144 items"):
        other.import_agent(tmp_path / "a.kw", IDENTITY)


def test_an_agents_name_loses_the_key_in_front(disk_store, other, tmp_path):
    name = disk_store.register(replace(IDENTITY, salt="0123"))
    blocks_of(disk_store, name)
    disk_store.agents.advance("0123.ada", name, tokens_of(300))
    disk_store.export_agent("0123.ada", tmp_path / "a.kw")
    assert b"0123" not in (tmp_path / "a.kw").read_bytes()[:4096]
    assert other.import_agent(tmp_path / "a.kw", IDENTITY).id == "ada"


@pytest.mark.parametrize("by", ["manifest", "file"])
def test_no_bundle_names_an_agent_of_an_api_key(by, disk_store, other, tmp_path):
    name = "0123456789abcdef." * 2 + "ada"
    file = tmp_path / ("a.kw" if by == "manifest" else f"{name}.kw")
    said = Manifest(IDENTITY, pack(tokens_of(300)), (), agent=name if by == "manifest" else "")
    forged(file, said, blocks_of(disk_store, NAME))
    assert other.import_agent(file, IDENTITY).id == "ada"


def test_what_has_no_rows_is_not_cut(disk_store, tmp_path):
    turn(disk_store, "a", tokens_of(188))
    with pytest.raises(BadCacheFile, match="cannot be cut"):
        disk_store.export_agent(disk_store.find("a", 100), tmp_path / "a.kw")
    assert not (tmp_path / "a.kw").exists()


def no_room(root):
    """Less of the disk is free than must be."""
    return DiskLimits(min_free_bytes=2 * shutil.disk_usage(root).total)


def room_for_some(root):
    """A cap that takes the first blocks and refuses the next."""
    del root
    return DiskLimits(max_bytes=INDEX_ROOM + (2 << 20), min_free_bytes=0)


@pytest.mark.parametrize("limits", [no_room, room_for_some], ids=lambda f: f.__name__)
def test_a_bundle_that_finds_no_room_makes_no_agent(limits, disk_store, tmp_path):
    """Whoever imports is told, instead of an agent whose blocks are not there."""
    tokens = tokens_of(2000)
    for ref in chain(NAME, tokens):
        disk_store.disk.put(record(ref, n_bytes=512 << 10, namespace=NAME))
    disk_store.agents.advance("a", NAME, tokens)
    disk_store.export_agent("a", tmp_path / "a.kw")
    with AgentStore(tmp_path / "small", limits(tmp_path)) as small:
        with pytest.raises(InsufficientResources, match="no room for all of it"):
            small.import_agent(tmp_path / "a.kw", IDENTITY)
        assert list(small.agents.all()) == []
        assert list(small.disk.walk()) == [], "no name would reach them"
        assert limits is room_for_some or not sum(small.wear.by_day().values())


def test_a_bundle_counts_as_written_today_and_needs_the_budget_for_it(disk_store, tmp_path):
    """Each time: a stranger's block does not take the place of an equal one."""
    turn(disk_store, "a", tokens_of(700))
    disk_store.export_agent("a", tmp_path / "a.kw")
    with AgentStore(tmp_path / "other", LIMITS, writes_per_day=2 * 3 * 2048) as spared:
        for number, name in enumerate(("a", "b"), start=1):
            assert spared.import_agent(tmp_path / "a.kw", IDENTITY, name).n_tokens == 700
            assert list(spared.wear.by_day().values()) == [number * 3 * 2048]
    with AgentStore(tmp_path / "spared", LIMITS, writes_per_day=3 * 2048 - 1) as spared:
        with pytest.raises(InsufficientResources, match="disk_writes_per_day"):
            spared.import_agent(tmp_path / "a.kw", IDENTITY)
        assert not list(spared.disk.walk())
        assert list(spared.agents.all()) == []


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"kv_options": {"kv_bits": [8]}}, "KV option in it is not a number"),
        ({"kv_options": 8}, "no attribute"),
        ({"salt": 8}, "not a complete bundle"),
    ],
)
def test_an_identity_that_is_none_is_refused(lies, says, tmp_path):
    said = Manifest(replace(IDENTITY, **lies), pack(tokens_of(300)), ())
    forged(tmp_path / "a.kw", said, [])
    with pytest.raises(BadCacheFile, match=says):
        manifest_in(tmp_path / "a.kw")


def test_a_bundle_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(BadCacheFile, match="cannot be read"):
        manifest_in(tmp_path / "missing.kw")


def test_a_disk_that_fails_under_an_import_makes_no_agent(disk_store, other, tmp_path):
    turn(disk_store, "a", tokens_of(700))
    disk_store.export_agent("a", tmp_path / "a.kw")
    other.disk.records.files = BrokenFiles()
    other.disk.records.files.break_(errno.EROFS, "publish")
    with pytest.raises(StoreFailed, match="could not save the bundle"):
        other.import_agent(tmp_path / "a.kw", IDENTITY)
    other.disk.records.files.mend()
    assert list(other.agents.all()) == []
    assert not list(other.disk.walk())
    assert not list(other.disk.scratch.path.glob("*.tmp"))
    assert other.disk.index.lookups.n_bytes() == 0
