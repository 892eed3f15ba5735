"""Window rows on disk: within one window before a restore point, nowhere else."""

from __future__ import annotations

import pytest

from keepwarm.engine.engine import Engine
from keepwarm.kv.kinds import Kind
from keepwarm.models.load import Model
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Header, Part
from keepwarm.text.request import KVOptions, Message, Request, Sampling
from tests.kit.engines import Exam, Models, ask, engine_on, tokens_of
from tests.kit.runs import prompt_of

# Smaller than a block, larger, and no multiple of one.
WINDOWS = [("gpt_oss", 32), ("gemma3_text", 512), ("gpt_oss", 300)]
wide = pytest.mark.parametrize("made", WINDOWS[1:], indirect=True)


@pytest.fixture(scope="module", params=WINDOWS, ids=str)
def made(request: pytest.FixtureRequest, models: Models) -> Model:
    architecture, window = request.param
    return models.of(architecture, sliding_window=window)


def window_of(engine: Engine) -> tuple[int, int]:
    """Rows of the widest window, and the bytes that one row of all windows takes."""
    layout = engine.lane_of().restorer.layout
    leaves = [leaf for leaf in layout.leaves() if leaf.kind is Kind.WINDOW]
    sizes = [spec.with_rows(1) for leaf in leaves for spec in leaf.tensors.values()]
    return max(leaf.window or 0 for leaf in leaves), sum(4 * h * w for _, h, _, w in sizes)


def held(engine: Engine, tier: str) -> int:
    """Bytes of window rows in a tier."""
    engine.wait_until_saved()
    return sum(block.n_bytes.get(Part.WINDOW, 0) for block in engine.store.blocks()[tier])


def n_windowed(engine: Engine, tier: str) -> int:
    """Blocks of a tier that have window rows."""
    return sum(Part.WINDOW in block.n_bytes for block in engine.store.blocks()[tier])


def said(engine: Engine, prompt: list[int], n: int = 6) -> list[int]:
    result = engine.submit(ask(prompt, n)).result()
    return [*prompt, *tokens_of(result.choices[0])]


