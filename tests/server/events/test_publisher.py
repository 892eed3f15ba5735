"""KV events: what a subscriber is told is what the server has."""

from contextlib import closing, contextmanager
from typing import ClassVar

import pytest

from keepwarm.config import load
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import chain
from keepwarm.records.record import Part
from keepwarm.server import kv_events as publisher
from keepwarm.server.app import create_app
from keepwarm.server.kv_events import BlockView, HeldBlock, block_hash
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from tests.kit.engines import ask, engine_on
from tests.kit.redis_server import free_port
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until
from tests.server.conftest import running
from tests.server.events.subscriber import Subscriber
from tests.store.kit import refs_of

TENANTS = {"api_keys": "a,b", "kv_events": "tcp://127.0.0.1:5557"}


@contextmanager
def publishing(model, home, **settings):
    """A server that publishes, and a subscriber."""
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    names = {f"KEEPWARM_{name.upper()}": str(value) for name, value in settings.items()}
    environment = {"KEEPWARM_KV_EVENTS": ",".join(addresses), **names}
    with engine_on(model, home, environment=environment) as engine:
        chosen = engine.store.settings
        app = create_app(Models(EngineHost(engine, "tiny"), chosen), chosen)
        with running(app, chosen), closing(Subscriber(*addresses)) as subscriber:
            yield engine, subscriber


def hashes_of(engine, prompt):
    namespace = engine.lane_of().restorer.namespace
    refs = chain(namespace, prompt)
    return [block_hash(ref.key) for ref in refs if ref.n_tokens == 256]


def test_a_subscriber_knows_what_the_server_has(models, tmp_path, monkeypatch):
    """Whole blocks by medium, through puts, evictions, a lost message, and a restart."""
    monkeypatch.setattr(publisher, "INTERVAL_S", 0.02)
    model, prompt, other = models.of("llama"), prompt_of(600), prompt_of(300, seed=1)
    place = tmp_path / "shared"
    place.mkdir()
    with publishing(model, tmp_path, kv_events_token_ids=1, remote=place.as_uri()) as (
        engine,
        subscriber,
    ):
        engine.submit(ask(prompt, 4)).result()
        first = hashes_of(engine, prompt)
        everywhere = {"GPU", "CPU", "DISK"}
        subscriber.read_until(
            lambda: all(set(subscriber.blocks[medium]) == set(first) for medium in everywhere)
        )
        assert len(first) == 2
        assert [subscriber.blocks["DISK"][each] for each in first] == [None, first[0]]
        assert [subscriber.tokens[each] for each in first] == [prompt[:256], prompt[256:512]]
        engine.submit(ask(prompt, 4)).result()  # the second use shares it
        subscriber.read_until(lambda: set(subscriber.blocks["EXTERNAL"]) == set(first))
        engine.clear()
        subscriber.read_until(lambda: not subscriber.blocks["GPU"] and not subscriber.blocks["CPU"])
        engine.submit(ask(other, 4)).result()
        both = {*first, *hashes_of(engine, other)}
        subscriber.read_until(lambda: set(subscriber.blocks["DISK"]) == both)
        subscriber.catch_up()
        begun = subscriber.numbers[0]
        assert subscriber.numbers == list(range(begun, begun + len(subscriber.numbers)))
        assert set(subscriber.blocks["DISK"]) == both
    with publishing(model, tmp_path) as (engine, subscriber):
        wait_until(lambda: subscriber.catch_up() or subscriber.numbers)
        assert subscriber.numbers[0] > begun, "else it would be taken for an old message"
        subscriber.read_until(lambda: set(subscriber.blocks["DISK"]) == both)
        assert all(not tokens for tokens in subscriber.tokens.values()), (
            "only if they are asked for"
        )


def test_the_disk_is_walked_once_and_then_followed(models, tmp_path, monkeypatch):
    """Through puts and a deletion by this process and another."""
    walks, plain = [], DiskTier.walk
    monkeypatch.setattr(DiskTier, "walk", lambda self: walks.append(1) or plain(self))
    with engine_on(models.of("llama"), tmp_path, environment={}) as engine:
        view = BlockView(engine.lane_of().restorer, engine.live, engine.store)
        engine.submit(ask(prompt_of(300), 1)).result()
        engine.wait_until_saved()
        (key,) = view.look()["DISK"]
        assert view.look()["DISK"] is view.look()["DISK"]
        engine.submit(ask(prompt_of(300, seed=1), 1)).result()
        engine.wait_until_saved()
        assert len(view.look()["DISK"]) == 2
        with closing(DiskTier(engine.store.settings.store, DiskLimits(min_free_bytes=0))) as other:
            other.delete_all([key])
        (left,) = view.look()["DISK"]
        assert left != key
    assert len(walks) == 1


