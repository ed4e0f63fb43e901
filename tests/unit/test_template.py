"""A chat template is rendered as the engine renders it, within bounds, and its growth is proved or not claimed."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.core.counting import PlainChat
from kvgate.engines.llamacpp.growth import growth_of
from kvgate.engines.llamacpp.proofs import chat_of
from kvgate.engines.llamacpp.stencil import is_stencilled
from kvgate.engines.llamacpp.template import (
    SOURCE_CHARS_MAX,
    ChatTemplate,
    RenderFailed,
    RenderTooLong,
    TemplateUnusable,
)
from tests.unit.counting_engine import CHATML, FORGETFUL, STRICT, CountingEngine

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = chat_of(("user", "One?"), ("assistant", "<think>hm</think>\n\nTwo."), ("user", " Three? "))
LONG = chat_of(*((("user", "x" * 1000), ("assistant", "y" * 1000)) * 30), ("user", "z"))

PAIRS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text()), min_size=1, max_size=8)


@functools.cache
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, NAMES)


def render(source: str, chat: PlainChat = CHAT, within_s: float = 10) -> str:
    return template_of(source).render(chat, within_s)


@given(PAIRS)
@pytest.mark.parametrize("source", [CHATML, STRICT, FORGETFUL])
def test_a_metered_template_makes_what_jinja_makes(source: str, pairs: list[tuple[str, str]]) -> None:
    """The meter in every loop and sum changes no text, and no refusal."""
    if pairs[-1][0] == "assistant" and len(pairs) == 1:
        return
    try:
        truth = CountingEngine(source).render([{"role": role, "content": text} for role, text in pairs])
    except ValueError:
        with pytest.raises(RenderFailed):
            render(source, chat_of(*pairs))
    else:
        assert render(source, chat_of(*pairs)) == truth


def test_an_answer_at_the_end_is_gone_on_with() -> None:
    assert render(CHATML, chat_of(("user", "hi"), ("assistant", "The answer"))).endswith(
        "<|im_start|>assistant\nThe answer"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | length }}",
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content.lower() }}",
        "{{ messages[0].content[1:] }}",
        "{{ messages[0].content.split() }}",
        "{{ messages[0].content.find('x') }}",
    ],
)
def test_what_counts_characters_is_done_for_ascii_alone(source: str) -> None:
    """llama.cpp counts and cuts bytes: beyond ASCII its result is another, so the engine is asked."""
    assert render(source, chat_of(("user", "Ax x")))
    with pytest.raises(RenderFailed):
        render(source, chat_of(("user", "\u00c4x x")))


def test_spaces_that_are_not_ascii_are_not_stripped() -> None:
    """Python would take a no-break space away, llama.cpp does not."""
    chat = chat_of(("user", "\t\u00a0x\u00a0\n"))
    for source in ("{{ messages[0].content | trim }}", "{{ messages[0].content.strip() }}"):
        assert render(source, chat) == "\u00a0x\u00a0"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}x{% endfor %}"
        "{% endfor %}{% endfor %}{% endfor %}" * 3,
        (
            "{% set ns = namespace(x='a') %}{% for a in messages %}"
            "{% for b in messages %}{% set ns.x = ns.x + ns.x %}"
            "{% endfor %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(x='a') %}{% for a in messages %}"
            "{% for b in messages %}{% set ns.x = ns.x ~ ns.x %}"
            "{% endfor %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(x=['a']) %}{% for a in messages %}"
            "{% for b in messages %}{% set ns.x = ns.x + ns.x %}"
            "{% endfor %}{% endfor %}"
        ),
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        (
            "{% macro f(x) %}{% for a in x %}{% for b in x %}{% for c in x %}"
            "{{ x[0].content }}{% endfor %}{% endfor %}"
            "{% endfor %}{% endmacro %}{{ f(messages) }}"
        ),
        (
            "{% set y %}{% for a in messages %}{% for b in messages %}"
            "{% for c in messages %}{{ b.content }}{% endfor %}"
            "{% endfor %}{% endfor %}{% endset %}{{ y }}"
        ),
        "{{ 'x' * 1000000000 }}",
        "{{ ['x'] * 1000000000 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ 2 ** 99999999 }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ 'a'.join(messages) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ range(99999) | length }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now('%Y') }}",
        "{{ lipsum() }}",
    ],
)
def test_a_hostile_template_ends_soon_and_with_nothing(source: str) -> None:
    """Endless loops, doubled texts, giant paddings and ways out of the sandbox: an error, within bounds."""
    begun_s = time.process_time()
    with pytest.raises((RenderFailed, TemplateUnusable)):
        render(source, LONG, within_s=0.1)
    assert time.process_time() - begun_s < 5


@pytest.mark.parametrize(
    "source", ["{% for", "{{ x | center(9) }}", "{% unknown %}", "x" * (SOURCE_CHARS_MAX + 1), "{{ 'a" + "(" * 5000]
)
def test_what_cannot_be_used_is_said_at_once(source: str) -> None:
    with pytest.raises(TemplateUnusable):
        ChatTemplate(source, NAMES)


def test_the_deadline_is_kept_between_the_turns_of_a_loop() -> None:
    with pytest.raises(RenderTooLong):
        render(FORGETFUL, LONG, within_s=0)


@given(PAIRS)
@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{% if messages[0].role != 'system' %}preamble{% endif %}" + CHATML,
        (
            "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ 'none' if false else 'preamble' }}"
            "{% endif %}{{ m.role ~ ': ' ~ m.content.strip() ~ '\n' }}{% endfor %}"
        ),
        (
            "{% set all = messages[1:] %}{{ bos_token }}{{ messages[0]['content'] | trim }}{% for m in all %}"
            "{% set text = m['content'] %}{% if m.role == 'user' %}"
            "{% set text = '[U] ' + text %}{% endif %}{{ text }}"
            "{% endfor %}"
        ),
    ],
)
def test_a_proved_growth_is_never_exceeded(source: str, pairs: list[tuple[str, str]]) -> None:
    """The bound by bytes, for every chat and every template for which it is claimed."""
    template = template_of(source)
    growth = growth_of(template.tree, NAMES)
    if growth is None:
        return
    chat = chat_of(*pairs)
    try:
        text = template.render(chat, 10)
    except RenderFailed:
        return
    held = sum(len(text.encode()) for _, text in pairs)
    assert len(text.encode()) <= growth.bound(held, len(pairs))


SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ 'preamble\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BY_ROLE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[U]{{ m.content }}[/U]{% elif not m.role == 'system'"
    " and messages[0].role == 'system' %}{{ '[A]' ~ m['content'] }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}end"
)


@given(PAIRS)
@pytest.mark.parametrize("source", [CHATML, SMOL, BY_ROLE])
def test_a_stencil_makes_what_running_the_template_makes(source: str, pairs: list[tuple[str, str]]) -> None:
    """Templates that write one message after the other are filled in like a form, to the same text."""
    template = template_of(source)
    assert is_stencilled(template.tree)
    messages = tuple(pairs)
    assert template._stencil is not None
    assert "".join(template._stencil.parts(messages) or ()) == template._run(messages, 10)


@pytest.mark.parametrize(
    "source",
    [
        STRICT,
        FORGETFUL,
        "{% for m in messages %}{% if loop.last %}x{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if loop.index0 % 2 %}x{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if 'a' in m.content %}x{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content == 'a' %}x{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{{ m.content + messages[0].content }}{% endfor %}",
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages }}",
        "{% for m in messages %}{% set x = m.content %}{{ x }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_what_looks_beyond_one_message_is_run(source: str) -> None:
    assert not is_stencilled(template_of(source).tree)


def growth(source: str) -> Any:
    return growth_of(ChatTemplate(source, NAMES).tree, NAMES)


def test_a_plain_templates_growth_is_its_own_text() -> None:
    found = growth(CHATML)
    assert found.copies == 1
    assert found.fixed_bytes == len("<|im_start|>assistant\n")
    assert found.message_bytes == len("<|im_start|>assistant\n<|im_end|>\n")


def test_what_is_written_once_is_counted_once() -> None:
    only_first = "{% if loop.first and m.role == 'user' %}preamble{% endif %}"
    source = "{% for m in messages %}" + only_first + "{{ m.content }}{% endfor %}"
    assert (growth(source).fixed_bytes, growth(source).message_bytes) == (8, 0)


@pytest.mark.parametrize(
    "source",
    [
        FORGETFUL,
        "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
        "{% set s = messages[0].content %}{% for m in messages %}{{ s }}{% endfor %}",
        "{% for m in messages %}{{ messages[0].content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m }}{% endfor %}",
        "{{ messages }}",
        "{{ messages | tojson }}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
        "{% for c in messages[0].content %}<{{ c }}>{% endfor %}",
    ],
)
def test_what_could_repeat_a_text_is_not_bounded(source: str) -> None:
    """Loops in loops, one message's text in every turn, macros, other fields, and what may lengthen a text."""
    assert growth(source) is None
