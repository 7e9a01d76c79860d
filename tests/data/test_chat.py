"""Chat templates: the text, and the parts of the assistant."""

import sys

import pytest

from pipemesh.data.chat import ChatTemplate
from pipemesh.errors import DataError, MissingPackageError
from tests.data import templates
from tests.data.templates import CHAT

DAY = "2024-07-26"


def parts(text, messages=CHAT, **more):
    template = ChatTemplate(text, templates.SPECIAL, DAY)
    whole, spans = template.parts(messages, **more)
    return whole, [whole[begin:end] for begin, end in spans]


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("chatml", ["The cat sat.\n<|im_end|>\n", "On the mat \u2713<|im_end|>\n"]),
        ("chatml with blocks", ["The cat sat.<|im_end|>", "On the mat \u2713<|im_end|>"]),
        ("llama 3", ["The cat sat.<|eot_id|>", "On the mat \u2713<|eot_id|>"]),
        ("mistral", [" The cat sat.\n</s>", " On the mat \u2713</s>"]),
        ("gemma", ["The cat sat.<end_of_turn>\n", "On the mat \u2713<end_of_turn>\n"]),
    ],
)
def test_parts_are_what_the_assistant_wrote(name, wanted):
    whole, found = parts(templates.ALL[name])
    assert found == wanted
    assert "\0" not in whole and "{{ 1 }}" in whole


def test_a_chat_may_begin_with_the_assistant():
    """The text before its first message counted, too."""
    messages = [{"role": "assistant", "content": "Hello."}, *CHAT[1:]]
    assert parts(templates.ALL["chatml"], messages)[1][0] == "Hello.<|im_end|>\n"
    # This one looks at the first message.
    with pytest.raises(DataError, match="message 1 is the assistant's, and the chat template ref"):
        parts(templates.ALL["llama 3"], messages)


def test_the_day_is_not_that_of_the_run():
    """A resumed run would read other tokens on the next day."""
    assert parts("{{ strftime_now('%d %b %Y') }}")[0] == "26 Jul 2024"
    with pytest.raises(DataError, match="date 'May' must be a day, such as"):
        ChatTemplate("", {}, "May")


@pytest.mark.parametrize(
    "text, messages, told",
    [
        ("{% if %}", CHAT, "the chat template is malformed"),
        (templates.MISTRAL, CHAT[1:], "refuses the messages .roles must alternate"),
        (
            "{{ messages.append(1) }}",
            CHAT,
            "refuses the messages .*attribute .append. .* is unsafe",
        ),
        ("{{ messages[9].content }}", CHAT, "refuses the messages"),
        ("{{ 1 // 0 }}", CHAT, "refuses the messages .*by zero"),
        ("{{ 2.0 ** 9999 }}", CHAT, "refuses the messages .*out of range"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", CHAT, "refuses .*recursion depth"),
        (f"{'(' * 9999}1{')' * 9999}".join(["{{", "}}"]), CHAT, "is malformed .*recursion depth"),
        ("{{ raise_exception('one\ntwo') }}", CHAT, r"refuses the messages \(one\)$"),
        (
            "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}",
            CHAT,
            r"message 2 is written otherwise .* put {% generation %} and {% endgeneration %} aro",
        ),
    ],
)
def test_templates_that_fail_are_refused(text, messages, told):
    with pytest.raises(DataError, match=told) as error:
        parts(text, messages)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named(monkeypatch):
    from pipemesh.data import chat

    chat._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=r"chat template needs jinja2.*'\.\[data\]'"):
        parts("")