def test_files_do_not_grow_with_the_prompt(made, tmp_path):
    """Two restore points, before the last prompt token and after the answer."""
    for n_tokens in (1000, 1000 + 4 * BLOCK_TOKENS):
        with engine_on(made, tmp_path / str(n_tokens)) as engine:
            window, row_bytes = window_of(engine)
            said(engine, prompt_of(n_tokens))
            n_rows = -(-window // BLOCK_TOKENS) * BLOCK_TOKENS + BLOCK_TOKENS
            # A tenth more for what files say of themselves.
            assert 0 < held(engine, "disk") <= 1.1 * 2 * n_rows * row_bytes
            assert n_windowed(engine, "memory") >= n_tokens // BLOCK_TOKENS  # all, as captured


def test_after_a_restart_all_is_found_that_was_asked(made, tmp_path):
    """The same prompt but for its last token, and the next turn whole."""
    exam, prompt = Exam(made.module.model), prompt_of(1000)
    with engine_on(made, tmp_path) as engine:
        talk = said(engine, prompt)
    with engine_on(made, tmp_path) as engine:
        again = engine.submit(ask(prompt, 4, policy=Policy.READ_ONLY)).result()
        assert again.receipt.reused == {"disk": len(prompt) - 1}
        following = [*talk, *prompt_of(30, seed=1)]
        result = engine.submit(ask(following, 4)).result()
        assert result.receipt.reused == {"disk": len(talk)}
        exam.add(prompt, again.choices[0])
        exam.add(following, result.choices[0])
    exam.check()


@pytest.mark.parametrize(
    ("made", "n_answer"), [(("gpt_oss", 32), 400), (("gpt_oss", 300), 700)], indirect=["made"]
)
def test_a_long_answer_is_found_again(made, tmp_path, n_answer):
    """Its rows went to memory as it grew; those before its end are on disk nevertheless."""
    exam, prompt = Exam(made.module.model), prompt_of(300)
    with engine_on(made, tmp_path) as engine:
        talk = said(engine, prompt, n_answer)
        assert held(engine, "disk") < held(engine, "memory")
    with engine_on(made, tmp_path) as engine:
        result = engine.submit(ask([*talk, 5], 4, policy=Policy.READ_ONLY)).result()
        assert result.receipt.reused == {"disk": len(talk)}
        exam.add([*talk, 5], result.choices[0])
        again = engine.submit(ask(prompt, 4, policy=Policy.READ_ONLY)).result()
        assert again.receipt.reused == {"disk": len(prompt) - 1}
    exam.check()


@pytest.mark.parametrize(
    ("made", "n_common"), [*zip(WINDOWS, (768, 700, 768), strict=True)], indirect=["made"]
)
def test_a_place_after_rows_that_were_in_memory_only(made, tmp_path, n_common):
    """A prompt that differs from another far from its restore points is stored itself."""
    exam, first = Exam(made.module.model), prompt_of(1500)
    parted = [*first[:n_common], (first[n_common] + 1) % 128, *prompt_of(20, seed=2)]
    with engine_on(made, tmp_path) as engine:
        said(engine, first)
        receipt = engine.submit(ask(parted, 4)).result().receipt
        if window_of(engine)[0] >= BLOCK_TOKENS:
            assert receipt.reused == {"memory": n_common}
    with engine_on(made, tmp_path) as engine:
        result = engine.submit(ask(parted, 4)).result()
        assert result.receipt.reused == {"disk": len(parted) - 1}
        exam.add(parted, result.choices[0])
    exam.check()


def test_a_bound_beside_a_narrower_window_loses_nothing(made, tmp_path):
    """Windows of two sizes: a block that fills the one may lack rows of the other."""
    kv, prompt, exam = KVOptions(max_kv_size=1024), prompt_of(300), Exam(made.module.model)
    with engine_on(made, tmp_path) as engine:
        answer = tokens_of(engine.submit(ask(prompt, 300, kv=kv)).result().choices[0])
    with engine_on(made, tmp_path) as engine:
        for asked, n_known in ((prompt, 299), ([*prompt, *answer, 5], 600)):
            result = engine.submit(ask(asked, 2, kv=kv, policy=Policy.READ_ONLY)).result()
            assert result.receipt.reused == {"disk": n_known}
            exam.add(asked, result.choices[0])
    exam.check()
    assert not list((tmp_path / "store" / "quarantine").glob("**/*.safetensors"))


@wide
def test_where_prompts_parted_another_goes_on_after_a_restart(made, tmp_path):
    """The second was restored there from memory; its place is on disk for the third."""
    exam, first, n_common = Exam(made.module.model), prompt_of(2200), 1100
    others = [[*first[:n_common], seed, *prompt_of(20, seed=seed)] for seed in (1, 2)]
    with engine_on(made, tmp_path) as engine:
        said(engine, first)
        receipt = engine.submit(ask(others[0], 4)).result().receipt
        assert receipt.reused == {"memory": n_common}
    with engine_on(made, tmp_path) as engine:
        result = engine.submit(ask(others[1], 4)).result()
        assert result.receipt.reused == {"disk": n_common}
        exam.add(others[1], result.choices[0])
    exam.check()


@pytest.mark.parametrize("made", [("gpt_oss", 300)], indirect=True)
def test_after_a_restart_a_prompt_that_parts_anywhere_goes_on_from_a_sparse_point(made, tmp_path):
    """Nothing ended there; the rows of a point are as large as a quarter of the prompt's."""
    exam, first = Exam(made.module.model), prompt_of(2300)
    parted = [*first[:1700], 1, *prompt_of(20, seed=2)]
    with engine_on(made, tmp_path) as engine:
        said(engine, first)
    with engine_on(made, tmp_path) as engine:
        result = engine.submit(ask(parted, 4)).result()
        assert result.receipt.reused == {"disk": 1024}
        exam.add(parted, result.choices[0])
    exam.check()


def messages(*contents: str) -> list[Message]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def text(n: int, seed: int) -> str:
    return " ".join(f"w{token:02x}" for token in prompt_of(n, seed=seed))


def test_after_a_restart_a_talk_goes_on_from_where_its_messages_ended(made, tmp_path):
    """An earlier question is edited, far from the end of the conversation."""
    parts = [text(n, n) for n in (150, 90, 160, 110)]
    other = [*parts[:1], text(20, 5)]
    with engine_on(made, tmp_path) as engine:
        asked = Request(messages=messages(*parts), sampling=Sampling(max_tokens=4, temperature=0))
        cut = engine.prepare(asked).prompt.cuts[0]
        engine.submit(asked).result()
    with engine_on(made, tmp_path) as engine:
        n_parts = n_common(engine, asked, Request(messages=messages(*other)))
        receipt = engine.submit(
            Request(messages=messages(*other), sampling=Sampling(max_tokens=4, temperature=0))
        )
        reused = receipt.result().receipt.reused
        assert cut <= reused["disk"] <= n_parts < cut + 20


def n_common(engine: Engine, one: Request, other: Request) -> int:
    pairs = zip(engine.prepare(one).tokens, engine.prepare(other).tokens, strict=False)
    return next(n for n, (a, b) in enumerate(pairs) if a != b)


@wide
def test_many_small_messages_are_read_in_few_slices(made, tmp_path):
    """Where rows of a whole slice are held, a message's end needs no slice of its own."""
    talk: list[Message] = [
        {"role": role, "content": text(4, n)} for n in range(30) for role in ("user", "assistant")
    ]
    with engine_on(made, tmp_path) as engine:
        asked = Request(messages=[*talk, talk[0]], sampling=Sampling(max_tokens=1, temperature=0))
        n_cuts = len(engine.prepare(asked).prompt.cuts)
        engine.submit(asked).result()
        assert sum(length > 1 for _, length in made.module.shapes) < n_cuts - 5


@pytest.mark.parametrize("made", [("gpt_oss", 300)], indirect=True)
def test_records_with_fewer_rows_than_were_planned_stay(made, tmp_path, monkeypatch):
    """Another tier had more of them, and has lost them since: nothing is wrong with these."""
    prompt = prompt_of(1000)
    with engine_on(made, tmp_path) as engine:
        said(engine, prompt)
    with engine_on(made, tmp_path) as engine:
        before = n_windowed(engine, "disk")
        monkeypatch.setattr(Header, "w_rows", property(lambda _: 0))  # the index has more
        result = engine.submit(ask(prompt, 1, policy=Policy.READ_ONLY)).result()
        assert result.receipt.recomputed > 1
        assert {why for why, n in engine.stats().failed_restores.items() if n} == {"missing"}
        engine.store._reader.close()  # what is set aside is set aside by then
        assert n_windowed(engine, "disk") == before > 0
    assert not list((tmp_path / "store" / "quarantine").glob("**/*.safetensors"))
