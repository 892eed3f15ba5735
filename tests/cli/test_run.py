"""`keepwarm run`: one prompt in, one answer out."""

import json
import re
import signal
import subprocess

import pytest
from tokenizers import Tokenizer

from keepwarm.cache.store import Store
from keepwarm.cli.options import print_events
from keepwarm.config import Settings
from keepwarm.models.load import load
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Delta, Finished, Request
from tests.cli import command, environment, keepwarm_here, write_endless
from tests.kit.checkpoints import CHATML, EOS, make_tokenizer, write_checkpoint
from tests.kit.runs import cold

QUESTION = "What is the answer, 🦊?"
USAGE = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "cached_tokens": int,
    "prefilled_tokens": int,
    "ttft_ms": float,
    "tokens_per_second": float,
    "exact": bool,
    "inexact": list,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), n_context=200)


@pytest.fixture
def ask(checkpoint, tmp_path):
    """A function: `keepwarm run` on the tiny model, at most 8 tokens."""

    def run(*arguments, stdin=b""):
        options = ("--model", checkpoint, "--max-tokens", 8)
        return keepwarm_here("run", *arguments, *options, home=tmp_path, stdin=stdin)

    return run


def expected(checkpoint, messages, n):
    """The greedy answer, by a plain loop over the model."""
    model = load(str(checkpoint))
    tokens = Prompter(model.tokenizer).render(Request(messages=messages)).tokens
    text = model.tokenizer.decode(cold(model.module, tokens, n).tokens)
    return text.split(EOS)[0], len(tokens)


def test_json_is_one_object_and_nothing_else(ask, checkpoint):
    done = ask(QUESTION, "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    answer = json.loads(done.stdout)
    text, n_prompt = expected(checkpoint, [{"role": "user", "content": QUESTION}], 8)
    assert answer["text"] == text
    assert answer["finish_reason"] == "length"
    usage = answer["usage"]
    assert {name: type(value) for name, value in usage.items()} == USAGE
    assert usage["prompt_tokens"] == usage["prefilled_tokens"] == n_prompt
    assert (usage["completion_tokens"], usage["cached_tokens"], usage["exact"]) == (8, 0, True)


def test_text_from_standard_input_with_a_system_prompt(ask, checkpoint, tmp_path):
    system = tmp_path / "system.txt"
    system.write_text("Answer the fox.", encoding="utf-8")
    done = ask("-", "--system", system, stdin=QUESTION.encode())
    assert (done.returncode, done.stderr) == (0, b"")
    messages = [
        {"role": "system", "content": "Answer the fox."},
        {"role": "user", "content": QUESTION},
    ]
    assert done.stdout.decode() == expected(checkpoint, messages, 8)[0] + "\n"


def test_text_streams_and_ctrl_c_leaves_with_130(tmp_path):
    checkpoint = write_endless(tmp_path / "model")
    arguments = command("run", "hi", "--model", checkpoint, "--max-tokens", 500_000)
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    ) as process:
        assert process.stdout.read(40)  # text, long before the answer can be whole
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "Stopped."
    assert b"Traceback" not in err


def test_a_reader_that_leaves_ends_the_answer_quietly(tmp_path):
    """As in `keepwarm run … | head`."""
    checkpoint = write_endless(tmp_path / "model")
    arguments = command("run", "hi", "--model", checkpoint, "--max-tokens", 500_000)
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read().splitlines()
        assert [line for line in said if not line.startswith(b"loading ")] == []
        process.wait(timeout=300)
    assert process.returncode == 1


