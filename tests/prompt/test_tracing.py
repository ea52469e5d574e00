import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.prompt.shapes import Shape
from gateway.prompt.splitting import Splitter
from gateway.prompt.template import ChatTemplate, TemplateError

FOLLOWED = [
    "{{ m.content }}",
    "{{ m['content'] | trim }}",
    "{{ m.content | trim('a') | string }}",
    "{{ m.content.strip('\\n').lower() }}",
    "{{ m.content.replace('a', '<|im_end|>') }}",
    "{{ m.content.removeprefix('<').title() }}",
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}",
    "{{ m.content ~ '<|' ~ loop.index ~ m.content }}",
    "{{ m.content | default('none') }}",
    "{{ m.get('content') }}",
    "{% for key, value in m.items() %}{{ key }}={{ value }}{% endfor %}",
    "{% if '</think>' in m.content %}T{% else %}{{ m.content }}{% endif %}",
    "{% if m.content.startswith('<') and not m.content.endswith('>') %}{{ m.content.lstrip('<') }}{% endif %}",
    "{% if m.content %}{{ m.content }}{% endif %}",
    "{% if ('!' + m.content) %}{{ m.content }}{% endif %}",
    "{% if ('' + m.content) and (m.content ~ '') != 'b' %}{{ m.content }}{% endif %}",
    "{% if m.content == 'a' or m.content != '' %}yes{% endif %}",
    "{{ m.content in ['a', '', '\\n'] }}",
    "{{ m.content is string }}{{ m.content is none }}{{ m.content is mapping }}{{ m.content is iterable }}",
    "{{ m.content is eq 'a' }}{{ m.content == none }}{{ m.content == 1 }}",
    "{{ m.content.strip() or 'nothing' }}",
    "{% set x = m.content | trim %}{{ x }}{{ x.upper() }}",
    "{% set ns.text = ns.text + m.content %}",
    "{% set x %}[{{ m.content }}]{% endset %}{{ x }}",
    "{{ show(m.content) }}",
    "{% call show(m.content) %}{{ m.content }}{% endcall %}",
    "{% filter trim %}{{ m.content }}{% endfilter %}",
    "{{ messages[::-1][0].content }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ (messages | first).content }}{{ messages | length }}{{ loop.last }}",
    "{{ loop.previtem.content if loop.previtem is defined else '' }}",
    "{% if m.content and loop.nextitem is defined %}{% continue %}{% endif %}",
]
REFUSED = [
    "{{ m.content | length }}",
    "{% if m.content | length > 2 %}long{% endif %}",
    "{{ m.content[0] }}",
    "{{ m.content[:2] }}",
    "{{ m.content[::-1] }}",
    "{{ m.content.split('a')[-1] }}",
    "{{ m.content.find('a') }}",
    "{{ m | tojson }}",
    "{{ messages | tojson | length }}",
    "{{ m }}",
    "{{ m.content.strip }}",
    "{{ messages | map(attribute='content') | join('|') }}",
    "{{ messages | groupby('content') | length }}",
    "{{ messages | map(attribute='content') | unique | list | length }}",
    "{% for c in m.content %}.{% endfor %}",
    "{{ '%s' % m.content }}",
    "{{ '%s' | format(m.content) }}",
    "{{ '{}'.format(m.content) }}",
    "{{ 'a'.join([m.content, 'b']) }}",
    "{{ 'abc'.startswith(m.content) }}",
    "{{ m.content in 'abc' }}",
    "{{ m.content | int }}",
    "{{ m.content | e }}",
    "{{ m.content | replace('a', 'b') }}",
    "{{ m.content < 'b' }}",
    "{{ m.content == messages[0].content ~ 'a' }}",
    "{{ m.content is upper }}",
    "{{ m.content is sameas 'a' }}",
    "{{ loop.changed(m.content) }}",
    "{{ loop.cycle(m.content, 'b') }}",
    "{{ {m.content: 1} | length }}",
    "{{ m.content * 2 }}",
    "{{ 'abc'[m.content | length] }}",
    "{{ m[m.content] is defined }}",
    "{{ m.content.nothing is defined }}",
    "{{ [m.content, 'b'] | sort | first }}",
    "{{ [m.content] | sum(start='') }}",
    "{{ m.content | trim | wordcount }}",
    "{{ cycler(m.content).next() }}",
    "{{ m.content | list | length }}",
    "{{ m.content | first }}",
    "{{ m.content is sequence and m.content | last }}",
    "{{ [1, 2, 3] | random }}",
    "{{ strftime_now('%f') }}",
    "{{ lipsum(n=1) }}",
    "{{ range(3) | map('string') | join(m.content) }}",
    "{{ 'x' | default(m.content) }}",
    "{{ 'x' | indent(m.content) }}",
    "{{ m.content is in ['a', messages[0].content ~ 'b'] }}",
]
FRAMES = [
    "{% for m in messages %}BODY{% endfor %}",
    "{% for m in messages[::-1] %}BODY<|im_end|>\n{% endfor %}",
    "{% for m in messages if m.content %}BODY{% endfor %}{{ messages[0].content }}",
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\nBODY<|im_end|>{% endfor %}",
]
HEAD = "{% macro show(x) %}({{ x }}{{ caller() if caller }}){% endmacro %}{% set ns = namespace(text='') %}"
TAIL = "{{ ns.text }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

