"""Encryption at rest: without the key a store reveals nothing, and nothing in it can be forged."""

import json
import logging
import shutil
import struct
import subprocess
import sys
from base64 import b64decode, b64encode
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm import config
from keepwarm.agents.agent import Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.store import Budgets, Store
from keepwarm.cli.main import main
from keepwarm.errors import BadInput, BadRecord
from keepwarm.kv.layout import probe
from keepwarm.prefix.blocks import BlockKey, chain, pack
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.records.cipher import Cipher, stored_namespace
from keepwarm.records.record import (
    Part,
    Record,
    check_identity,
    encode_record,
    open_record,
    read_tensors,
)
from keepwarm.store.disk import maintenance
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.marker import derive_key, unlock
from keepwarm.store.names import SEALED
from tests.kit.checkpoints import write_checkpoint
from tests.kit.compare import assert_same
from tests.kit.runs import cold, continue_from, prefill, prompt_of
from tests.store.kit import chain_of, content, files_under, keys_of, record, refs_of, tokens_of

GOLDEN = Path(__file__).parents[1] / "data" / "format" / "v1"
KEY = b64encode(bytes(range(32))).decode()
OTHER_KEY = b64encode(bytes(32)).decode()
PASSPHRASE = "correct horse battery staple"
IDENTITY = Identity(weights={"model": "1"}, config="2", tokenizer="3", layout="4")
LIMITS = DiskLimits(min_free_bytes=0)
AGENT = "quillfeather-the-coder"
BUDGETS = Budgets(disk_bytes=None, min_free_disk_bytes=0)


def open_sealed(root, secret=KEY, **options):
    return DiskTier(root, LIMITS, cipher=unlock(root, secret), **options)


@pytest.fixture
def sealed(tmp_path):
    tier = open_sealed(tmp_path / "store")
    yield tier
    tier.close()


def tree(root):
    """Every file and its bytes, without lock files."""
    ours = [p for p in files_under(root) if p.parent.name != "tmp" and p.name[-4:] != "-shm"]
    return {path.relative_to(root): path.read_bytes() for path in ours}


# The cipher itself


def test_what_is_sealed_opens_under_its_name_only():
    cipher = Cipher(bytes(range(32)))
    sealed = cipher.seal(b"name", memoryview(b"rows"))
    assert cipher.open(b"name", sealed) == b"rows"
    with pytest.raises(BadRecord):
        cipher.open(b"other", sealed)
    with pytest.raises(BadRecord):
        Cipher(bytes(32)).open(b"name", sealed)
    for at in range(len(sealed)):
        bad = bytearray(sealed)
        bad[at] ^= 1
        with pytest.raises(BadRecord):
            cipher.open(b"name", bad)
    for n in range(len(sealed)):
        with pytest.raises(BadRecord):
            cipher.open(b"name", sealed[:n])


def test_hidden_names_depend_on_key_kind_and_value():
    one, other = Cipher(bytes(range(32))), Cipher(bytes(32))
    names = [one.hidden("a", b"x"), one.hidden("a", b"y"), one.hidden("b", b"x")]
    assert len({*names, other.hidden("a", b"x")}) == 4
    assert names[0] == Cipher(bytes(range(32))).hidden("a", b"x")


def test_a_key_is_base64_of_32_bytes_and_anything_else_a_passphrase():
    fast = {"n": 2, "r": 8, "p": 1}
    raw = bytes(range(224, 256))
    for spelled in (b64encode(raw), b64encode(raw, altchars=b"-_")):
        assert derive_key(spelled.decode(), b"salt", fast) == raw
    assert derive_key(PASSPHRASE, b"salt", fast) != derive_key(PASSPHRASE, b"pepper", fast)
    assert len(derive_key(PASSPHRASE, b"salt", fast)) == 32
    with pytest.raises(BadInput, match="shorter than 12") as said:
        derive_key("hunter2", b"salt", fast)
    assert "hunter2" not in str(said.value)


# Records


