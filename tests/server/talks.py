"""Greedy conversations through OpenAI's client, comparable between two servers."""

import asyncio

from tokenizers import Tokenizer

N_TOKENS = 40
RULES = "You answer the questions of the user. " * 6
QUESTIONS = ("What is the answer?", "Which dog sleeps under the tree?", "And the other dog?")
LETTERS = "answer the question"
DURABLE = {"X-Keepwarm-Cache": "durable"}  # answered when it is on disk


def tokenizer_of(checkpoint):
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def plain_bias(checkpoint):
    """Bias such that an answer is spelt letter by letter, and goes on for ever.

    A tokenizer would write it with fewer tokens: from its text alone nothing of it is found again.
    """
    tokenizer = tokenizer_of(checkpoint)
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
    return {str(i): -100 for i, text in texts.items() if len(text) != 1 or text not in LETTERS}


def client_of(url):
    from openai import AsyncOpenAI  # takes a second

    return AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=300)


def begun(number):
    return [{"role": "user", "content": f"{RULES}This is talk {number}. {QUESTIONS[0]}"}]


def ask(client, messages, plain, n_tokens=N_TOKENS, **options):
    return client.chat.completions.create(
        model="m", messages=messages, max_tokens=n_tokens, logit_bias=plain, **options
    )


async def turn(client, messages, plain, **options):
    """One turn of a talk: its messages with the next question, and what the turn cost."""
    answer = await ask(client, messages, plain, **options)
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    asked = {"role": "user", "content": QUESTIONS[(len(messages) // 2 + 1) % len(QUESTIONS)]}
    return [*messages, said, asked], answer.usage


async def turns(url, talks, plain, **options):
    """All talks at once, each by one turn."""
    async with client_of(url) as client:
        return await asyncio.gather(*(turn(client, talk, plain, **options) for talk in talks))
