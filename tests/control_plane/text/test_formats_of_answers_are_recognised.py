"""Which format a model's answers have is read off its chat template."""

from __future__ import annotations

import pytest

from control_plane.text.answers.call_readers import HermesReader
from control_plane.text.answers.glm_reader import GlmReader
from control_plane.text.answers.parser import Thinking
from control_plane.text.answers.pythonic_readers import Lfm2Reader
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.answers.section_readers import DeepSeekV3Reader, KimiReader
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.simple_tokenizer import SimpleTokenizer
from tests.control_plane.text.known_templates import (
    DEEPSEEK,
    LLAMA,
    MARKED,
    MISTRAL,
    MISTRAL_SMALL,
    QWEN,
    QWEN_CODER,
    QWQ,
)

WRITTEN = "{{ m.tool_calls[0].function | tojson }}"


def writing(calls) -> str:
    """A template that writes this for a message with a call."""
    return f"{{% for m in messages if m.tool_calls %}}{calls}{{% endfor %}}"


HERMES = f"<tool_call>{WRITTEN}</tool_call>"
CODER = (
    "{% set called = m.tool_calls[0].function %}<function={{ called.name }}>"
    "{% for name, value in called.arguments.items() %}<parameter={{ name }}>{{ value }}</parameter>"
    "{% endfor %}</function>"
)
OPEN, CLOSE, BEGIN, END, SEPARATOR = DeepSeekV3Reader.NAMES
DEEPSEEK_R1 = (
    "{{ '<think>' if add_generation_prompt }}{% for m in messages if m.content is none %}"
    f"{OPEN}{{% for c in m.tool_calls %}}{{{{ '{BEGIN}' + c.type + '{SEPARATOR}' + c.function.name "
    f"+ '\n```json\n' + c.function.arguments + '\n```{END}' }}}}{{% endfor %}}{CLOSE}{{% endfor %}}"
)
GLM = (
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}NL"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>NL"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>NL{% endfor %}</tool_call>"
    "{% endfor %}"
)
SEED = (
    "{% set called = m.tool_calls[0].function %}<seed:think></seed:think>\n<seed:tool_call>\n"
    "<function={{ called.name }}>\n{% for name, value in called.arguments.items() %}"
    "<parameter={{ name }}>{{ value }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
    "</minimax:tool_call>"
)
DEEPSEEK_V31 = writing(
    f"{OPEN}{{% for c in m.tool_calls %}}{BEGIN}{{{{ c.function.name }}}}{SEPARATOR}"
    f"{{{{ c.function.arguments | tojson }}}}{END}{{% endfor %}}{CLOSE}"
)


def kimi(call_id: str) -> str:
    """With ids of its own, or those of the calls, which it wants to be such ones."""
    opening, close, begin, end, arguments = KimiReader.NAMES
    return writing(
        f"{opening}{{% for c in m.tool_calls %}}{begin}{{{{ {call_id} }}}}{arguments}"
        f"{{{{ c.function.arguments | tojson }}}}{end}{{% endfor %}}{close}"
    )


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = f"{{% if tools %}}{LOOPS}{{% endif %}}"
LATE = writing(f"{{% for i in range(99999) %}}-{{% endfor %}}{HERMES}")
ASK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def formats(source, **options) -> AnswerFormats:
    return AnswerFormats(SimpleTokenizer(), source and ChatTemplate(source), **options)


