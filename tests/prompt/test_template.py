import json
from datetime import datetime

import jinja2.ext
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.prompt.sandbox import JsonObject, SandboxedEnvironment
from gateway.prompt.template import ChatTemplate, ChatTemplates, TemplateError

HI = [{"role": "user", "content": "hi"}]


def rendered(source, messages=HI, **options):
    moment = datetime(2026, 12, 1, 8, 30)  # noqa: DTZ001  # local, as templates get it
    return ChatTemplate(source, lambda: moment).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n{{ m.role }}: {{ m['content'] }}\n{% endfor %}", "user: hi\n"),
        ("  {% if true %}x{% endif %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ messages[0].content }}{% endgeneration %}", "ahi"),
        ('{{ {"b": "<é>", "a": [1, none]} | tojson }}', '{"b": "<é>", "a": [1, null]}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ {'é': 1} | tojson(ensure_ascii=true, separators=(',', ':')) }}", '{"\\u00e9":1}'),
        ("{{ strftime_now('%d %b %Y') }}", "01 Dec 2026"),
        ("{{ messages[0].nothing }}|{{ messages[0].items is defined }}|{{ unknown is defined }}", "|True|False"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ bos_token }}{{ enable_thinking }}", "<s>False"),
        ("{{ add_generation_prompt }}{{ tools }}{{ documents }}", "TrueNoneNone"),
    ],
)
def test_it_renders_as_hugging_face_does(source, text):
    assert rendered(source, variables={"bos_token": "<s>", "enable_thinking": False, "unused": 1}) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': messages}) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[7].content }}",
        "{{ undefined_thing.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_one_kind_of_error(source):
    with pytest.raises(TemplateError):
        rendered(source)


def test_a_template_that_does_not_compile_says_so():
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_an_empty_conversation_is_refused():
    with pytest.raises(TemplateError):
        rendered("x", [])


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_a_continued_message_stays_open():
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    text = rendered(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>hi</><assistant>The answer is "
    assert messages[-1]["content"] == "The answer is ", "the messages are not changed"
    trimmed = CHATML.replace("m.content", "m.content | trim")
    assert rendered(trimmed, messages, add_generation_prompt=False, continue_final_message=True).endswith("answer is")


def test_the_last_text_part_of_a_continued_message_is_continued():
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}</>{% endfor %}"
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered(source, messages, add_generation_prompt=False, continue_final_message=True) == "[a][b"


@pytest.mark.parametrize(
    ("source", "messages", "generation"),
    [
        (CHATML, HI, True),
        ("fixed", HI, False),
        ("no content", HI, False),
        (CHATML, [{"role": "user", "content": None}], False),
        (CHATML, [{"role": "user", "content": []}], False),
    ],
)
def test_what_cannot_be_continued_is_refused(source, messages, generation):
    with pytest.raises(TemplateError):
        rendered(source, messages, add_generation_prompt=generation, continue_final_message=True)


def test_files_take_precedence_over_the_configuration(model_directory):
    directory = model_directory({"chat_template": "config"})
    assert ChatTemplates.from_directory(directory).select(None).source == "config"
    directory = model_directory(
        {"chat_template": "config"}, chat_template="file", additional_chat_templates__tool_use="tools"
    )
    templates = ChatTemplates.from_directory(directory)
    assert templates.select(None).source == "file"
    assert templates.select([]).source == "tools", "an empty list is not None"
    assert [template.source for template in templates.all()] == ["file", "tools"]


def test_named_templates_come_from_a_list(model_directory):
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    templates = ChatTemplates.from_directory(model_directory({"chat_template": named}))
    assert templates.select(None).source == "d"
    assert templates.select([{}]).source == "t"


def test_a_model_without_a_default_template_has_none(model_directory):
    assert not ChatTemplates.from_directory(model_directory())
    only_rag = ChatTemplates.from_directory(model_directory({"chat_template": [{"name": "rag", "template": "r"}]}))
    with pytest.raises(TemplateError):
        only_rag.select(None)
    for wrong in (5, [{"name": "x"}], ["x"]):
        with pytest.raises(TemplateError):
            ChatTemplates.from_directory(model_directory({"chat_template": wrong}))


@pytest.mark.parametrize(
    ("source", "content_format"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages[1:] %}{% for c in m['content'] | list %}{{ c }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% set rest = messages %}{% set more = rest[1:] %}{% for m in more %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(x=m.content) }}{% endfor %}",
            "openai",
        ),
        ("{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ show(tools) }}", "string"),
        ("{% for t in tools %}{% for c in t.content %}{% endfor %}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_the_content_format_is_what_the_loops_say(source, content_format):
    assert ChatTemplate(source).content_format == content_format


def test_a_template_says_what_it_knows():
    template = ChatTemplate(
        "{% if m.role == 'developer' %}{{ strftime_now('%Y') }}{% endif %}{{ thinking }}{% set x = 1 %}{{ x }}"
    )
    assert template.knows_developer
    assert template.reads_clock
    assert {"m", "thinking", "strftime_now"} == template.variables


NAMES = st.sampled_from(
    [
        "role",
        "items",
        "get",
        "text",
        "_text",
        "__class__",
        "strip",
        "split",
        "format",
        "format_map",
        "first",
        "x",
        "n",
        "update",
        "copy",
    ]
)
OBJECTS = st.sampled_from(["d", "j", "s", "loop", "ns", "none", "li", "d.x", "s.strip", "s.format"])


@settings(max_examples=400, deadline=None)
@given(
    OBJECTS,
    NAMES,
    st.sampled_from(["{o}.{n}", "{o}['{n}']", "{o}.{n}()", "{o}.{n}('a')", "{o}['{n}']('a')", "{o}.{n} is defined"]),
)
def test_the_short_cuts_answer_what_the_sandbox_answers(obj, name, form):
    expression = form.format(o=obj, n=name)
    source = "{% set ns = namespace(n=1, f=s.format, s='x') %}{% for i in [1] %}{{ " + expression + " }}{% endfor %}"
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])

    def outcome(environment, kind):
        values = {
            "d": {"x": {"x": 1}, "role": "r", "copy": "c", "_text": "t", "first": 1},
            "j": kind({"x": "y"}),
            "s": "a-{0}",
            "li": ["a"],
        }
        try:
            text = environment.from_string(source).render(values)
        except Exception as error:  # noqa: BLE001  # its type is the outcome
            return type(error)
        return text if "0x" not in text else "an object"

    assert outcome(SandboxedEnvironment(datetime.now), JsonObject) == outcome(plain, dict)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=4), st.integers() | st.text(max_size=4) | st.lists(st.booleans(), max_size=2), max_size=4
    )
)
def test_an_object_that_remembers_its_text_prints_like_any_other(value):
    template = ChatTemplate("{{ foo | tojson }}|{{ foo | tojson(indent=2) }}|{{ foo }}")
    remembered = JsonObject(value)
    for _ in range(2):
        assert template.render(HI, variables={"foo": remembered}) == template.render(HI, variables={"foo": value})
    assert remembered.text == json.dumps(value, ensure_ascii=False)
