"""The light tokenizer measures what the real one makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleuve.config.light_tokenizer import LightTokenizer
from fleuve.config.settings import DataSettings
from fleuve.data.render import prompt_ids, prompt_text
from fleuve.data.rows import Row
from fleuve.modeling.char_tokenizer import build_char_tokenizer

TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0].content | trim }}{{ '\\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {{- bos_token }}<{{ message.role }}> {{ {"a": "é<b>"} | tojson }}
{{ message['content'] }}
{%- endfor %}
{% if add_generation_prompt %}{{ eos_token }}<assistant>{% endif %}
"""


@pytest.mark.parametrize("template", ["none", "chat"])
@pytest.mark.parametrize("system", [None, "Think first. "])
def test_it_renders_and_encodes_as_transformers_does(tmp_path: Path, template: str, system: str | None) -> None:
    real = build_char_tokenizer(' \n.,:?+{}<>"éabcdefghijklmnopqrstuvwxyz0123456789T')
    real.bos_token = "<eos>"
    real.chat_template = TEMPLATE
    real.save_pretrained(tmp_path)
    light = LightTokenizer(tmp_path)
    data = DataSettings.model_validate(
        {"train": "-", "template": template, "system_prompt": system, "instruction": "solve: {prompt}\n"}
    )
    row = Row("here", {"prompt": "12+3?\n", "answer": "15"})
    text = prompt_text(row, data, real)
    assert prompt_text(row, data, light) == text
    assert prompt_ids(text, data, light) == prompt_ids(text, data, real)
    assert "12+3?" in text