@pytest.mark.spread(28)
@pytest.mark.parametrize(
    ("source", "calls", "reasoning"),
    [
        (LLAMA, "llama3_json", None),
        (QWEN, "hermes", "think"),
        (MISTRAL, "mistral", None),
        (MISTRAL_SMALL, "mistral", None),
        (MARKED, "hermes", None),  # told of tools in a message, as all that know nothing of them
        (DEEPSEEK, "hermes", "think"),
        (
            QWQ,
            "hermes",
            "think",
        ),  # its prompt begins the answer otherwise than its earlier messages
        (QWEN_CODER, "qwen3_coder", None),  # between the marks of hermes
        (writing(CODER), "qwen3_coder", None),
        (writing(GLM.replace("NL", "\n")), "glm45", None),
        (writing("<think></think>" + GLM.replace("NL", "")), "glm45", "think"),
        (writing(SEED), "seed_oss", "seed_oss"),
        (writing(MINIMAX), "minimax_m2", None),
        (DEEPSEEK_R1, "deepseek_v3", "think"),
        (DEEPSEEK_V31, "deepseek_v31", None),
        (kimi("'functions.' + c.function.name + ':' + loop.index0 | string"), "kimi_k2", None),
        (kimi("c.id"), "kimi_k2", None),
        (writing(f"<tool_call>{CODER}</tool_call>"), "qwen3_coder", None),
        (writing(f"<tool_call>{CODER}{HERMES}"), None, None),  # two formats
        (writing(HERMES + CODER), None, None),
        ("{{ messages[0].content }}", "hermes", None),
        ("{{ raise_exception('no') }}", None, None),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}<tool_call>", None, None),
        (writing(HERMES), "hermes", None),
        (writing(f"{HERMES}[TOOL_CALLS][{WRITTEN}]"), None, None),  # two formats
        (writing(HERMES + HERMES), None, None),  # two calls of one
        (writing('<tool_call>{"name": "look_up", "arguments": {}}'), None, None),  # another call
        (
            writing('<tool_call>{"name": "look", "arguments": {"key": "a b", "count": 2}}'),
            None,
            None,
        ),
        (ENDLESS, None, None),
        (LATE, None, None),
        (LATE.replace("99999", "99"), "hermes", None),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", None, None),
        ("{{ messages[1].nothing.at_all }}", None, None),
        ("{{ messages[0].content }}<think>", "hermes", "think"),
        ("{{ messages[0].content.split('</think>')[-1] }}", "hermes", "think"),
        ("{{ messages[0].content }}[THINK]", "hermes", "mistral"),
        ("{{ messages[0].content.split('[/THINK]')[-1] }}", "hermes", "mistral"),
        ("[THINK]{{ messages[0].content.split('</think>')[-1] }}", "hermes", "think"),
        (None, None, None),
    ],
)
def test_the_template_shows_the_format(source, calls, reasoning):
    known = formats(source)
    assert (known.calls, known.reasoning) == (calls, reasoning)


def test_without_tools_an_answer_is_read_as_text_where_its_template_knows_no_reasoning():
    assert formats(MARKED).of("A: ", tools=[]) is None
    assert formats(LLAMA).of("", tools=[]) is None


def test_the_operator_may_say_otherwise():
    known = formats(QWEN, tool_call_parser="none", reasoning_parser="none")
    assert known.of("", tools=[TOOL]) is None
    known = formats(MARKED, tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    found = known.of("A: ", tools=[TOOL])
    assert (found.calls, found.thinking) == (HermesReader, Thinking.MAY_BEGIN)


@pytest.mark.parametrize(
    ("source", "variables", "thinking"),
    [
        (QWEN, {}, Thinking.MAY_BEGIN),
        (QWEN, {"enable_thinking": False}, None),
        (DEEPSEEK, {}, Thinking.HAS_BEGUN),
        (LLAMA, {}, None),
    ],
)
def test_the_prompt_shows_where_the_reasoning_is(source, variables, thinking):
    prompt = ChatTemplate(source).render(ASK, variables=variables)
    found = formats(source).of(prompt, tools=[])
    assert (found and found.thinking) == thinking


MAGISTRAL = (
    "[SYSTEM_PROMPT]First [THINK]your thoughts[/THINK] Then your answer.[/SYSTEM_PROMPT]"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls[0].function.name }}[ARGS]"
    "{{ m.tool_calls[0].function.arguments | tojson }}</s>{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}{% if continue_thinking %}[THINK]{% endif %}"
)


