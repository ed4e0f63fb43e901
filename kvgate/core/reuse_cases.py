"""The traffic that reuse bugs are known from, as data: what is asked in turn, and the answer that is forced."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Final

from kvgate.core.reuse_case import DEEP_TOKENS, Case, Message, Prompt, Scale, Step

# fmt: off
NEEDLES: Final = (
    "lemon", "river", "stone", "cloud", "horse", "paper", "music", "apple", "tiger", "window",
    "garden", "bridge", "silver", "candle", "doctor", "planet", "castle", "forest", "hammer", "island",
    "jacket", "kitchen", "ladder", "mirror", "needle", "orange", "pencil", "rabbit", "saddle", "temple",
)
"""Words to look for: common ones, so that each begins with a token of its own in any vocabulary."""

_ADJECTIVES: Final = ("old", "small", "quiet", "heavy", "early", "narrow", "plain", "warm", "broken", "empty")
_NOUNS: Final = ("farmer", "train", "letter", "field", "market", "child", "road", "winter", "engine", "school")
_VERBS: Final = ("waits", "stands", "works", "rests", "moves", "sits", "turns", "stops")
# fmt: on
WORDS_A_SENTENCE: Final = 9


class _Writer:
    """Draws the words of one case: the same for the same nonce."""

    def __init__(self, nonce: str, scale: Scale, case: str) -> None:
        self.nonce = nonce
        self.scale = scale
        self._seed = f"{nonce} {case}"
        self._drawn = 0
        self._left = list(NEEDLES)

    def needles(self, number: int) -> tuple[str, ...]:
        """Needles that were not given out yet."""
        return tuple(self._left.pop(self._draw(len(self._left))) for _ in range(number))

    def filler(self, share: float) -> str:
        """Sentences without a needle, for a share of the depth."""
        return " ".join(self._sentence() for _ in range(max(1, self.scale.words(share) // WORDS_A_SENTENCE)))

    def _sentence(self) -> str:
        kinds = (_ADJECTIVES, _NOUNS, _VERBS, _ADJECTIVES, _NOUNS)
        first, noun, verb, second, other = (words[self._draw(len(words))] for words in kinds)
        return f"The {first} {noun} {verb} near the {second} {other}."

    def _draw(self, below: int) -> int:
        """The next number of this case's own row."""
        self._drawn += 1
        return int.from_bytes(hashlib.sha256(f"{self._seed} {self._drawn}".encode()).digest()[:8]) % below

    def opening(self, share: float) -> str:
        """The beginning of a system message or a text."""
        return f"{self.nonce}. {self.filler(share)}"


def _said(*needles: str) -> tuple[str, ...]:
    """The forced answer that names them, piece by piece, behind the same lead as in the prompt."""
    return ("Words:", *(f" {needle}" for needle in needles))


def _words(*needles: str) -> str:
    return f"Words: {' '.join(needles)}"


def _step(name: str, prompt: Prompt, *needles: str, judged: bool = False, reach_tokens: int = 0) -> Step:
    return Step(name, prompt, _said(*needles), judged, reach_tokens, tuple(range(1, len(needles) + 1)))


def _conversation(system: str, *turns: str) -> Prompt:
    """Turns in alternation, the user's first."""
    roles = ("user", "assistant")
    spoken = (Message(roles[at % 2], turn) for at, turn in enumerate(turns))
    return Prompt((Message("system", system), *spoken))


