"""A chat template built like Gemma 4's, shortened, and one like the first versions of it."""

_WRITTEN = """{%- macro written(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}
        {{ '{' }}
        {%- for k, v in value | dictsort -%}
            {{ k }}:{{ written(v) }}{{ ',' if not loop.last }}
        {%- endfor -%}
        {{ '}' }}
    {%- elif value is sequence -%}
        {{ '[' }}{% for v in value %}{{ written(v) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
    {%- else -%}{{ value }}
    {%- endif -%}
{%- endmacro -%}
"""
_TOOLS = """{{- bos_token -}}
{%- if tools or enable_thinking -%}
    {{ '<|turn>system\\n' }}{{ '<|think|>\\n' if enable_thinking }}
    {%- for tool in tools or [] -%}
        <|tool>declaration:{{ tool.function.name }}{description:
        {{- written(tool.function.description) }},parameters:
        {{- written(tool.function.parameters or {}) }}}<tool|>
    {%- endfor -%}
    {{ '<turn|>\\n' }}
{%- endif -%}
"""
_CALLS = """{%- for call in m.tool_calls or [] -%}
    {{ '<|tool_call>call:' + call.function.name }}
    {{- written(call.function.arguments) }}<tool_call|>
{%- endfor -%}
"""
_OPENING = """{%- if add_generation_prompt and ns.last not in ['tool_response', 'tool_call'] -%}
    {{ '<|turn>model\\n' }}{{ '<|channel>thought\\n<channel|>' if not enable_thinking }}
{%- endif -%}"""
_THOUGHT = """{%- if m.reasoning_content and m.tool_calls -%}
    {{ '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}
{%- endif -%}
"""

GEMMA4 = f"""{_WRITTEN}{_TOOLS}{{%- set ns = namespace(last='') -%}}
{{%- for m in messages if m.role != 'tool' -%}}
    {{%- set ns.last = '' -%}}
    {{{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}}}
    {_THOUGHT}{_CALLS}
    {{%- for t in messages if m.tool_calls and t.role == 'tool' -%}}
        {{%- for call in m.tool_calls if call.id == t.tool_call_id -%}}
            {{%- set ns.last = 'tool_response' -%}}
            {{{{ '<|tool_response>response:' + call.function.name + '{{value:' }}}}
            {{{{- written(t.content) }}}}}}<tool_response|>
        {{%- endfor -%}}
    {{%- endfor -%}}
    {{{{ m.content | trim }}}}
    {{%- if m.tool_calls and not ns.last -%}}
        <|tool_response>{{%- set ns.last = 'tool_call' -%}}
    {{%- elif m.content -%}}{{{{ '<turn|>\\n' }}}}
    {{%- endif -%}}
{{%- endfor -%}}
{_OPENING}"""

EARLIER_GEMMA4 = f"""{_WRITTEN}{_TOOLS}{{%- set ns = namespace(last='') -%}}
{{%- for m in messages -%}}
    {{%- set ns.last = '' -%}}
    {{{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}}}
    {_CALLS}
    {{%- for t in m.tool_responses or [] -%}}
        {{%- set ns.last = 'tool_response' -%}}
        {{{{ '<|tool_response>response:' + t.name + '{{value:' }}}}{{{{ written(t.response) }}}}
        {{{{- '}}<tool_response|>' }}}}
    {{%- endfor -%}}
    {{{{ m.content | trim }}}}
    {{%- if not (m.tool_responses and not m.content) -%}}{{{{ '<turn|>\\n' }}}}{{%- endif -%}}
{{%- endfor -%}}
{_OPENING}"""
"""Results are told in the message of their calls, which others have behind it."""
