"""Parts that a text model cannot read: as the official clients send them."""

import base64

import anthropic
import openai
import pytest

PNG = base64.b64encode(b"\x89PNG").decode()
NEXT = [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "Well?"}]

CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
MESSAGE_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def test_chat_with_an_image_in_its_history_goes_on_and_stays_warm(live):
    """Before, every turn after an image was a 400, for ever."""
    words = "What does the dog under the tree see? " * 20
    turns = [user({"type": "text", "text": words}, CHAT_IMAGE), *NEXT]
    options = {"model": "m", "max_tokens": 2, "temperature": 0}
    with live.openai() as client:
        first = client.chat.completions.create(messages=turns, **options)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        second = client.chat.completions.create(messages=[*turns, said, NEXT[1]], **options)
        with pytest.raises(openai.BadRequestError, match="reads text only"):
            client.chat.completions.create(messages=turns[:1], **options)
    receipt = first.model_extra["keepwarm"]
    assert receipt["unread"] == ["image"]
    assert "ignored_fields" not in receipt  # it is named once
    n_first = first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= n_first


def test_messages_with_an_image_in_their_history_go_on(live):
    client = anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0)
    options = {"model": "m", "max_tokens": 2}
    with client:
        answer = client.messages.create(messages=[user(MESSAGE_IMAGE), *NEXT], **options)
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            client.messages.create(messages=[user(MESSAGE_IMAGE)], **options)
    assert answer.model_extra["keepwarm"]["unread"] == ["image"]