def _chain(writer: _Writer) -> Case:
    system, fillers = writer.opening(0.1), [writer.filler(0.03) for _ in range(3)]
    boxes = ("Box A:", "Box B:", "Box C:")

    def prompt(needles: tuple[str, ...], turns: int) -> Prompt:
        told = [f"{box} {needle}" for box, needle in zip(boxes, needles, strict=True)]
        spoken = [f"{fillers[0]} {told[0]}.", told[0], f"{fillers[1]} {told[1]}.", told[1], "Say all boxes."]
        spoken += ["\n".join(told[:2]), f"{fillers[2]} {told[2]}. Say all boxes."]
        return _conversation(system, *spoken[: 2 * turns - 1])

    def step(turn: int, needles: tuple[str, ...], said: tuple[int, ...], *, judged: bool = False) -> Step:
        pieces: list[str] = []
        for at in said:
            pieces += [f"\n{boxes[at]}" if pieces else boxes[at], f" {needles[at]}"]
        places = tuple(range(1, len(pieces), 2))
        return Step(f"turn {turn}", prompt(needles, turn), tuple(pieces), judged, needles_at=places)

    needles, others = writer.needles(3), writer.needles(3)
    steps = (
        step(1, needles, (0,)),
        step(2, needles, (1,)),
        step(3, needles, (0, 1), judged=True),
        step(4, needles, (0, 1, 2), judged=True),
    )
    looks_for = "a turn that was lost, doubled or swapped on its way through the cache (llama.cpp PR 26185)"
    return Case("chain", looks_for, steps, prompt(others, 4), as_chat=True)


def _tails(writer: _Writer) -> Case:
    opening = writer.opening(0.2)

    def prompt(rule: str, own: str) -> Prompt:
        return _conversation(f"{opening} Words: {rule}.", f"My word is {own}. Say both. Words: {own} {rule}.")

    rule, first, second, other_rule, other = writer.needles(5)
    steps = (
        _step("first tail", prompt(rule, first), first, rule),
        _step("second tail", prompt(rule, second), second, rule, judged=True),
        _step("first tail again", prompt(rule, first), first, rule, judged=True),
    )
    looks_for = "another request's tail behind a shared system prompt (tenstorrent/vllm issue 415)"
    return Case("tails", looks_for, steps, prompt(other_rule, other))


def _tools(writer: _Writer) -> Case:
    system = writer.opening(0.02)

    def prompt(names: tuple[str, ...], question: str) -> Prompt:
        return replace(_conversation(system, f"{question} Words: {names[0]}"), tools=tuple(map(_tool, names)))

    names, others = writer.needles(2), writer.needles(2)
    questions = ("Which tools are there?", "Name every tool that you have.")
    steps = (
        _step("first question", prompt(names, questions[0]), *names),
        _step("second question", prompt(names, questions[1]), *names, judged=True),
    )
    looks_for = "another set of tools than the request's own"
    return Case("tools", looks_for, steps, prompt(others, questions[1]))


def _tool(name: str) -> str:
    parameters = {"type": "object", "properties": {"value": {"type": "string"}}}
    declared = {"name": name, "description": f"Words: {name}", "parameters": parameters}
    return json.dumps({"type": "function", "function": declared})


def _there_and_back(writer: _Writer) -> Case:
    opening, middle = writer.opening(0.1), writer.filler(0.15)

    def short(needles: tuple[str, ...]) -> str:
        return f"{opening} {_words(*needles)}. Once more."

    def long(needles: tuple[str, ...], late: tuple[str, ...]) -> str:
        return f"{short(needles)} {_words(*needles)}. {middle} {_words(*late)}. Once more."

    needles, late, others = writer.needles(3), writer.needles(3), writer.needles(6)
    whole = Prompt(text=long(needles, late))
    steps = (
        _text_step("the long text", whole, *late),
        _text_step("its beginning", Prompt(text=short(needles)), *needles, judged=True),
        _text_step("the long text again", whole, *late, judged=True),
    )
    looks_for = "what stood behind a prompt that is cut shorter, or is grown again (mlx-lm issue 1494)"
    return Case("back", looks_for, steps, Prompt(text=long(others[:3], others[3:])))


def _text_step(name: str, prompt: Prompt, *needles: str, judged: bool = False) -> Step:
    step = _step(name, prompt, *needles, judged=judged)
    return replace(step, answer=(" Words:", *step.answer[1:]))


