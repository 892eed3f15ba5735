"""What an engine is told once holds for every question that does not say otherwise."""

from keepwarm.text.request import KVOptions, Request
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of

EIGHT = KVOptions(kv_bits=8, kv_group_size=32)


def test_a_look_up_asks_where_answers_are_kept(models, tmp_path):
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        engine.submit(ask(prompt, 4)).result()
        assert engine.lookup(Request(prompt=[*prompt, 1])).warm_tokens == 300
        assert engine.lookup(Request(prompt=prompt, kv=KVOptions(kv_bits=4))).warm_tokens == 0


def test_a_prepared_request_has_the_options_it_will_run_with(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        assert engine.prepare(ask([1, 2])).request.kv == EIGHT
        four = KVOptions(kv_bits=4)
        assert engine.prepare(ask([1, 2], kv=four)).request.kv == four


def test_counting_makes_no_other_lane(models, tmp_path):
    """Answers that come back are looked for where they are kept."""
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        assert engine.count_tokens(Request(prompt=[1, 2, 3])) == 3
        assert engine._lanes.known(KVOptions(), "") is None