def test_a_seed_repeats_the_draws(main_here, checkpoint):
    options = ("--model", checkpoint, "--max-tokens", 8, "--temperature", 1)
    draws = [main_here("run", "hi", *options, "--seed", seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert [code for code, _, _ in draws] == [0, 0, 0]


def test_quantised_keys_and_values_are_reported_as_not_exact(main_here, tmp_path):
    wide = write_checkpoint(tmp_path / "wide", shape={"head_dim": 64})
    options = ("--model", wide, "--max-tokens", 3, "--kv-bits", 8, "--json")
    code, out, _ = main_here("run", "hi", *options)
    usage = json.loads(out)["usage"]
    assert (code, usage["exact"], usage["completion_tokens"]) == (0, False, 3)


def test_without_a_cache_nothing_is_left(main_here, checkpoint, tmp_path):
    for _ in range(2):
        _, out, _ = main_here("run", "hi", "--model", checkpoint, "--no-cache", "--json")
        usage = json.loads(out)["usage"]
        assert usage["cached_tokens"] == 0
        assert usage["prefilled_tokens"] == usage["prompt_tokens"]
    assert not (tmp_path / "store").exists()


def test_an_agent_is_named_when_it_leaves(main_here, checkpoint, tmp_path):
    assert main_here("run", "the fox", "--model", checkpoint, "--agent", "fox")[0] == 0
    with Store(settings=Settings(tmp_path, tmp_path / "store")) as store:
        assert [agent.id for agent in store.on_disk.agents.all()] == ["fox"]


def test_an_agent_is_continued(main_here, checkpoint, tmp_path):
    options = ("--model", checkpoint, "--agent", "fox", "--max-tokens", 4, "--json")
    first = json.loads(main_here("run", "the fox", *options)[1])["usage"]
    code, out, _ = main_here("run", "the dog", *options, "--continue")
    second = json.loads(out)["usage"]
    assert code == 0
    assert "continued" not in first
    assert second["continued"] >= first["prompt_tokens"] + first["completion_tokens"] - 1
    assert second["prefilled_tokens"] < second["prompt_tokens"] - first["prompt_tokens"]
    code, _, err = main_here("run", "the dog", "--model", checkpoint, "--continue")
    assert (code, err.count("\n")) == (2, 1)
    assert "--continue needs --agent" in err
    code, _, err = main_here("run", "hi", "--model", "nosuch", "--agent", "dog", "--continue")
    assert (code, err.count("\n")) == (2, 1), "before the model is looked for"
    assert "There is no agent 'dog'" in err


def test_raw_text_is_continued(main_here, checkpoint, tmp_path):
    options = ("--raw", "--model", checkpoint, "--agent", "fox", "--max-tokens", 4, "--json")
    first = json.loads(main_here("run", "the fox", *options)[1])["usage"]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert first["prompt_tokens"] == len(tokenizer.encode("the fox").ids)
    second = json.loads(main_here("run", " jumps", *options, "--continue")[1])["usage"]
    known = first["prompt_tokens"] + first["completion_tokens"]
    assert known - 1 <= second["continued"] <= known
    system = tmp_path / "system"
    system.write_text("Be brief.")
    code, _, err = main_here("run", "the fox", *options, "--system", system)
    assert (code, err.count("\n")) == (2, 1)
    assert "raw text has no system prompt" in err


def test_reasoning_is_shown_beside_the_answer(capsys):
    events = [
        Delta(0, reasoning="I th"),
        Delta(0, reasoning="ink."),
        Delta(0),
        Delta(0, text="So "),
    ]
    events += [Delta(0, text="it is."), Finished(0, "stop")]
    assert list(print_events(events)) == events
    assert capsys.readouterr() == ("So it is.", "I think.\n\n")


def test_a_thought_that_never_ends_is_no_answer(main_here, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    template = CHATML.replace("assistant\n", "assistant\n<think>")
    checkpoint = write_checkpoint(tmp_path / "model", tokenizer=tokenizer, template=template)
    code, out, err = main_here("run", "hi", "--model", checkpoint, "--max-tokens", 8)
    assert (code, out) == (0, "\n")
    assert err


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ([""], b"", "prompt is empty"),
        (["-"], b" \n", "prompt is empty"),
        (["-"], b"\xff\xfe", "Standard input is not UTF-8"),
        (["hi", "--system", "no-such-file"], b"", "no-such-file cannot be read: No such file"),
        (["hi", "--system", "."], b"", "cannot be read: Is a directory"),
        (["hi", "--max-tokens", "0"], b"", "--max-tokens is 0"),
        (["hi", "--max-tokens", "-1"], b"", "--max-tokens is -1"),
        (["hi", "--temperature", "-1"], b"", "temperature is -1"),
        (["hi", "--seed", str(2**64)], b"", "seed is 18446744073709551616"),
        (["hi", "--kv-bits", "3"], b"", "--kv-bits is 3"),
        (["hi", "--agent", ""], b"", "agent"),
        (["hi", "--agent", "fox", "--no-cache"], b"", "--no-cache stores nothing"),
        (["hi " * 300], b"", "tokens long and .* reads at most 199"),
        (["\udcff"], b"", "not UTF-8"),
    ],
)
def test_bad_input_is_one_sentence(main_here, checkpoint, arguments, stdin, says):
    code, out, err = main_here("run", "--model", checkpoint, *arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"[^\n]*\.\n", err)
    assert re.search(says, err)


@pytest.mark.parametrize("words", [["run", "hi"], ["chat"]])
def test_options_are_checked_before_the_model_is_looked_for(main_here, words):
    """It may have to be downloaded."""
    code, _, err = main_here(*words, "--model", "nosuch", "--kv-bits", "3")
    assert (code, err.count("\n")) == (2, 1)
    assert "--kv-bits is 3; it must be one of 0, 2, 4, 8." in err
