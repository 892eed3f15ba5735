"""The first words of a conversation, by which people know it."""

import pytest

from keepwarm.prefix.turn import KeptTurn

CONTEXT = "<system-reminder>\nToday is <b>Monday</b>.\n</system-reminder>"


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("messages", "opening"),
    [
        ([{"role": "system", "content": "Be brief."}, user("Mend the\n  test.")], "Mend the test."),
        ([user([{"type": "text", "text": CONTEXT}, {"text": "Mend it."}])], "Mend it."),
        ([user(f"{CONTEXT}\n{CONTEXT} Mend it.")], "Mend it."),
        ([user("<environment>\nlinux\n</environment>"), user("Mend it.")], "Mend it."),
        ([user("<div> is not closed")], "<div> is not closed"),
        ([user("<a></a>" * 80_000 + "Mend it.")], ("<a></a>" * 9)[:59] + "…"),
        ([user("<" + "a" * 500_000)], "<" + "a" * 58 + "…"),
        ([user(["Mend", "it."])], "Mend"),
        ([user(("Mend it.",)), user(5)], "Mend it."),
        ([user("red\x1b[31m and \u202eback")], "red [31m and back"),
        ([user("修" * 100)], "修" * 59 + "…"),
        ([user(""), user(None), user([{"type": "image"}])], ""),
    ],
)
def test_the_first_words_of_the_user(messages, opening):
    """Without what clients put before them, and nothing that a terminal would act on."""
    assert KeptTurn(messages).opening() == opening
