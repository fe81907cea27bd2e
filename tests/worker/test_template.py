"""Chat templates: rendering, refusals, limits."""

from __future__ import annotations

import sys
from datetime import datetime

import pytest
from gguf_models import CHATML

from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument
from vram_conductor.protocol.values import Message
from vram_conductor.worker.llama.template import ChatTemplate

USER = [Message("user", "hi")]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>", now=lambda: datetime(2024, 2, 29, 12, 30))


def render(source: str, messages: list[Message] | None = None, *, generate: bool = True) -> str:
    return template(source).render(USER if messages is None else messages, generate=generate)


def test_chatml_with_and_without_the_generation_prompt() -> None:
    messages = [Message("system", "Be brief."), Message("user", "Häh?\n")]
    closed = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHäh?\n<|im_end|>\n"
    assert render(CHATML, messages, generate=False) == closed
    assert render(CHATML, messages) == closed + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages[0]['role'] | upper }}", "USER"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% if tools %}tools{% else %}none{% endif %}", "none"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'ab' * 2 + 'c' }}{{ 7 % 4 }}{{ 2 ** 3 }}", "ababc38"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages | map(attribute='content') | join(',') }}", "hi"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'key: v'.split(': ')[1] }}", "v"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source) == text


def test_a_template_may_refuse_messages() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
    assert render(source) == "ok"
    with pytest.raises(InvalidArgument) as caught:
        render(source, [Message("system", "x")])
    assert caught.value.reason == "bad_messages"
    assert "user first" in caught.value.info.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.deeper }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x'.center(10 ** 6) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ range(10 ** 6) | list }}",
    ],
)
def test_errors_inside_a_template_are_typed(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(source)
    assert caught.value.reason == "bad_messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}"
        "{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}",
    ],
)
def test_runaway_templates_are_stopped(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(source)
    assert caught.value.reason == "template_limit"


def test_the_trace_function_is_restored() -> None:
    before = sys.gettrace()
    render(CHATML)
    with pytest.raises(InvalidArgument):
        render("{{ 1 / 0 }}")
    assert sys.gettrace() is before


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        template("{% for %}")
    assert caught.value.reason == "bad_chat_template"
    assert "prompt" in caught.value.info.message


def test_many_messages_render_within_the_limits() -> None:
    messages = [Message("user" if i % 2 == 0 else "assistant", "x" * 40) for i in range(4096)]
    assert render(CHATML, messages).count("<|im_start|>") == 4097
