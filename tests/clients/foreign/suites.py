"""Which tests of other projects concern Keepwarm, and why those that fail do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Reason(NamedTuple):
    """Why tests do not pass, by what the failing assertion says."""

    said: str  # a pattern of the line that failed and its error
    why: str
    tests: str = ""  # a pattern of `file::test[parameters]`, where others say the same


@dataclass(frozen=True)
class Suite:
    """Tests of one project."""

    title: str
    folder: str  # in the checkout, from where pytest runs
    plugin: str
    packages: tuple[str, ...]
    files: tuple[str, ...]
    reasons: tuple[Reason, ...]  # the first that fits
    left_out: Mapping[str, str]  # files, and why they are not run
    options: tuple[str, ...] = ()


INTERNAL = "imports parts of vLLM, and tests those"

LLAMA_CPP = Suite(
    title="llama.cpp",
    folder="tools/server/tests",
    plugin="keepwarm_llama_cpp",
    packages=("pytest", "pytest-timeout", "requests", "openai", "aiohttp", "numpy", "wget"),
    files=tuple(
        f"unit/test_{name}.py"
        for name in (
            *("basic", "chat_completion", "compat_anthropic", "compat_oai_responses"),
            *("completion", "embedding", "ignore_eos", "infill", "metrics", "security"),
            *("tokenize", "tool_call"),
        )
    ),
    reasons=(
        Reason(
            "endpoint /(completion|infill);",
            "llama.cpp's own `/completion` and `/infill`; "
            "here OpenAI's `/v1/completions`, with `suffix`",
        ),
        Reason(
            "'NoneType' object has no attribute 'status_code'",
            "its parallel requests to `/completion`, which all fail",
            "test_completion_(parallel|unified)",
        ),
        Reason(
            "endpoint /(tokenize|props|slots|apply-template|cors-proxy);",
            "routes of "
            "llama.cpp's own: `/tokenize`, `/props`, `/slots`, `/apply-template`, "
            "`/cors-proxy`",
        ),
        Reason(
            "endpoint /v1/chat/completions/input_tokens;",
            "here it is OpenAI's `/v1/responses/input_tokens`, or Anthropic's `count_tokens`",
        ),
        Reason(
            "<!doctype html>|for /sw.js, got 401",
            "llama.cpp's web page; the dashboard is `/dashboard`",
        ),
        Reason(
            "'aliases'|assert 200 == 501|KeyError: 0|assert 200 == 400",
            "what a flag of llama.cpp's server turns on, off or chooses",
            "aliases|metrics_disabled|pooling_none",
        ),
        Reason("assert 33 == 77|assert 56 == ", "counts tokens of its own model's tokenizer"),
        Reason(
            'startswith."b".',
            "wants its build number, which begins with `b`, in `system_fingerprint`",
        ),
        Reason(
            "'timings' in|last_progress|saw_progress",
            "fields of llama.cpp's own: `timings`, `return_progress`",
        ),
        Reason("__verbose", "the prompt in `__verbose`, by a template that a flag chooses"),
        Reason(
            "exceed_context_size_error|ServerError: .400, .*maximum context length",
            "wants its "
            "own error type; clients look for OpenAI's code `context_length_exceeded`, which "
            "is there",
        ),
        Reason(
            "assert .200 == 400 or 200 == 500",
            "refuses two answers in a row; OpenAI and others accept them",
            "messages7",
        ),
        Reason(
            "content is None", 'wants `content` null in the first chunk; as at OpenAI it is `""`'
        ),
        Reason(
            "400 == 200",
            "wants an answer to no messages; refused, as at Anthropic",
            "empty_messages",
        ),
        Reason(
            "Expected more tokens with thinking",
            "needs the template of Qwen3, which a flag chooses",
        ),
        Reason(
            "200 == 500",
            "wants 500; here an image in the history becomes a note, which the receipt names",
            "tool_result_with_image",
        ),
        Reason("400 == (500|200)", "images", "vision_format|local_media"),
        Reason(
            "Name or service not known", "fetches an image from the internet, which was not there"
        ),
        Reason("too large", 'wants the words "too large"; it is refused in OpenAI\'s words'),
        Reason(
            "400 == 200",
            "text and tokens mixed in one input, which OpenAI does not take",
            "mixed_input",
        ),
        Reason(
            "NotFoundError: .*text-embedding-3-small",
            "vectors of a model that is not there; refused, so that they are not another model's",
        ),
        Reason("Process-Start-Time-Unix", "a header of llama.cpp's metrics"),
        Reason(
            '"content" in res.body',
            "wants its own form of answer at `/completions`; here it is OpenAI's",
        ),
        Reason(
            "cors_header", "wants credentials allowed, and its own lists of methods and headers"
        ),
        Reason(
            "400 == 200",
            "wants 200 without the header for an origin that is not allowed; "
            "here the preflight is refused",
            "cors_origins",
        ),
        Reason(
            "authentication_error", "wants its own error type; OpenAI's is `invalid_request_error`"
        ),
    ),
    left_out={
        "test_compat_gcp.py": "a mode of one cloud's platform",
        "test_ctx_shift.py": "context is never shifted silently; `truncation` drops whole turns",
        "test_kv_keep_only_active.py": "options of llama.cpp's own cache",
        "test_lora.py": "adapters changed while serving",
        "test_mcp_servers.py, test_proxy.py, test_tools_builtin.py": "llama.cpp's web page",
        "test_rerank.py": "reranking",
        "test_router.py, test_sleep.py, test_stream.py": "its router process; several models "
        "here have tests of their own",
        "test_slot_save.py": "slots in files; here every conversation is kept",
        "test_speculative.py": "draft models",
        "test_template.py": "templates chosen by flags of the server",
        "test_vision_api.py": "images",
        "tests marked slow": "need trained models of some GB",
    },
)

WORDS = "wants words that only a trained model gives"

VLLM = Suite(
    title="vLLM",
    folder="",
    plugin="keepwarm_vllm",
    packages=(
        *("pytest", "pytest-timeout", "pytest-asyncio", "requests", "openai", "anthropic"),
        *("jsonschema", "regex", "httpx", "numpy", "pybase64", "transformers", "jinja2"),
    ),
    files=tuple(
        f"tests/entrypoints/{name}.py"
        for name in (
            "anthropic/test_messages",
            "openai/chat_completion/test_chat",
            "openai/chat_completion/test_chat_completion",
            "openai/chat_completion/test_chat_logit_bias_validation",
            "openai/chat_completion/test_completion_with_function_calling",
            "openai/completion/test_completion",
            "openai/models/test_models",
            "openai/responses/test_basic",
            "openai/responses/test_function_call",
            "openai/responses/test_simple",
            "openai/responses/test_stateful",
            "openai/responses/test_structured_output",
            "openai/test_chunked_prompt",
            "serve/tokenize/test_tokenization",
        )
    ),
    reasons=(
        Reason(
            "input_tokens > 5",
            "wants tokens from the cache counted as `input_tokens`; as at "
            "Anthropic they are counted apart",
        ),
        Reason(
            "unexpected keyword argument 'temperature'",
            "passes `temperature`, which the newest Anthropic client does not take",
        ),
        Reason("MagicMock|isinstance.. arg 2|n should default to 1", INTERNAL),
        Reason("DID NOT RAISE ValueError", INTERNAL, "completion_request_"),
        Reason(
            "attribute 'prompt_logprobs'",
            "vLLM's own `prompt_logprobs`; here `echo` with `logprobs`",
        ),
        Reason(
            "DID NOT RAISE BadRequestError",
            "a negative `prompt_logprobs`, which is vLLM's own, is not refused",
            "prompt_logprobs",
        ),
        Reason(
            "DID NOT RAISE BadRequestError",
            "`stream_options` without `stream` is not refused",
            "stream_options",
        ),
        Reason(
            "assert None is not None|'NoneType' object has no attribute 'prompt_tokens'",
            "vLLM's own `continuous_usage_stats`",
            "stream_options",
        ),
        Reason(
            "attribute '(prompt_token_ids|input_messages)'|token_id:42",
            "other fields of vLLM's own: prompts and logprobs as token ids, messages of a response",
        ),
        Reason(
            "CompletionUsage|prompt_tokens == 6|served_model.id",
            "wants the names and token counts of its own model",
        ),
        Reason(
            "assert (delta.content|chunk.choices.0..text) → ",
            "wants text in the chunk with the finish reason; as at OpenAI it has none",
        ),
        Reason("beam search", "beam search"),
        Reason(
            "messages.0..role is invalid",
            "takes any role; here one that is not OpenAI's is refused by name",
        ),
        Reason(
            "Not Found for url: [^ ]*/(invocations|tokenizer_info|tokenize|detokenize)$",
            "routes of vLLM's own: `/invocations`, `/tokenize`, `/detokenize`, `/tokenizer_info`",
        ),
        Reason(
            "in 'The notes tell|== '2'|== .\"result\": 2.|science fair|choice1 != choice2", WORDS
        ),
        Reason(
            "Unterminated string",
            "wants an answer that ends in its format within `max_tokens`, "
            "which random words do not",
        ),
        Reason("reasoning", "wants reasoning, which only a trained model gives"),
        Reason(
            "len.output. > 0|tool_call_items|tool_call_item is not|message.tool_calls is not",
            "wants a call of its own choice, which only a trained model makes",
        ),
        Reason(
            r"tool_calls\[0\].*'NoneType' object|local variable 'tool_call'|"
            "len.response.output. >= 1",
            "wants a call that random words do not end within the limit of tokens; one that is cut "
            "off is no call",
            "named_tool_use|max_tokens_with_tool_choice",
        ),
        Reason("output_token_lengths", "wants answers of different lengths within 50 tokens"),
    ),
    left_out={
        "test_chat_error, test_completion_error, test_errors, test_serving_chat, test_protocol, "
        "test_harmony*, test_parsable_context*, test_responses_utils and others": INTERNAL,
        "multimodal, prompt_embeds, lora, tensorizer, speech_to_text": "images, sound, embeddings "
        "as prompts, adapters and formats that Keepwarm does not have",
        "serve/instrumentator": "vLLM's own `/version` and `/load`, and its engine",
        "pooling, cohere, generative_scoring": "other APIs: reranking, scoring, Cohere's",
        "test_run_batch, test_cli_args, test_dp_supervisor, launchers, scale_out, sagemaker": "how "
        "vLLM is started and spread over machines",
        "test_include_reasoning, test_thinking_token_budget": "need a trained model that reasons",
        "test_return_token*_ids, test_logprob_token_ids, test_stop_token_ids": "vLLM's own fields",
    },
    options=(
        *("-o", "asyncio_mode=auto"),
        *("-o", "asyncio_default_fixture_loop_scope=function"),
    ),
)
SUITES = {"llama.cpp": LLAMA_CPP, "vllm": VLLM}
