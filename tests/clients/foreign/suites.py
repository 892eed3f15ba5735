"""Which tests of other projects concern Keepwarm, and why those that fail do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Tests of one project. Reasons are by a pattern of `file::test`; the first counts."""

    title: str
    folder: str  # in the checkout, from where pytest runs
    plugin: str
    packages: tuple[str, ...]
    files: tuple[str, ...]
    reasons: Mapping[str, str]
    left_out: Mapping[str, str]  # files, and why they are not run
    options: tuple[str, ...] = ()


OWN_API = (
    "llama.cpp's own `/completion` and `/infill`; here OpenAI's `/v1/completions`, with `suffix`"
)
OWN_FIELDS = "fields of llama.cpp's own: `timings`, `return_progress`"
FLAGS = "what a flag of llama.cpp's server turns on, off or chooses"
BUILD = "wants its build number, which begins with `b`, in `system_fingerprint`"

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
    reasons={
        "basic.*(props|split_model)": "wants a GGUF file by its path or address",
        "basic.*(slots|aliases)|metrics_disabled|pooling_none": FLAGS,
        "no_ui|static_assets|cors_proxy": "llama.cpp's web page; the dashboard is `/dashboard`",
        "cached_tokens|usage_multiple": "counts tokens of its own model's tokenizer",
        "with_openai_library": BUILD,
        "in_template|apply_chat": "`/apply-template`, with a template that a flag chooses",
        "chat_template|verbose": "the prompt in `__verbose`, by a template that a flag chooses",
        "messages7": "refuses two answers in a row; OpenAI and others accept them",
        "logprobs_stream": 'wants `content` null in the first chunk; as at OpenAI it is `""`',
        "size_exceeded": "wants its own error type; clients look for OpenAI's code "
        "`context_length_exceeded`, which is there",
        "prompt_too_long": 'wants the words "too large"; it is refused in OpenAI\'s words',
        "test_metrics.py": "names of llama.cpp's own metrics, after `/completion`",
        "timings|return_progress|telemetry": OWN_FIELDS,
        "token_count": "`/chat/completions/input_tokens`; here it is OpenAI's "
        "`/v1/responses/input_tokens`, or Anthropic's `count_tokens`",
        "tool_result_with_image": "wants 500; here an image in the history becomes a note, which "
        "the receipt names",
        "vision|local_media": "images",
        "empty_messages": "wants an answer to no messages; refused, as at Anthropic",
        "thinking_history_in_count": "needs the template of Qwen3, which a flag chooses",
        "mixed_input": "text and tokens mixed in one input, which OpenAI does not take",
        "cors_options": "wants credentials allowed, and its own lists of methods and headers",
        "cors_origins": "wants 200 without the header for an origin that is not allowed; here the "
        "preflight is refused",
        "incorrect_api_key": "wants its own error type; OpenAI's is `invalid_request_error`",
        "correct_api_key": "wants its own form of answer at `/completions`; here it is OpenAI's",
        "cancel_request": "wants idle slots in `/slots`; here it has the caller's requests alone",
        "infill|ignore_eos|test_completion.py": OWN_API,
    },
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

WORDS = "wants an answer, its words, thoughts or end, that only a trained model gives"

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
    reasons={
        "anthropic_streaming$|anthropic_streaming\\[": "wants tokens from the cache counted as "
        "`input_tokens`; as at Anthropic they are counted apart",
        "cache_usage": "passes `temperature`, which the newest Anthropic client does not take",
        "prompt_logprobs": "vLLM's own `prompt_logprobs`; here `echo` with `logprobs`",
        "prompt_token_ids|truncation_side|logprob_token_ids|response_messages": "other fields of "
        "vLLM's own: prompts and logprobs as token ids, disaggregated prefill",
        "single_chat_session|single_completion|check_models": "wants the names and token counts "
        "of its own model",
        "test_chat_streaming|test_completion_streaming": "wants text in the chunk with the finish "
        "reason; as at OpenAI it has none",
        "stream_options": "vLLM's own `continuous_usage_stats`; `stream_options` without `stream` "
        "is not refused",
        "batch_completions": "beam search",
        "custom_role": "takes any role; here one that is not OpenAI's is refused by name",
        "invocations|tokenizer_info": "vLLM's own `/invocations` and `/tokenizer_info`",
        "detokenize": "wants `prompt` alone; here llama.cpp's `content` stands beside it",
        "test_(simple_input|instructions|chat|previous_response_id|two_responses.*)\\[": WORDS,
        "complex_message|response_format_json|outputs_json|test_structured_output": WORDS,
        "reasoning_(item|tokens)|tool_use|expected_arguments|forced_tool_choice": WORDS,
        "parallel_no_streaming": "wants answers of different lengths within 50 tokens",
        "tokenize_chat": "`/tokenize` of messages; here OpenAI's `/v1/responses/input_tokens`",
        "completion_request_|long_seed": INTERNAL,
    },
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
