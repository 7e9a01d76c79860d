"""Chat templates like those of well-known models, written for tests."""

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

CHATML_BLOCKS = """
{% for message in messages %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if tools %}{{ '<tools>' + (tools | tojson(indent=2)) + '</tools>' }}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}{%- set first = messages[0]['content'] + '\n\n' %}
{%- else %}{%- set rest = messages %}{%- set first = '' %}{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (first if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}
"""

GEMMA = """
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{% for message in messages %}
{% if not message.content %}{% continue %}{% endif %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

ALL = {
    "chatml": CHATML,
    "chatml with blocks": CHATML_BLOCKS,
    "llama 3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": " Which animal sat? "},
    {"role": "assistant", "content": "The cat sat.\n"},
    {"role": "user", "content": "Where, {{ 1 }} \u00e9?"},
    {"role": "assistant", "content": "On the mat \u2713"},
]