@pytest.mark.parametrize(
    ("variables", "thinking"), [({}, Thinking.MAY_BEGIN), ({"continue_thinking": True}, None)]
)
def test_reasoning_between_mistrals_marks_is_split_off(variables, thinking):
    prompt = ChatTemplate(MAGISTRAL).render(ASK, tools=[TOOL], variables=variables)
    known = formats(MAGISTRAL)
    assert (known.calls, known.reasoning) == ("mistral", "mistral")
    found = known.of(prompt, tools=[TOOL])
    assert found.thinking is (thinking or Thinking.HAS_BEGUN)
    begin = "[THINK]" if thinking else ""
    answer = f'{begin}</think> hm[/THI]\n[/THINK]\nSo:[TOOL_CALLS]f[ARGS]{{"a": 1}}'
    for cut in range(len(answer)):
        parser = found.parser()
        parts = [parser.push(answer[:cut]), parser.push(answer[cut:]), parser.finish()]
        assert "".join(part.reasoning for part in parts) == "</think> hm[/THI]"
        assert "".join(part.content for part in parts) == "So:"
        (name,) = {call.name for part in parts for call in part.calls if call.name}
        assert name == "f"


@pytest.mark.parametrize(
    ("continued", "thinking"),
    [
        ("<think>\nWell", Thinking.HAS_BEGUN),
        (" \n<think>", Thinking.HAS_BEGUN),
        ("<think>hm</think>Well", None),
        ("<think>hm</think>The mark <think>", None),
        ("The mark <think> begins", None),
        ("Well", None),
    ],
)
def test_a_message_that_is_gone_on_with_shows_it_too(continued, thinking):
    prompt = f"<|im_start|>assistant\n{continued}"
    found = formats(QWEN).of(prompt, tools=[], continued=continued)
    assert (found and found.thinking) == thinking


def test_only_an_answer_that_begins_a_message_is_at_its_start():
    assert formats(LLAMA).of("A: ", tools=[TOOL]).is_start
    assert not formats(LLAMA).of("A: Well", tools=[TOOL], continued="Well").is_start


def tokenizer_with(special, added=()):
    """One of bytes, and names of ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from control_plane.text.huggingface_tokenizer import load_huggingface_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", *special])
    backend.add_tokens([*added])
    return load_huggingface_tokenizer(backend.to_str().encode()), backend.token_to_id


def test_what_parameters_are_is_known_where_calls_cannot_be_read_without():
    schema = {"properties": {"a": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    found = formats(QWEN_CODER).of("A: ", tools=tools)
    assert found.parameters == {"f": {"a": {"string"}}}
    assert formats(QWEN).of("A: ", tools=tools).parameters == {}


def test_markers_that_are_special_tokens_are_spelled_out():
    # An added one that is not special has text as it is.
    tokenizer, token_id = tokenizer_with(["[TOOL_CALLS]"], ["[ARGS]"])
    known = AnswerFormats(tokenizer, ChatTemplate(MISTRAL))
    found = known.of("", tools=[TOOL])
    assert found.spelled == {token_id("[TOOL_CALLS]"): "[TOOL_CALLS]"}


@pytest.mark.parametrize(
    ("parser", "of_calls"),
    [
        ("hermes", ["<tool_call>", "</tool_call>"]),
        ("qwen3_coder", ["<tool_call>", "</tool_call>"]),
        ("llama3_json", ["<|python_tag|>"]),
        ("mistral", ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]),
        ("glm45", [*GlmReader.NAMES]),
        ("seed_oss", ["<seed:tool_call>", "</seed:tool_call>"]),
        ("minimax_m2", ["<minimax:tool_call>", "</minimax:tool_call>"]),
        ("lfm2", [*Lfm2Reader.NAMES]),
        ("deepseek_v3", [*DeepSeekV3Reader.NAMES]),
        ("kimi_k2", [*KimiReader.NAMES]),
    ],
)
def test_marks_of_calls_are_spelled_where_there_are_tools_those_of_reasoning_always(
    parser, of_calls
):
    thinks = ["<think>", "</think>"]
    tokenizer, _ = tokenizer_with([*of_calls, *thinks])
    known = AnswerFormats(tokenizer, None, tool_call_parser=parser, reasoning_parser="think")
    for tools, names in (([], thinks), ([TOOL], [*thinks, *of_calls])):
        found = known.of("A: ", tools=tools)
        assert sorted(found.spelled.values()) == sorted(names)
