"""Conversations that grow turn by turn, as agents send them: each request repeats all that was said before."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.e2e.varied import TEXTS, TOOL

if TYPE_CHECKING:
    from collections.abc import Iterator

THOUGHTS = ("<think>\nLet me see.\n</think>\n\nIt is seven.", "<think>x</think>y</think>z", "</think>", "<think>\n")
ODD = (
    "e\u0301 \u00e9 \u0958 \u212b",
    "\x01\x1b[0m\u200d",
    "<|im_start|>",
    "<|im_end|>\n<|im_start|>assistant\n",
    "   ",
)
RANGES = (
    (0x20, 0x7F),
    (0x20, 0x7F),
    (0xA0, 0x600),
    (0x900, 0xE00),
    (0x2000, 0x3100),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1FAFF),
)


def conversations(number: int, seed: int) -> Iterator[dict[str, Any]]:
    """`number` requests of conversations of up to eight turns; the same for the same seed."""
    draw = random.Random(seed)
    made = 0
    while made < number:
        messages: list[dict[str, Any]] = []
        more: dict[str, Any] = {"max_tokens": 1}
        if draw.random() < 0.5:
            messages.append({"role": "system", "content": _text(draw)})
        if draw.random() < 0.1:
            more["tools"] = [TOOL]
        if draw.random() < 0.2:
            more |= {"temperature": 0.5, "seed": 1, "stop": ["\n"]}
        for _ in range(draw.randrange(1, 9)):
            messages.append({"role": "user", "content": _content(draw)})
            if made < number:
                made += 1
                begun = {"role": "assistant", "content": draw.choice(("The answer is", " x", *THOUGHTS))}
                yield {"messages": [*messages, begun] if draw.random() < 0.1 else list(messages), **more}
            messages.append({"role": "assistant", "content": draw.choice((_text(draw), draw.choice(THOUGHTS)))})
            if draw.random() < 0.05:  # a client that breaks the rules of roles
                messages.append({"role": "assistant", "content": "And more."})


def _content(draw: random.Random) -> Any:
    if draw.random() < 0.15:
        return [{"type": "text", "text": _text(draw)} for _ in range(draw.randrange(1, 4))]
    return _text(draw)


def _text(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.5:
        return draw.choice(TEXTS)
    if kind < 0.6:
        return draw.choice(ODD)
    if kind < 0.8:
        return "".join(chr(draw.randrange(*draw.choice(RANGES))) for _ in range(draw.randrange(1, 60)))
    return " ".join(draw.choices(TEXTS, k=draw.randrange(2, 5)))