def nonces_of(path):
    """The nonces in one sealed file, of its header and of each tensor."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + n])
    yield b64decode(head.pop("__metadata__")["sealed"])[:12]
    for entry in head.values():
        at = 8 + n + entry["data_offsets"][0]
        yield data[at : at + 12]


def test_no_nonce_is_used_twice_even_for_the_same_record(sealed):
    made = chain_of(8)
    seen = []
    for _ in range(3):
        for each in made:
            assert sealed.put(each).stored
            seen += nonces_of(sealed.records.path_of(each.header.key, Part.DELTA))
        for each in made:
            sealed.delete_all([each.header.key])
    assert len(set(seen)) == len(seen) == 3 * 8 * 3


def test_a_sealed_record_says_nothing_but_sizes():
    made = chain_of(1)[0]
    data = b"".join(encode_record(made, Cipher(bytes(range(32)))))
    (n,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + n])
    metadata = head.pop("__metadata__")
    assert list(metadata) == ["sealed"]
    assert list(head) == ["0", "1"]
    assert {(entry["dtype"], *entry["shape"]) for entry in head.values()} == {("U8", 512 + 28)}


@pytest.mark.parametrize("fault", ["flip", "truncate", "swap", "rename", "graft", "plain", "other"])
def test_a_fault_is_a_miss_and_its_neighbours_hit(fault, sealed):
    """Bytes changed, cut, exchanged, moved, mixed, unsealed or sealed with another key."""
    made = [record(ref) for ref in refs_of(4)]
    for each in made:
        sealed.put(each)
    paths = [sealed.records.path_of(key, Part.DELTA) for key in keys_of(made)]
    hurt = {"flip": [1], "truncate": [1], "graft": [1], "plain": [1], "other": [1],
            "swap": [1, 2], "rename": [1]}[fault]  # fmt: skip
    one, two = (path.read_bytes() for path in paths[1:3])
    damage = {
        "flip": lambda: paths[1].write_bytes(one[:-9] + bytes([one[-9] ^ 1]) + one[-8:]),
        "truncate": lambda: paths[1].write_bytes(one[:-1]),
        "swap": lambda: (paths[1].write_bytes(two), paths[2].write_bytes(one)),
        "rename": lambda: shutil.copy(paths[3], paths[1]),
        "graft": lambda: paths[1].write_bytes(one[:-540] + two[-540:]),
        "plain": lambda: paths[1].write_bytes(b"".join(encode_record(made[1]))),
        "other": lambda: paths[1].write_bytes(b"".join(encode_record(made[1], Cipher(bytes(32))))),
    }
    damage[fault]()
    for number, each in enumerate(made):
        found = sealed.read(each.header.key, Part.DELTA)
        assert (found is None) == (number in hurt), number
        assert found is None or content(found) == content(each)
    assert sealed.stats().quarantined == len(hurt)
    assert len([p for p in (sealed.root / "quarantine").iterdir() if p.suffix == ".why"]) == len(
        hurt
    )
    assert sealed.put(made[1]).stored, "a miss is computed and stored again"


def test_tensors_of_an_older_record_of_the_same_block_do_not_mix(sealed):
    """Same key, part, name, dtype and shape: the sealed header still tells them apart."""
    ref = refs_of(1)[0]
    old, new = record(ref), record(ref)
    path = sealed.records.path_of(ref.key, Part.DELTA)
    sealed.put(old)
    before = path.read_bytes()
    sealed.delete_all([ref.key])
    sealed.put(new)
    path.write_bytes(path.read_bytes()[:-540] + before[-540:])
    assert sealed.read(ref.key, Part.DELTA) is None


def test_every_flipped_byte_is_noticed():
    cipher = Cipher(bytes(range(32)))
    made = record(refs_of(1, n_last=4)[0], n_bytes=64)
    data = b"".join(encode_record(made, cipher))

    def read(data):
        opened = open_record(BytesIO(data), len(data), cipher)
        check_identity(opened.header, made.header.key, Part.DELTA)
        return read_tensors(BytesIO(data), opened)

    assert content(Record(made.header, read(data))) == content(made)
    for at in range(len(data)):
        with pytest.raises(BadRecord):
            read(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def test_the_golden_sealed_store_is_read(tmp_path):
    """Made by the first version that seals; every later one reads it."""
    golden = shutil.copytree(GOLDEN / "sealed", tmp_path / "store")
    expected = json.loads((GOLDEN / "expected.json").read_text())["delta"]
    with AgentStore(golden, LIMITS, secret=KEY) as disk_store:
        (agent,) = disk_store.agents.all()
        assert agent.id == "golden"
        assert disk_store.tokens_of(agent) == expected["tokens"]
        found = disk_store.disk.read(BlockKey(bytes.fromhex(expected["key"])), Part.DELTA)
    assert [t.name for t in found.tensors] == ["L0_B0_K", "L0_B0_V"]
    for tensor in found.tensors:
        assert bytes(tensor.data) == bytes(n % 251 for n in range(tensor.n_bytes))


# The index


def test_a_row_that_was_tampered_with_is_no_answer(sealed):
    made = [record(ref) for ref in (refs_of(1)[0], refs_of(1, seed=1)[0])]
    for each in made:
        sealed.put(each)
    rows = sealed.index.database.rows("SELECT key, tokens FROM tokens")
    for (key, _), (_, other) in zip(rows, reversed(rows), strict=True):
        sealed.index.database.execute(
            "UPDATE OR REPLACE tokens SET tokens = ? WHERE key = ?", (other, key)
        )
    assert sealed.children(made[0].header.parent, made[0].header.tokens) == []
    assert sealed.read(made[0].header.key, Part.DELTA) is not None


# Right and wrong keys


def test_without_the_right_key_nothing_is_listed_loaded_or_touched(tmp_path):
    root = tmp_path / "store"
    with AgentStore(root, LIMITS, secret=KEY) as disk_store:
        disk_store.disk.put(chain_of(1)[0])
        disk_store.agents.create(AGENT, Branch(disk_store.register(IDENTITY)))
    before = tree(root)
    with pytest.raises(BadInput, match="set KEEPWARM_ENCRYPTION_KEY, the key or @file"):
        AgentStore(root, LIMITS)
    with pytest.raises(BadInput, match="The key does not open the store") as said:
        AgentStore(root, LIMITS, secret=OTHER_KEY)
    assert OTHER_KEY not in str(said.value)
    assert tree(root) == before
    with AgentStore(root, LIMITS, secret=KEY) as disk_store:
        assert [agent.id for agent in disk_store.agents.all()] == [AGENT]
        assert disk_store.disk.stats().blocks == 1


def test_a_plain_store_is_not_opened_with_a_key(tmp_path):
    made = chain_of(1)[0]
    with AgentStore(tmp_path / "store", LIMITS) as disk_store:
        disk_store.disk.put(made)
    before = tree(tmp_path / "store")
    with pytest.raises(BadInput, match="is not encrypted; unset KEEPWARM_ENCRYPTION_KEY"):
        AgentStore(tmp_path / "store", LIMITS, secret=KEY)
    assert tree(tmp_path / "store") == before
    with AgentStore(tmp_path / "store", LIMITS) as disk_store:
        assert content(disk_store.disk.read(made.header.key, Part.DELTA)) == content(made)


def test_a_lost_marker_costs_no_record(tmp_path, caplog):
    """Opened as a plain store, nothing is quarantined; with the marker all is found again."""
    root = tmp_path / "store"
    made = chain_of(2)
    tier = open_sealed(root)
    for each in made:
        tier.put(each)
    tier.close()
    marker = (root / SEALED).read_bytes()
    for name in (SEALED, "index.sqlite"):
        (root / name).unlink()
    with pytest.raises(BadInput, match="is not encrypted"):
        open_sealed(root)
    with caplog.at_level(logging.WARNING):
        plain = DiskTier(root, LIMITS)
    assert plain.read(made[0].header.key, Part.DELTA) is None
    assert "it is encrypted, and no key is given" in caplog.text
    assert plain.stats().quarantined == plain.stats().blocks == 0
    plain.close()
    (root / SEALED).write_bytes(marker)
    tier = open_sealed(root)
    assert set(tier.have(keys_of(made))) == set(keys_of(made))
    tier.close()


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1}', "[]", '{"version": 2}'])
def test_a_damaged_or_newer_marker_is_one_sentence(text, tmp_path):
    unlock(tmp_path, KEY)
    (tmp_path / SEALED).write_text(text)
    with pytest.raises(BadInput, match=r"damaged|newer"):
        unlock(tmp_path, KEY)


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(BadInput, match=r"pip install 'keepwarm\[encryption\]'"):
        Cipher(bytes(32))


# Where the key comes from


def test_the_key_comes_from_the_environment_or_a_private_file(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    home = {"KEEPWARM_HOME": str(tmp_path)}
    assert config.load(home).read_secret("encryption_key") == ""
    by_file = config.load(home | {"KEEPWARM_ENCRYPTION_KEY": f"@{file}"})
    assert by_file.read_secret("encryption_key") == KEY
    given = config.load(home | {"KEEPWARM_ENCRYPTION_KEY": PASSPHRASE})
    assert given.read_secret("encryption_key") == PASSPHRASE
    assert PASSPHRASE not in repr(given)
    file.chmod(0o640)
    with pytest.raises(BadInput, match="chmod 600"):
        by_file.read_secret("encryption_key")
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(BadInput, match="is empty"):
        by_file.read_secret("encryption_key")
    file.unlink()
    with pytest.raises(BadInput, match="cannot be read"):
        by_file.read_secret("encryption_key")


def test_a_key_in_the_settings_file_is_refused_without_repeating_it(tmp_path):
    (tmp_path / "config.toml").write_text(f'encryption_key = "{KEY}"\n')
    with pytest.raises(BadInput, match='encryption_key = "@') as said:
        config.load({"KEEPWARM_HOME": str(tmp_path)})
    assert KEY not in str(said.value)


# All of it through a model


def spellings(tokens):
    """Runs of token ids as bytes of either order, in base64, in hex and as JSON."""
    for at in range(0, len(tokens) - 8, 64):
        run = tokens[at : at + 8]
        big, little = pack(run), b"".join(t.to_bytes(4, "little") for t in run)
        yield from (big, little, big.hex().encode(), little.hex().encode())
        yield b"".join(t.to_bytes(2, "little") for t in run)
        yield ", ".join(map(str, run)).encode()
        yield ",".join(map(str, run)).encode()
        for shift in range(3):  # base64 of a run looks different at each of three places
            yield b64encode(bytes(shift) + big)[4:-4]


def found_in(root, needles):
    """Which of these byte strings some file, or the name of one, contains."""
    hay = [path.read_bytes() for path in files_under(root)]
    hay += [str(path.relative_to(root)).encode() for path in root.rglob("*")]
    return {needle for needle in needles if any(needle in data for data in hay)}


def converse(root, model, secret, prompt, agent=AGENT):
    """A request through the restorer, kept on disk under an agent; the opened store, flushed."""
    opened = Store(budgets=BUDGETS, settings=config.load(store=root, encryption_key=secret))
    kept = opened.make_restorer(IDENTITY, probe(model, make_prompt_cache(model)))
    kept.rates = Rates(load_bytes_per_s=1e12, prefill_tokens_per_s=1e-3)
    restored = kept.restore(prompt)
    caches = restored.caches or make_prompt_cache(model)
    prefill(model, caches, prompt[restored.n_tokens : -1])
    kept.open(prompt).finish(prompt[:-1], caches)
    opened.flush()
    if agent:
        opened.on_disk.agents.advance(agent, kept.namespace, prompt[:-1])
        opened.on_disk.agents.update(agent, pinned=True)
    return opened, kept, restored, caches


def test_a_second_process_restores_what_a_sealed_store_kept(tmp_path, tiny_model):
    model, prompt = tiny_model("gemma3_text"), prompt_of(600)
    converse(tmp_path / "store", model, KEY, prompt)[0].close()
    opened, _, restored, _ = converse(tmp_path / "store", model, KEY, prompt)
    opened.close()
    assert restored.n_tokens == len(prompt) - 1
    assert restored.tokens_by_tier == {"disk": len(prompt) - 1}
    assert_same(
        cold(model, prompt, 5, step=599), continue_from(model, restored.caches, prompt[-1:], 5)
    )


@pytest.mark.parametrize("secret", [None, KEY])
def test_no_file_tells_what_was_said_or_by_whom(secret, tmp_path, tiny_model):
    """A plain store is the control: there the same search finds all three."""
    model, prompt = tiny_model("llama"), prompt_of(600)
    root = tmp_path / "store"
    opened, kept, _, caches = converse(root, model, secret, prompt)
    refs = list(chain(kept.namespace, prompt[:-1]))
    opened.on_disk.agents.fork(AGENT, f"{AGENT}-2")
    hurt = opened.on_disk.disk.records.path_of(refs[-1].key, Part.DELTA)
    hurt.write_bytes(hurt.read_bytes()[:-1])
    assert opened.on_disk.disk.read(refs[-1].key, Part.DELTA) is None, "one is quarantined"
    rows = bytes(memoryview(caches[0].keys[0, 0, :256]).cast("B"))
    runs = {rows[at : at + 16] for at in range(0, len(rows) - 16, 256)}
    name = AGENT.encode()
    ids = {name, name.hex().encode(), *(b64encode(bytes(n) + name)[4:-4] for n in range(3))}
    secrets = {kept.namespace, kept.namespace.hex().encode(), KEY.encode(), bytes(range(32))}
    told = [found_in(root, n) for n in (set(spellings(prompt)), runs, ids)]
    if secret is None:
        assert all(told)
    else:
        assert (root / "index.sqlite-wal").stat().st_size > 0, "the log is searched too"
        assert told == [set(), set(), set()]
        assert found_in(root, secrets) == set()
    opened.close()


def test_without_the_key_one_cannot_tell_whether_a_prompt_is_there(tmp_path, tiny_model):
    """Keys hashed from the model's public identity name no file."""
    model, prompt = tiny_model("llama"), prompt_of(300)
    converse(tmp_path / "store", model, KEY, prompt)[0].close()
    guessed = [ref.key.hex().encode() for ref in chain(namespace(IDENTITY), prompt[:-1])]
    own = stored_namespace(Cipher(bytes(range(32))), namespace(IDENTITY))
    true = [ref.key.hex().encode() for ref in chain(own, prompt[:-1])]
    assert found_in(tmp_path / "store", guessed) == set()
    assert found_in(tmp_path / "store", true) == set(true)