def _interleaved(writer: _Writer) -> Case:
    system = writer.opening(0.05)

    def prompt(own: tuple[str, ...], turns: int) -> Prompt:
        spoken = (f"{_words(*own)}. Say them.", _words(*own), "Say them again.")
        return _conversation(system, *spoken[: 2 * turns - 1])

    talks = [writer.needles(2) for _ in range(writer.scale.crowd)]
    first = [_step(f"conversation {at}", prompt(own, 1), *own) for at, own in enumerate(talks, 1)]
    second = [
        _step(f"conversation {at} goes on", prompt(own, 2), *own, judged=True) for at, own in enumerate(talks, 1)
    ]
    looks_for = "the words of a conversation that has, or had, a slot beside it (llama.cpp issue 27148)"
    return Case("interleaved", looks_for, (*first, *second), prompt(writer.needles(2), 2), at_once=True)


def _neighbour(writer: _Writer) -> Case:
    system = writer.opening(0.05)

    def prompt(secret: str, number: int) -> Prompt:
        return _conversation(system, f"Room {number}. {secret}. Say it.")

    needles = writer.needles(3)
    planted, empty = _words(*needles), "Words: none"
    steps = (
        _step("the neighbour's secret", prompt(planted, 1), *needles),
        _step("a room without one", prompt(empty, 2), *needles, judged=True),
        _step("the same once more", prompt(empty, 2), *needles, judged=True),
    )
    looks_for = "a neighbour's secret where it was never told (llama.cpp issue 27148)"
    return Case("neighbour", looks_for, steps, prompt(planted, 2))


def _churn(writer: _Writer) -> Case:
    system = writer.opening(0.1)

    def prompt(own: tuple[str, ...], turns: int) -> Prompt:
        spoken = (f"{_words(*own)}. Say them.", _words(*own), "Say them again.")
        return _conversation(system, *spoken[: 2 * turns - 1])

    own, others = writer.needles(3), writer.needles(3)
    strangers = [
        Step(f"stranger {at}", Prompt(text=f"{writer.nonce} {at}. {writer.filler(0.08)}"), (" The",))
        for at in range(1, writer.scale.crowd + 1)
    ]
    steps = (
        _step("a conversation", prompt(own, 1), *own),
        _step("it goes on", prompt(own, 2), *own, judged=True),
        *strangers,
        _step("it comes back", prompt(own, 2), *own, judged=True, reach_tokens=-1),
        _step("the same once more", prompt(own, 2), *own, judged=True),
    )
    looks_for = "what slots keep of strangers that passed through them (ollama issue 16860)"
    return Case("churn", looks_for, steps, prompt(others, 2))


def _deep(writer: _Writer) -> Case:
    first, last = writer.opening(0.85), writer.filler(0.05)

    def prompt(needles: tuple[str, ...], question: str) -> Prompt:
        return _conversation(f"{first} {_words(*needles)}. {last}", question)

    needles, others = writer.needles(3), writer.needles(3)
    asked = ("Say the words.", "Which words are they? Say them.")
    names = ("the long beginning", "its first reuse", "its second reuse", "its third reuse")
    steps = tuple(
        _step(name, prompt(needles, asked[at % 2]), *needles, judged=at > 0, reach_tokens=DEEP_TOKENS)
        for at, name in enumerate(names)
    )
    looks_for = "what shows only behind 200 reused tokens, or when a beginning is reused again (llama.cpp PR 26185)"
    return Case("deep", looks_for, steps, prompt(others, asked[1]))


_MAKERS: Final = {
    "chain": _chain,
    "tails": _tails,
    "tools": _tools,
    "back": _there_and_back,
    "interleaved": _interleaved,
    "neighbour": _neighbour,
    "churn": _churn,
    "deep": _deep,
}

NAMES: Final = tuple(_MAKERS)
"""The cases' names, in the order in which they run."""


def sample() -> str:
    """Text like that of the cases, to see how many tokens a word has."""
    return _Writer("Run", Scale(), "sample").filler(1.0)


def cases(nonce: str, scale: Scale) -> tuple[Case, ...]:
    """All cases. Every prompt begins with the nonce, so that nothing of another run can be its beginning."""
    return tuple(make(_Writer(nonce, scale, name)) for name, make in _MAKERS.items())
