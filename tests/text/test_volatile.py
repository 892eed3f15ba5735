"""The beginning of a conversation: stable text first, and the same in every turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.prefix.blocks import common_prefix
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Request
from keepwarm.text.template import Template, text_of
from keepwarm.text.volatile import BLOCKS, LATE, UNCACHED, Arrangement, find_volatile
from tests.kit.agent_model import LLAMAS_CHATML, TOOLS_CHATML
from tests.kit.checkpoints import CHATML
from tests.kit.tokenizers import WITH_TOOLS, make
from tests.text.formats import CLOCK, WEATHER
from tests.text.test_template import ALTERNATING, HOISTING, ONE_SYSTEM

RULES = "Be brief.\nAsk before you delete."
SKILLS = "<system-reminder>\nThe following skills are available now: tidy\n</system-reminder>"


def environment(folder):
    return f"<env>\n  Working directory: {folder}\n</env>\n"


# Blocks as clients write them, by what differs: `{}`. Lines around them belong to the stable text.
SAMPLES = {
    "claude": (
        "environment",
        "# Environment\nYou have been invoked in the following environment: \n"
        " - Primary working directory: {}\n - Shell: bash\n",
    ),
    "env": ("environment", "Useful information about the environment you are running in:\n<env>\n"
            "  Working directory: {}\n</env>\n"),
    "cwd": ("environment", "<cwd>\n{}\n</cwd>\n"),
    "memory": ("memory", "# Memory\n\nYou have a persistent file-based memory at `{}`.\n\n"
               "```markdown\n---\nname: x\n---\n```\n\n"),
    "auto memory": ("memory", "---\n\n# auto memory\n\nYou have two persistent, file-based memory"
                    " directories.\n\n- PROJECT memory: `{}`\n\n"),
    "agents.md": ("instructions", "Instructions from: {}/AGENTS.md\n# Rules\n\nUse tabs.\n\n"),
    "qwen.md": ("instructions", "--- Context from: {} ---\n# Rules\n"
                "--- End of Context from: {} ---\n"),
    "rules": ("instructions", '<context name="userRules">\n# {}\n\nUse tabs.\n</context>\n'),
    "project": ("instructions", "<project_context>\nProject-specific instructions:\n\n"
                "<project_instructions path=\"{}/AGENTS.md\">\n# Rules\n</project_instructions>\n"
                "</project_context>\n"),
    "context": ("git-status", '<context name="gitStatus">This is the git status at the start of'
                " the conversation. It is frozen.\n\n?? {}\n</context>\n"),
    "git": ("git-status", "Git snapshot at conversation start. It is frozen.\n```text\n"
            "git: Current branch: {}\n```\n"),
    "date": ("date", "Today's date is {}.\n"),
}  # fmt: skip
LAST = {  # these take all that follows
    "gitStatus": (
        "git-status",
        "gitStatus: This is the git status at the start of the conversation. Branch: {}\n\nM a.txt",
    ),
    "index": ("memory", "## /home/{}/MEMORY.md\n\n# Notes\n- one"),
}
BEHIND = {
    "memory": "# Context\nIt is long.",
    "auto memory": "## Memory types\n- user",
    "agents.md": "Skills provide specialized instructions and workflows.",
}


def text_with(name, value):
    sample = (SAMPLES | LAST)[name][1].replace("{}", value)
    behind = "" if name in LAST else BEHIND.get(name, "Stop when it is done.")
    return f"{RULES}\n\n{sample}{behind}", sample.strip("\n")


@pytest.mark.parametrize("name", SAMPLES | LAST)
def test_a_block_is_cut_out_whole(name):
    """What is left is the same in every project, and nothing is lost."""
    text, sample = text_with(name, "/home/one")
    other, _ = text_with(name, "/srv/another")
    moved, rest = split(text)
    assert moved == sample
    assert rest == split(other)[1]
    assert rest.startswith(RULES)
    assert {span.name for span in find_volatile(text)} == {(SAMPLES | LAST)[name][0]}


def test_every_rule_has_a_sample():
    texts = [text_with(name, "x")[0] for name in SAMPLES | LAST]
    assert all(any(block.pattern.search(text) for text in texts) for block in BLOCKS)


def split(text):
    found = Arrangement.of([{"role": "system", "content": text}], splits_user=False)
    stable, *moved = found.apply([{"role": "system", "content": text}])
    return (moved[0]["content"] if moved else ""), stable["content"]


def test_text_that_only_resembles_a_block_stays():
    for text in (
        "See <env> and </env>.",
        "<env>\nwithout an end",
        "# Environment\n - The newest models are listed here.\n",
        "He said: Today's date is 2026-01-31.",
        "--- Context from: QWEN.md ---\nwithout an end",
        "It is in <cwd>\n/home\n</cwd>",
        '<context name="commitSignature">This is the git status\n</context>',
    ):
        assert find_volatile(text) == []


def test_how_many_blocks_there_were_cannot_be_seen():
    blocks = ["\n".join(f"--- Context from: {n} ---\nx\n--- End of Context from: {n} ---\n"
                        for n in range(many)) for many in (1, 3)]  # fmt: skip
    rests = [split(f"{RULES}\n\n{block}\nMore.")[1] for block in blocks]
    assert rests[0] == rests[1] == f"{RULES}\n\nMore."


def test_what_differs_within_a_project_comes_last():
    text = "".join(text_with(name, "x")[0] + "\n" for name in ("date", "git", "env"))
    moved, _ = split(text)
    assert moved.index("<env>") < moved.index("Today's") < moved.index("Git snapshot")


def test_starts_without_an_end_are_searched_once():
    """A search for each of them would take minutes."""
    assert find_volatile("--- Context from: a ---\n<env>\n" * 20_000) == []


def test_behind_a_cache_control_mark_all_is_volatile():
    parts = [
        {"type": "text", "text": RULES, "cache_control": True},
        {"type": "text", "text": "Today's date is 2026-01-31.\nThe user likes tea."},
    ]
    system = {"role": "system", "content": parts}
    found = Arrangement.of([system], splits_user=False)
    assert found.names == ("date", UNCACHED)
    normal = [{"role": "system", "content": text_of(system)}]
    stable, moved = (each["content"] for each in found.apply(normal))
    assert stable == RULES
    assert moved == "The user likes tea.\n\nToday's date is 2026-01-31."
    unmarked = [{"role": "system", "content": [{"type": "text", "text": RULES}]}]
    assert Arrangement.of(unmarked, splits_user=False) == Arrangement()


# Whole prompts


@pytest.fixture
def prompter_of(tmp_path):
    def build(template, **options):
        parser = "json_tools" if "tools" in template else None
        tokenizer = make(tmp_path / "tokenizer", template=template, parser=parser)
        return Prompter(tokenizer, **options)

    return build


def talk(folder, ask="What is here?"):
    """The beginning that Claude Code gives a conversation."""
    return [
        {"role": "system", "content": f"{RULES}\n{environment(folder)}More rules."},
        {"role": "user", "content": ask},
        {"role": "system", "content": f"Agents: three.\n\nToday's date is {len(folder)}.\n"},
    ]


def asked(messages, tools=(WEATHER, CLOCK)):
    return Request(messages=messages, tools=list(tools))


TEMPLATES = {"own block": CHATML, "of Qwen's kind": TOOLS_CHATML, "of Llama's kind": LLAMAS_CHATML,
             "tools first": WITH_TOOLS}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_sessions_in_two_projects_share_all_stable_text(prompter_of, template):
    prompter = prompter_of(template)
    one, other = (prompter.render(asked(talk(folder))) for folder in ("/a", "/srv/b"))
    shared = one.text[: common_prefix(one.text, other.text)]
    for part in (RULES, "More rules.", "Agents: three.", "get_weather", "Working directory: /"):
        assert part in shared
    assert {*one.reordered} >= {"environment", "date", LATE}
    lines = [line for each in talk("/a") for line in each["content"].split("\n") if line]
    assert [one.text.count(line) for line in lines] == [1] * len(lines)
    assert one.cuts[0] <= one.end_of(0)
    assert "Working" not in prompter._tokenizer.decode(one.tokens[: one.cuts[0]])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_later_turns_begin_as_the_first_did(prompter_of, template):
    prompter = prompter_of(template)
    messages = talk("/a")
    first = prompter.render(asked(messages))
    answer = {"role": "assistant", "content": "Trees."}
    late = {"role": "system", "content": environment("/elsewhere")}
    for more in ([answer], [answer, late], [late], [{"role": "user", "content": "Well?"}, late]):
        later = prompter.render(asked([*messages, *more, {"role": "user", "content": "And?"}]))
        known = first.text[: len(first.text) - len(first.generation_prompt)]
        assert later.text.startswith(known)
        assert "Working directory: /elsewhere" not in later.text[: len(known)]


NEITHER = {
    "off, own block": (CHATML, "off", "Be brief.", '"get_weather"'),
    "off": (TOOLS_CHATML, "off", "Working directory", '"get_weather"'),
    "no second system message": (ONE_SYSTEM + "{{ tools }}", "all", "Working directory", "What"),
    "moved to the front": (HOISTING + "{{ tools }}", "all", "Working directory", "get_weather"),
}


@pytest.mark.parametrize(("template", "setting", "early", "late"), NEITHER.values(), ids=NEITHER)
def test_otherwise_all_is_where_it_was(prompter_of, template, setting, early, late):
    prompt = prompter_of(template, stable_first=setting).render(asked(talk("/a")))
    assert prompt.reordered == ()
    assert 0 <= prompt.text.index(early) < prompt.text.index(late)
    assert prompt.text.index("Working directory") < prompt.text.index("More rules.")


def test_unknown_text_behind_a_mark_is_moved_by_a_templates_tools_only_if_asked(prompter_of):
    marked = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}
    parts = [marked, {"type": "text", "text": "You speak with Ann."}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "Hello"}]
    moved = {
        (template, setting): prompter_of(template, stable_first=setting).render(asked(messages))
        for template in (CHATML, TOOLS_CHATML)
        for setting in ("known", "all")
    }
    assert {key: prompt.reordered for key, prompt in moved.items()} == {
        (CHATML, "known"): ("tools", UNCACHED),
        (CHATML, "all"): ("tools", UNCACHED),
        (TOOLS_CHATML, "known"): (),
        (TOOLS_CHATML, "all"): (UNCACHED,),
    }


def test_a_request_without_tools_stays_as_it_is(prompter_of):
    prompter, off = (prompter_of(CHATML, stable_first=setting) for setting in ("all", "off"))
    request = asked(talk("/a"), tools=())
    assert prompter.render(request).text == off.render(request).text
    assert prompter.render(request).reordered == ()


def test_the_own_block_comes_before_the_system_text(prompter_of):
    messages = [{"role": "system", "content": RULES}, *talk("")[1:2]]
    prompt = prompter_of(CHATML).render(asked(messages))
    assert prompt.text.index("</tools>") < prompt.text.index(RULES)
    assert prompt.reordered == ("tools",)
    assert prompter_of(CHATML).render(asked(messages[1:])).reordered == ()


def test_a_template_for_one_system_message_gets_all_in_it(prompter_of):
    """Our own block, the stable text, then the volatile: the order alone is changed."""
    for template in (ALTERNATING, ONE_SYSTEM):
        text = prompter_of(template).render(asked(talk("/a")[:2])).text
        places = [text.index(part) for part in ("</tools>", "More rules.", "<env>", "What is here")]
        assert places == sorted(places)


def test_text_of_users_stays_theirs(prompter_of):
    """Neither blocks that users write nor what claims to be a reminder gets another role."""
    said = [{"type": "text", "text": text} for text in (SKILLS, environment("/mine"), "Why?")]
    messages = [*talk("/a")[:1], {"role": "user", "content": said}]
    prompt = prompter_of(CHATML).render(asked(messages))
    assert prompt.reordered == ("tools", "environment")
    turns = prompt.text.split("<|im_start|>")[1:]
    roles = [turn.partition("\n")[0] for turn in turns]
    assert roles == ["system", "user", "system", "user", "assistant"]
    assert turns[1] == f"user\n{SKILLS}<|im_end|>\n"
    assert turns[3] == f"user\n{environment('/mine')}\nWhy?<|im_end|>\n"


def test_reminders_stay_in_their_message_where_the_template_takes_no_system_there(prompter_of):
    said = [{"type": "text", "text": text} for text in (SKILLS, "Why?")]
    messages = [*talk("/a")[:1], {"role": "user", "content": said}]
    assert f"{SKILLS}\nWhy?" in prompter_of(ONE_SYSTEM).render(asked(messages)).text


@pytest.mark.parametrize(
    ("template", "behind", "between"),
    [(TOOLS_CHATML, True, True), (WITH_TOOLS, True, True), (CHATML, False, True),
     (ONE_SYSTEM + "{{ tools }}", False, False), (HOISTING + "{{ tools }}", False, False)],
)  # fmt: skip
def test_the_probe_looks_where_a_second_system_message_is_written(
    tmp_path, template, behind, between
):
    found = Template.of(make(tmp_path / "tokenizer", template=template))
    assert (found.takes_system_behind_tools, found.takes_system_between) == (behind, between)


PIECES = st.sampled_from([environment("/a"), "Today's date is 1.\n", "Be kind.\n", "\n", "# Me\n"])


ROLES = st.sampled_from(["system", "user", "assistant"])
TEXTS = st.lists(PIECES, max_size=4).map("".join)


@given(st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_nothing_is_lost_or_written_twice(parts):
    messages = [{"role": role, "content": text} for role, text in parts]
    found = Arrangement.of(messages, splits_user=True)
    arranged = found.apply(messages)
    lines = [sorted(line for each in some for line in each["content"].split("\n") if line.strip())
             for some in (messages, arranged)]  # fmt: skip
    assert lines[0] == lines[1]
    users = [[m for m in some if m["role"] != "system"] for some in (messages, arranged)]
    assert users[0] == users[1]
