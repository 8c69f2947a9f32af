from __future__ import annotations

import pytest

from control_plane.text.chat_template import ChatTemplate, up_to_the_end_of_the_last
from planes.errors import TokenizationError, ValidationError
from tests.control_plane.text.known_templates import LLAMA, QWEN

CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}
{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def user(content):
    return [{"role": "user", "content": content}]


def reference(source, messages, **kwargs):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **kwargs)
    return rendered[0]


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
        "{% for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "  {{ m.content | trim }}\n{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}",
        # What Qwen's templates are made of.
        "{%- for m in messages[::-1] %}{% if m.content is string and m.content.startswith(' ') %}"
        "{{- loop.index0 }}{{ m.content.split('你')[-1].lstrip() }}{% endif %}{% endfor %}"
        "{%- if enable_thinking is defined and enable_thinking is false %}no{% endif %}",
    ],
)
def test_it_renders_what_transformers_renders(source):
    messages = [
        {"role": "system", "content": "Be <kind> & 'brief'."},
        *user(" 你好 👋 "),
        {"role": "assistant", "content": "Hi"},
    ]
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages)
    theirs = reference(
        source, messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert ours == theirs


def test_a_template_may_refuse_a_conversation():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizationError, match="roles must alternate"):
        template.render(user("x"))


def test_a_template_may_ask_for_the_date():
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render(user("x"))) == 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ self._TemplateReference__context }}{{ cycler.__init__.__globals__ }}",
        "{{ undefined.attribute }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_hostile_or_broken_template_ends_in_a_typed_error(source):
    with pytest.raises(TokenizationError):
        ChatTemplate(source).render(user("x"))


def test_a_template_that_is_no_template_is_refused_when_loaded():
    with pytest.raises(TokenizationError, match="chat template is invalid"):
        ChatTemplate("{% for %}")


def test_a_template_that_never_ends_is_cut_off(monkeypatch):
    monkeypatch.setattr("control_plane.text.chat_template.MAX_RENDERED_CHARACTERS", 1000)
    with pytest.raises(TokenizationError, match="at most 1000 characters"):
        ChatTemplate("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}").render(user("x"))


def test_no_template_keeps_anything_for_the_next_conversation():
    keeps = "{{ dict.update(stash, {'seen': messages[0].content}) }}{{ stash }}"
    template = ChatTemplate(keeps, defaults={"stash": {}})
    with pytest.raises(TokenizationError, match="has no attribute 'update'"):
        template.render(user("secret"))


def test_variables_are_those_of_the_request_over_the_defaults():
    source = (
        "{{ a }}{{ b }}{{ c }}{{ messages | length }}{{ bos_token }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(source, bos_token="<s>", defaults={"a": 1, "b": 2, "messages": []})
    assert template.render(user("x")) == "121<s>True"
    assert template.render(user("x"), variables={"b": 3, "c": None}) == "13None1<s>True"
    # Nobody tells a template what the server tells it.
    own = {"messages": [], "bos_token": "!", "add_generation_prompt": "!", "self": 1}
    assert template.render(user("x"), variables=own) == "121<s>True"


def test_a_variable_that_is_not_read_is_refused_with_those_that_are():
    template = ChatTemplate("{{ enable_thinking }}{{ range(2) }}{{ messages }}")
    template.check_variables(["enable_thinking"])
    for name in ("enable_thinkin", "range", "messages", "", "x" * 99):
        with pytest.raises(ValidationError, match=r"it reads enable_thinking$") as caught:
            template.check_variables(["enable_thinking", name])
        assert caught.value.field == "chat_template_kwargs"
        assert repr(name[:32]) in caught.value.message
    with pytest.raises(ValidationError, match="it reads no other variable"):
        ChatTemplate("{{ messages }}").check_variables(["x"])


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = x | default(1) %}{{ x }}",
        "{% set x = x if x is defined else 1 %}{{ x }}",
        "{% if not x is defined %}{% set x = 1 %}{% endif %}{% for m in messages %}{{ x }}"
        "{% endfor %}",
        "{% macro told() %}{{ x }}{% endmacro %}{{ told() }}",
        "{% set ns = namespace(told=x) %}{{ ns.told }}",
        "{% with x = x %}{{ x }}{% endwith %}",
        "{% block told %}{{ x }}{% endblock %}",
    ],
)
def test_a_variable_is_known_however_a_template_reads_it(source):
    template = ChatTemplate(source)
    assert template.variables == {"x"}
    assert template.render(user("c"), variables={"x": 7}) == "7"


def test_documents_are_none_unless_a_caller_gives_some():
    template = ChatTemplate("{{ documents is none }}")
    assert template.render(user("x")) == "True"
    assert template.render(user("x"), variables={"documents": []}) == "False"


def test_a_default_takes_no_function_away():
    template = ChatTemplate("{{ range(2)|list }}", defaults={"range": 1})
    assert template.render(user("x")) == "[0, 1]"


@pytest.mark.parametrize("source", [CHATML, LLAMA, QWEN, "{{ messages[-1].content | trim }}<end>"])
@pytest.mark.parametrize("said", ["Well, ", "\n Well", "im", "<think>\nhm\n</think>\n\nWell"])
def test_a_message_is_gone_on_with_as_transformers_does(source, said):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*user("Hi"), {"role": "assistant", "content": said}]
    theirs, _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, bos_token="<s>"
    )
    ours = ChatTemplate(source, bos_token="<s>")
    assert theirs == [up_to_the_end_of_the_last(ours.render, messages, add_generation_prompt=False)]