SPLITTER = Splitter(["<|im_start|>", "<|im_end|>", "<|im_end|>>", "<x"], ["<|im_start|>", "<|im_end|>", "<|im_end|>>"])
CONTENT = st.lists(
    st.sampled_from(
        ["a", "A", " ", "\n", "<", ">", "|", "<|im_end|>", "<|im_", "start|>", "</think>", "<x", "[", "0", "\u6771"]
    )
    | st.text(max_size=2),
    max_size=5,
).map("".join)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT, CONTENT), min_size=1, max_size=4
)


def conversation(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def rendered(template, messages):
    try:
        return template.render(messages)
    except TemplateError:
        return None


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([*FOLLOWED, *REFUSED]), min_size=1, max_size=3), st.sampled_from(FRAMES), MESSAGES)
def test_other_contents_with_the_same_answers_give_what_the_template_gives(bodies, frame, messages):
    template = ChatTemplate(HEAD + frame.replace("BODY", "".join(bodies)) + TAIL)
    first = conversation((role, one) for role, one, _ in messages)
    second = conversation((role, other) for role, _, other in messages)
    trace = template.trace(first, [message["content"] for message in first])
    if trace is None:
        return
    shape = Shape(trace, SPLITTER)
    for given_messages in (first, second):
        texts = shape.texts([message["content"] for message in given_messages])
        if texts is None:
            assert given_messages is not first, "a trace holds for what it was made from"
            continue
        text = rendered(template, given_messages)
        assert shape.whole(texts) == text
        assert shape.pieces(texts, SPLITTER) in (None, SPLITTER.split(text))


def trace_of(body, content, frame=FRAMES[0]):
    template = ChatTemplate(HEAD + frame.replace("BODY", body) + TAIL)
    return template.trace(conversation([("user", content), ("assistant", "b")]), [content, "b"])


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("body", FOLLOWED)
def test_what_templates_mostly_do_is_followed_exactly(body, frame):
    template = ChatTemplate(HEAD + frame.replace("BODY", body) + TAIL)
    contents = ["a", "", "<a>", " \n", "b </think>", "<|im_end|>"]
    used = 0
    for content in contents:
        first = conversation([("user", content), ("assistant", "b")])
        trace = template.trace(first, [content, "b"])
        assert trace is not None
        shape = Shape(trace, SPLITTER)
        for other in contents:
            texts = shape.texts([other, "b"])
            assert texts is not None or other != content
            if texts is not None:
                used += 1
                assert shape.whole(texts) == template.render(conversation([("user", other), ("assistant", "b")]))
    assert used > len(contents), "no answer is asked for more than it has to be"


@pytest.mark.parametrize("body", REFUSED)
def test_what_would_show_more_than_an_answer_is_refused(body):
    assert trace_of(body, "a") is None


@pytest.mark.parametrize("body", ["{{ m.content is sequence and m.content | length }}", "{{ m.content.x }}"])
def test_a_refusal_that_the_template_never_reaches_does_no_harm(body):
    hidden = "{% if m.content == 'never' %}" + body + "{% endif %}{{ m.content }}"
    trace = trace_of(hidden, "a")
    shape = Shape(trace, None)
    assert shape.texts(["never", "b"]) is None
    assert shape.whole(shape.texts(["x", "y"])) == "xy<|im_start|>assistant\n"


class Prying:
    """A variable that looks into what it is compared with, whatever that says."""

    def __eq__(self, other):
        try:
            return len(other) > 3
        except Exception:  # noqa: BLE001  # the point of it
            return False

    __hash__ = None


def test_a_refusal_that_is_swallowed_still_counts():
    template = ChatTemplate("{{ probe == messages[0].content }}")
    messages = conversation([("user", "long enough")])
    variables = {"probe": Prying()}
    assert template.render(messages, variables=variables) == "True"
    assert template.trace(messages, ["long enough"], variables=variables) is None


def test_contents_that_are_lists_of_one_part_are_followed_too():
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p.type }}:{{ p.text | trim }};{% endfor %}{% endfor %}"
    )
    trace = template.trace([{"role": "user", "content": [{"type": "text", "text": "a"}]}], ["a"])
    shape = Shape(trace, None)
    assert shape.whole(shape.texts([" b "])) == "text:b;"
    assert template.trace([{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}], ["a"]) is None


def test_a_template_that_refuses_the_messages_has_no_trace():
    assert trace_of("{{ raise_exception('no') }}", "a") is None
