"""Tools, calls and results that a chat template leaves out are said in messages that it writes."""

from __future__ import annotations

import json

import pytest

from control_plane.text.answers.pythonic_readers import Lfm2Reader
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.answers.section_readers import DeepSeekV31Reader
from control_plane.text.answers.told_tools import ToldTools
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.simple_tokenizer import SimpleTokenizer
from planes.errors import ValidationError
from tests.control_plane.text.known_templates import LLAMA, QWEN
from tests.control_plane.text.test_formats_of_answers_are_recognised import tokenizer_with

TOOL = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Hi"}


def called(arguments: object = None, content: str = "", name: str = "f", call_id: str = "1"):
    function = {"name": name, "arguments": {"x": 1} if arguments is None else arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(content: str = "42", call_id: str = "1"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
IN_TURNS = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LFM2 = "{{ tools | tojson if tools }}" + PLAIN
OLMO3 = (
    "{{ tools | tojson if tools }}{% for m in messages if m.role != 'tool' %}"
    "<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in "
    "c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
    "{% endfor %}){% endfor %}</function_calls>{% endif %}{% endfor %}"
)
GRANITE = (
    "{% if tools %}Respond with <|tool_call|> and a list of calls.{{ tools | tojson }}{% endif %}"
    + PLAIN
)
D_OPEN, D_CLOSE, D_BEGIN, D_END, D_SEPARATOR = DeepSeekV31Reader.NAMES
DEEPSEEK = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    f"{D_OPEN}{{% for c in m.tool_calls %}}{D_BEGIN}{{{{ c.function.name }}}}{D_SEPARATOR}"
    f"{{{{ c.function.arguments | tojson }}}}{D_END}{{% endfor %}}{D_CLOSE}{{% endif %}}"
    "{% endfor %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def rendered(source: str, messages, tools=None, tokenizer=None) -> str:
    template = ChatTemplate(source)
    formats = AnswerFormats(tokenizer or SimpleTokenizer(), template)
    said = ToldTools(template, formats.calls).rewritten(messages, tools)
    return template.render(said.messages, tools=said.tools)


def test_tools_are_told_in_the_system_message_with_the_form_of_a_call():
    text = rendered(PLAIN, [ASKED], [TOOL, TOOL])
    assert text.startswith("<system># Tools")
    assert text.count(json.dumps(TOOL, ensure_ascii=False) + "\n") == 2
    assert '<tool_call>\n{"name": "NAME_OF_THE_FUNCTION", "arguments": {' in text
    assert text.endswith("<user>Hi")
    both = rendered(PLAIN, [SYSTEM, ASKED], [TOOL, TOOL])
    assert both == text.replace("<system>", "<system>Be brief.\n\n")


def test_where_there_is_no_system_message_the_user_tells_of_them():
    text = rendered(IN_TURNS, [ASKED], [TOOL])
    assert text.startswith("<user># Tools")
    assert text.endswith("answer in words.\n\nHi")


def test_calls_are_written_in_their_message_and_results_come_from_the_user():
    conversation = [ASKED, called(content="Well."), result(), result("43"), ASKED]
    expected = (
        f"<user>Hi<assistant>Well.\n{CALL}<user><tool_response>\n42\n</tool_response>\n"
        "<tool_response>\n43\n</tool_response>\nHi"
    )
    assert rendered(PLAIN, conversation) == expected
    assert rendered(IN_TURNS, conversation) == expected
    answered = [*conversation[:3], {"role": "assistant", "content": "So."}, ASKED]
    assert rendered(IN_TURNS, answered) == (
        f"<user>Hi<assistant>Well.\n{CALL}<user><tool_response>\n42\n</tool_response>"
        "<assistant>So.<user>Hi"
    )


def test_results_come_in_the_order_of_their_calls_with_what_the_user_says_beside_them():
    function = {"name": "f", "arguments": {}}
    calls = [{"id": name, "type": "function", "function": function} for name in "ab"]
    both = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [result("2", "b"), result("?", "x"), result("1", "a")]
    asked = {**ASKED, "name": "Ann"}
    said = ToldTools(ChatTemplate(PLAIN), "hermes").rewritten([ASKED, both, *results, asked], None)
    wrapped = [f"<tool_response>\n{text}\n</tool_response>" for text in "12?"]
    assert said.messages[2:] == [{**asked, "content": "\n".join((*wrapped, "Hi"))}]
    alone = rendered(IN_TURNS, [ASKED, result("1", "a")])
    assert alone == f"<user>Hi\n{wrapped[0]}"


SINGLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}REFUSE{% endif %}"
    "<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("refuses", ["", "{{ raise_exception('one at a time') }}"])
@pytest.mark.parametrize("calls", ["hermes", None])
def test_a_template_that_writes_one_call_of_a_message_gets_each_in_one_of_its_own(refuses, calls):
    template = ChatTemplate(SINGLE.replace("REFUSE", refuses))
    given = [{"id": name, "function": {"name": name, "arguments": {}}} for name in "abc"]
    message = {"role": "assistant", "content": "So.", "thinking": "Hm", "tool_calls": given}
    results = [result("2", "b"), result("?", "x"), result("1", "a"), result("1b", "a")]
    said = ToldTools(template, calls).rewritten([ASKED, message, *results, ASKED], None).messages
    roles = [str(one.get("tool_calls", [{}])[0].get("id") or one["content"]) for one in said]
    assert roles == ["Hi", "a", "1", "1b", "b", "2", "c", "?", "Hi"]
    assert (said[1]["content"], said[1]["thinking"]) == ("So.", "Hm")
    assert (said[4]["content"], "thinking" in said[4]) == ("", False)
    several = ChatTemplate(QWEN)
    kept = ToldTools(several, "hermes").rewritten([ASKED, message, *results], None)
    assert kept.messages == [ASKED, message, *results]


def test_many_results_take_no_longer_than_their_text():
    results = [result("x" * 200_000), *[result("")] * 4000]
    said = ToldTools(ChatTemplate(PLAIN), "hermes").rewritten([ASKED, called(), *results], None)
    assert len(said.messages) == 3
    assert str(said.messages[2]["content"]).count("<tool_response>") == 4001


def test_what_is_nested_too_deep_to_be_written_is_refused():
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    for calls in ("lfm2", "hermes", "qwen3_coder"):
        told = ToldTools(ChatTemplate(PLAIN), calls)
        with pytest.raises(ValidationError, match="nested so deeply") as caught:
            told.rewritten([ASKED, called({"x": deep})], None)
        assert caught.value.field == "messages"


def test_a_conversation_without_tools_stays_as_it_is():
    given = [SYSTEM, ASKED, {"role": "assistant", "content": ""}, ASKED]
    template = ChatTemplate(PLAIN)
    assert ToldTools(template, "hermes").rewritten(given, None) == (given, None)
    assert "tool_places" not in vars(template)  # nothing was tried


@pytest.mark.parametrize("source", [QWEN, LLAMA, DEEPSEEK])
def test_what_a_template_writes_itself_is_left_to_it(source):
    given = [ASKED, called(), result(), ASKED]
    template = ChatTemplate(source)
    calls = AnswerFormats(SimpleTokenizer(), template).calls
    said = ToldTools(template, calls).rewritten(given, None)
    assert said.messages == given


def test_a_template_that_only_writes_calls_is_told_of_tools_in_its_own_format():
    text = rendered(DEEPSEEK, [ASKED, called(), result()], [TOOL])
    assert text.startswith("<system># Tools")
    assert f'{D_BEGIN}NAME_OF_THE_FUNCTION{D_SEPARATOR}{{"NAME_OF_A_PARAMETER"' in text
    assert text.endswith(f'{D_BEGIN}f{D_SEPARATOR}{{"x": 1}}{D_END}{D_CLOSE}<tool>42')


def test_a_template_that_only_tells_of_tools_gets_calls_in_the_format_of_its_vocabulary():
    tokenizer, _ = tokenizer_with([*Lfm2Reader.NAMES])
    assert AnswerFormats(tokenizer, ChatTemplate(LFM2)).calls == "lfm2"
    assert AnswerFormats(SimpleTokenizer(), ChatTemplate(LFM2)).calls is None
    text = rendered(LFM2, [ASKED, called({"x": "a", "y": True}), result()], [TOOL], tokenizer)
    opening, closing = Lfm2Reader.NAMES
    assert text.endswith(f'<assistant>{opening}[f(x="a", y=True)]{closing}<tool>42')
    assert text.startswith("[{")


def test_vocabularies_that_have_marks_of_several_formats_say_nothing():
    tokenizer, _ = tokenizer_with(["<tool_call>", "<|tool_call_start|>"])
    assert AnswerFormats(tokenizer, ChatTemplate(LFM2)).calls is None
    assert AnswerFormats(tokenizer, ChatTemplate(PLAIN)).calls == "hermes"
    tokenizer, _ = tokenizer_with(["[TOOL_CALLS]"])
    assert AnswerFormats(tokenizer, ChatTemplate(PLAIN)).calls == "mistral"


@pytest.mark.parametrize(
    ("told", "calls"),
    [
        ("<tool_call>{name, arguments}</tool_call>", "hermes"),
        ("<tool_call><function=f><parameter=x>", "qwen3_coder"),
        ("<tool_call>f<arg_key>x</arg_key>", "glm45"),
        ("<|tool_call|>[...]", "granite"),
        ("<|tool_call|>[...] or <tool_call>", None),
        ("<function_calls>f()", "olmo3"),
        ("call them", None),
    ],
)
def test_what_is_told_of_tools_shows_the_format_where_no_call_is_written(told, calls):
    source = f"{{% if tools %}}{told}{{{{ tools | tojson }}}}{{% endif %}}{PLAIN}"
    assert AnswerFormats(SimpleTokenizer(), ChatTemplate(source)).calls == calls


def test_results_have_the_role_that_a_template_knows():
    text = rendered(OLMO3, [ASKED, called({"x": "a"}), result()], [TOOL])
    call = '<function_calls>f(x="a")</function_calls>'
    assert text.endswith(f"<user>Hi<assistant>{call}<environment>42")
    text = rendered(GRANITE, [ASKED, called(), result()], [TOOL])
    assert text.endswith('<assistant><|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<tool>42')


def test_where_the_format_is_not_known_or_nothing_is_to_be_read_nothing_is_changed():
    given = [ASKED, called(), result()]
    for calls in (None, "harmony"):
        assert ToldTools(ChatTemplate(PLAIN), calls).rewritten(given, [TOOL]) == (given, [TOOL])
    none = AnswerFormats(SimpleTokenizer(), ChatTemplate(PLAIN), "none")
    assert none.calls is None


def test_calls_are_counted_through_the_conversation_where_their_ids_are():
    given = [ASKED, called(), result(), called(name="g"), result()]
    said = ToldTools(ChatTemplate(PLAIN), "kimi_k2").rewritten(given, None)
    text = ChatTemplate(PLAIN).render(said.messages)
    assert "functions.f:0<" in text
    assert "functions.g:1<" in text
