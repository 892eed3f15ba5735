"""A chat template with tools, of Qwen's kind, for models whose own writes none."""

TOOLS_CHATML = r"""
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% endif %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (first + '\n\n' if first else '') + '# Tools\n\n' }}
    {{- 'Functions that may be called:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}
    {{- '\n</tools>\n\nA call is a JSON object between marks:\n<tool_call>\n' }}
    {{- '{"name": <function>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif first is defined %}
    {{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- set tool_call = call.function %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- (tool_call.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip()
