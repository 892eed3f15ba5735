"""The engine's default KV options, and the lane that a request runs in."""

from keepwarm.engine.engine import Engine
from keepwarm.engine.lane import Lane
from keepwarm.text.request import KVOptions, Request
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of

EIGHT = KVOptions(kv_bits=8, kv_group_size=32)


def test_a_look_up_uses_the_engines_options(models, tmp_path):
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        engine.submit(ask(prompt, 4)).result()
        assert engine.lookup(Request(prompt=[*prompt, 1])).warm == {"live": 300}
        assert engine.lookup(Request(prompt=prompt, kv=KVOptions(kv_bits=4))).warm == {}


def test_a_prepared_request_has_the_options_it_will_run_with(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        assert engine.prepare(ask([1, 2])).request.kv == EIGHT
        four = KVOptions(kv_bits=4)
        assert engine.prepare(ask([1, 2], kv=four)).request.kv == four


def test_counting_makes_no_other_lane(models, tmp_path):
    """Answers that clients send back are looked for in the engine's lane."""
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        assert engine.count_tokens(Request(prompt=[1, 2, 3])) == 3
        assert engine._lanes.find(KVOptions(), "") is None


class CountingLanes(Engine):
    """Counts how often a request's lane is looked up."""

    n_lookups = 0

    def _lane(self, request: Request) -> Lane:
        self.n_lookups += 1
        return super()._lane(request)


def test_the_lane_is_looked_up_once_a_request(models, tmp_path):
    long, start = prompt_of(300), 200
    options = KVOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=start)
    with engine_on(models.of("llama"), tmp_path, engine_class=CountingLanes) as engine:
        for n_tokens, is_exact in ((start - 1, True), (start, False), (300, False)):
            before = engine.n_lookups
            receipt = engine.submit(ask(long[:n_tokens], kv=options)).result().receipt
            assert (engine.n_lookups - before, receipt.exact) == (1, is_exact)
