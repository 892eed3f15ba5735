"""One call, `get_weather(city="Oslo", days=3)`, as every tool format writes it."""

import re

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
ARGUMENTS = '{"city": "Oslo", "days": 3}'

_ARGS = (
    "get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value>"
)
CALLS = {  # by the name of mlx-lm's parser
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}"
    "<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
    "glm47": f"<tool_call>{_ARGS}</tool_call>",
    "json_tools": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "laguna": f"<tool_call>{_ARGS}</tool_call>",
    "longcat": re.sub(r"(</?)", r"\1longcat_", f"<tool_call>{_ARGS}</tool_call>"),
    "minicpm5": '<function name="get_weather"><param name="city">Oslo</param>'
    '<param name="days">3</param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Oslo</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "pythonic": '<|tool_call_start|>[get_weather(city="Oslo", days=3)]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
}
HARMONY_TOKENS = ["start", "end", "message", "channel", "constrain", "call", "return"]
HARMONY_CALL = (
    "<|channel|>analysis<|message|>They ask for Oslo.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ARGUMENTS
)

# As Qwen's: every call on a line of its own, also the first behind text.
LINES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ (c.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def special_tokens(text: str) -> list[str]:
    """The delimiters in a text that are special tokens of such a model."""
    return sorted(set(re.findall(r"</?\|?[\w:]+\|?>|<\|\"\|>|\[[A-Z_]+\]", text)))