def test_an_agent_file_that_was_changed_or_moved_is_not_believed(tmp_path):
    with AgentStore(tmp_path / "store", LIMITS, secret=KEY) as disk_store:
        name = disk_store.register(IDENTITY)
        for agent in ("one", "two", "three"):
            disk_store.agents.create(agent, Branch(name))
        one, two = (disk_store.agents._path(agent) for agent in ("one", "two"))
        one.write_bytes(two.read_bytes())
        assert [agent.id for agent in disk_store.agents.all()] == ["three", "two"]
        with pytest.raises(BadInput, match="not sealed under this name"):
            disk_store.agents.show("one")


# Several processes, and the command line

WRITER = """
import sys
from pathlib import Path
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.marker import unlock
from tests.store.kit import chain_of
root, seed = Path(sys.argv[1]), int(sys.argv[2])
tier = DiskTier(root, DiskLimits(min_free_bytes=0), cipher=unlock(root, sys.stdin.read()))
for made in chain_of(30, seed):
    tier.put(made).durable.result()
assert tier.stats().puts == 30 and tier.stats().errors == 0
tier.close()
"""


def test_processes_that_start_together_share_a_new_sealed_store(tmp_path):
    """The salt is chosen once, by the first process."""
    root = tmp_path / "store"
    command = [sys.executable, "-c", WRITER, str(root)]
    writers = [
        subprocess.Popen([*command, str(seed)], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for seed in (1, 2)
    ]
    for writer in writers:
        writer.stdin.write(PASSPHRASE.encode())
        writer.stdin.close()
    for writer in writers:
        with writer.stderr as errors:
            said = errors.read()
        assert writer.wait(timeout=300) == 0, said
    marker = json.loads((root / SEALED).read_text())
    assert marker["scrypt"]["n"] >= 1 << 17
    assert len(bytes.fromhex(marker["salt"])) == 16
    tier = open_sealed(root, PASSPHRASE)
    for seed in (1, 2):
        keys = [ref.key for ref in refs_of(30, seed)]
        assert all(tier.read(key, Part.DELTA) for key in keys)
        assert [tier.children(*pair)[0].n_common for pair in parents_of(seed)] == [256] * 30
    assert [checked for checked in maintenance.verify(tier) if checked.wrong] == []
    tier.close()


def parents_of(seed):
    return [(ref.parent, ref.tokens) for ref in refs_of(30, seed)]


@pytest.fixture
def typed(monkeypatch, capsys):
    """A function: type these arguments; standard output and standard error."""

    def run(home, key, *arguments, code=0):
        monkeypatch.setenv("KEEPWARM_HOME", str(home))
        monkeypatch.setenv("KEEPWARM_ENCRYPTION_KEY", key)
        monkeypatch.setattr(sys, "argv", ["keepwarm", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert (left.value.code or 0) == code, said
        assert not key or key not in said.out + said.err
        return said

    return run


def test_the_command_line_with_the_key_without_it_and_with_another(tmp_path, typed):
    write_checkpoint(tmp_path / "model")
    ask = ["run", "the quick brown fox " * 90, "--model", tmp_path / "model", "--json"]
    ask += ["--max-tokens", "4"]

    def cache(*arguments):
        return json.loads(typed(tmp_path, KEY, "cache", *arguments, "--json").out)

    first = json.loads(typed(tmp_path, KEY, *ask, "--agent", AGENT).out)
    second = json.loads(typed(tmp_path, KEY, *ask).out)
    assert second["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert second["text"] == first["text"]

    assert [agent["id"] for agent in cache("ls")] == [AGENT]
    assert cache("show", AGENT)["branches"][0]["turns"]
    assert "namespace" not in cache("show", AGENT)
    assert cache("verify")["bad"] == []
    for key in ("", OTHER_KEY):
        for command in (["ls"], ["verify", "--fix"], ["show", AGENT], ["rm", AGENT], ["gc"]):
            said = typed(tmp_path, key, "cache", *command, code=2)
            assert "KEEPWARM_ENCRYPTION_KEY" in said.err
            assert (said.out, said.err.count("\n")) == ("", 1)

    exported = typed(tmp_path, KEY, "cache", "export", AGENT, tmp_path / "agent.kw")
    assert "is not encrypted" in exported.err
    assert (tmp_path / "agent.kw").stat().st_mode & 0o077 == 0
    assert cache("rm", AGENT)["removed_blocks"] >= 2
    assert cache("ls") == []


def test_a_bundle_of_a_sealed_store_is_that_of_a_plain_one(tmp_path):
    """Re-keyed on the way out, so any store of the same model takes it, whatever its key."""
    tokens = tokens_of(600)

    def disk_store(name, secret):
        return AgentStore(tmp_path / name, LIMITS, secret=secret)

    with (
        disk_store("sealed", KEY) as one,
        disk_store("plain", None) as two,
        disk_store("other", OTHER_KEY) as far,
    ):
        name = one.register(IDENTITY)
        made = [record(ref, namespace=name) for ref in chain(name, tokens)]
        for each in made:
            one.disk.put(each).durable.result()
        one.agents.advance(AGENT, name, tokens)
        for there, back in pairwise((one, two, far)):
            bundle = tmp_path / "bundle.kw"
            assert there.export_agent(AGENT, bundle) == 3
            agent = back.import_agent(bundle, IDENTITY)
            assert back.tokens_of(agent) == tokens
            kept = [back.disk.read(key, Part.DELTA) for key in agent.blocks]
            assert [content(k) for k in kept] == [content(m) for m in made]
            assert agent.blocks != there.agents.show(AGENT).blocks
