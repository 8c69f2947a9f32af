"""A chat template computes for so long and no longer, whatever it is given."""

from __future__ import annotations

import jinja2.sandbox
import pytest

from control_plane.text import template_limits
from control_plane.text.chat_template import ChatTemplate
from planes.errors import TokenizationError

LOOKS_AHEAD = """{%- for message in messages %}{{ message.role }}
{%- for later in messages[loop.index:] %}{%- if later.content == '?' %}?{%- endif %}{%- endfor %}
{%- endfor %}"""
"""As those of models do that want to know whether an answer is the last one."""

TWICE_A_LEVEL = """{%- macro kind(spec) %}{{ spec.type }}{%- if spec.of and kind(spec.of) != 'no' %}
{{- ' of ' + kind(spec.of) }}{%- endif %}{%- endmacro %}{{ kind(tools[0]) }}"""
"""As those may that spell the schemas of tools: twice the work with each level."""

LOOPS = {
    "sized": "{% for x in xs %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
    "unsized": "{% for x in xs | map('upper') %}{{ x }}{{ loop.revindex }}{% endfor %}",
    "pairs": "{% for k, v in d.items() %}{{ k }}{{ v }}{{ loop.nextitem }}{% endfor %}",
    "chosen": "{% for x in xs if x != 'b' %}{{ x }}{{ loop.previtem }}{% endfor %}",
    "empty": "{% for x in [] %}{{ x }}{% else %}none{% endfor %}",
    "of text": "{% for x in 'abc' * 20 %}{{ x }}{% endfor %}",
    "of nothing": "{% for x in missing %}{{ x }}{% endfor %}",
    "left": "{% for x in range(100) %}{% if x == 50 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "recursive": "{% for x in tree recursive %}{{ x.n }}{{ loop(x.of) }}{% endfor %}",
    "macro": "{% macro m(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call m(1) %}c{% endcall %}",
    "products": "{{ 3 * 4 }}{{ 'ab' * 3 }}{{ 2 * [1] }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}",
}

VALUES = {
    "xs": ["a", "b", "c"] * 11,
    "d": {"k": 1, "l": 2},
    "tree": [{"n": 1, "of": [{"n": 2, "of": []}]}],
}


@pytest.fixture
def no_time(monkeypatch):
    """Let whoever looks at the clock find that time is up."""
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", -1.0)


def users(count):
    return [{"role": "user", "content": "x"}] * count


@pytest.mark.usefixtures("no_time")
def test_a_loop_over_all_messages_for_each_of_them_ends_when_its_time_is_up():
    template = ChatTemplate(LOOKS_AHEAD)
    assert template.render(users(2)) == "user" * 2
    with pytest.raises(TokenizationError, match="takes more than -1 s for these") as caught:
        template.render(users(500))
    assert caught.value.field == "messages"


@pytest.mark.usefixtures("no_time")
def test_a_loop_as_long_as_a_variable_says_ends_when_its_time_is_up():
    template = ChatTemplate("{% for i in range(n) %}{% endfor %}done")
    assert template.render(users(1), variables={"n": 10}) == "done"
    with pytest.raises(TokenizationError, match="takes more than"):
        template.render(users(1), variables={"n": 100_000})


@pytest.mark.usefixtures("no_time")
def test_a_macro_that_calls_itself_twice_ends_when_its_time_is_up():
    template = ChatTemplate(TWICE_A_LEVEL)
    schema = {"type": "text"}
    assert template.render(users(1), tools=[schema]) == "text"
    for _ in range(40):
        schema = {"type": "list", "of": schema}
    with pytest.raises(TokenizationError, match="takes more than"):
        template.render(users(1), tools=[schema])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * n }}",
        "{{ n * 'x' }}",
        "{{ [1] * n }}",
        "{{ ('xx' * 8388608) * 2 }}",
        "{{ 3 ** n }}",
        "{{ (3 ** 8000) * (3 ** 8000) }}",
    ],
)
def test_a_product_as_large_as_a_variable_says_is_refused(source):
    template = ChatTemplate(source)
    variables = dict.fromkeys(template.variables, 1 << 40)
    with pytest.raises(TokenizationError, match="computes something too large") as caught:
        template.render(users(1), variables=variables)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("case", LOOPS)
def test_what_a_loop_knows_of_itself_is_as_without_limits(case):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    wanted = plain.from_string(LOOPS[case]).render(VALUES)
    template = ChatTemplate(LOOPS[case])
    given = {name: VALUES[name] for name in VALUES if name in template.variables}
    assert template.render(users(1), variables=given) == wanted