def test_what_is_shared_long_after_it_came_is_told(models, tmp_path, monkeypatch):
    """The latest blocks are asked for, though memory no longer has them."""
    monkeypatch.setattr(publisher, "MAX_AWAITED", 2)
    (tmp_path / "shared").mkdir()
    remote = {"KEEPWARM_REMOTE": (tmp_path / "shared").as_uri()}
    with engine_on(models.of("llama"), tmp_path, environment=remote) as engine:
        view = BlockView(engine.lane_of().restorer, engine.live, engine.store)
        disk, (tier,) = engine.store.on_disk.disk, view.restorer.tiers.shared
        wait_until(lambda: tier.is_trusted)
        for seed in range(3):
            engine.submit(ask(prompt_of(300, seed), 1)).result()
        engine.wait_until_saved()
        engine.clear()
        keys = list(view.look()["DISK"])
        assert view.look()["EXTERNAL"] == {}
        assert all(tier.put(disk.read(key, Part.DELTA)).stored for key in keys)
        assert view.look()["EXTERNAL"].keys() == set(keys[1:])
        assert view.look()["EXTERNAL"] is view.look()["EXTERNAL"]


def test_a_long_history_is_told_anew(models, tmp_path, monkeypatch):
    """So that what is sent again is bounded, and always whole."""
    monkeypatch.setattr(publisher, "INTERVAL_S", 0.02)
    monkeypatch.setattr(publisher, "MAX_MESSAGES", 3)
    with publishing(models.of("llama"), tmp_path) as (engine, subscriber):
        for seed in range(3):
            prompt = prompt_of(256, seed)
            engine.submit(ask(prompt, 2)).result()
            known = set(hashes_of(engine, prompt))
            subscriber.read_until(lambda known=known: known <= set(subscriber.blocks["DISK"]))
        on_disk, begun = dict(subscriber.blocks["DISK"]), subscriber.numbers[0]
        subscriber.catch_up()
        assert subscriber.numbers[0] > begun
        assert subscriber.blocks["DISK"] == on_disk


class Scripted(publisher.EventPublisher):
    """Publishes what it is told to have."""

    found: ClassVar = {"GPU": {}}

    def _look(self):
        return self.found


def test_a_medium_may_come_and_go(monkeypatch):
    """As when a model is loaded anew, without a disk or with one."""
    monkeypatch.setattr(publisher, "INTERVAL_S", 0.02)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    one, two = (HeldBlock(ref.key, ref.parent, ref.number) for ref in refs_of(2))
    made = Scripted(None, addresses, token_ids=False)
    with made.running(), closing(Subscriber(*addresses)) as subscriber:
        wait_until(lambda: subscriber.catch_up() or subscriber.numbers)
        for found in (
            {"GPU": {one.key: one}, "CPU": {one.key: one}},
            {"GPU": {one.key: one}, "DISK": {one.key: one, two.key: two}},
        ):
            made.found = found
            expected = {medium: {block_hash(key) for key in found[medium]} for medium in found}
            wait_until(lambda expected=expected: told(subscriber) == expected)


def test_who_connects_late_is_told_the_last_number(monkeypatch):
    """Again and again, so that it can ask for what it has missed; nothing is kept for it twice."""
    for name in ("INTERVAL_S", "REMIND_S"):
        monkeypatch.setattr(publisher, name, 0.02)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    (one,) = (HeldBlock(ref.key, ref.parent, ref.number) for ref in refs_of(1))
    made = Scripted(None, addresses, token_ids=False)
    made.found = {"GPU": {one.key: one}}
    with made.running():
        wait_until(lambda: made._is_reminder)  # all is told
        with closing(Subscriber(*addresses)) as subscriber:
            for _ in range(3):
                assert subscriber.read()
            assert len(set(subscriber.numbers)) == 1
            last = subscriber.numbers[0]
            assert told(subscriber) == {"GPU": {block_hash(one.key)}}
            assert subscriber.numbers == [last - 2, last - 1, last]


def test_nothing_is_told_over_and_over_while_no_model_is_loaded(monkeypatch):
    monkeypatch.setattr(publisher, "INTERVAL_S", 0.02)
    monkeypatch.setattr(publisher, "REMIND_S", 3600.0)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    made, looks = Scripted(None, addresses, token_ids=False), []
    monkeypatch.setattr(made, "_look", lambda: looks.append(1) or {})
    begun = made._number
    with made.running():
        wait_until(lambda: len(looks) > 3)
    assert made._number == begun + 1


def told(subscriber):
    """What is known from all that was sent."""
    subscriber.catch_up()
    return {medium: set(blocks) for medium, blocks in subscriber.blocks.items() if blocks}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (TENANTS, "set share_cache"),
        ({"kv_events": "tcp://127.0.0.1:1,tcp://127.0.0.1:2,tcp://127.0.0.1:3"}, "no more"),
        ({"kv_events": "tcp://nowhere.invalid:1", "kv_events_public": True}, "a free address"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, why):
    with pytest.raises(BadInput, match=why):
        publisher.event_publisher(None, load({}, **settings))


def test_no_publisher_unless_it_is_asked_for():
    assert publisher.event_publisher(None, load({})) is None
