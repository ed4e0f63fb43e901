"""What a case of the reuse suite is: prompts in order, the answers that are forced, a control, and its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEPTH_TOKENS_MIN: Final = 270
"""The longest beginning that is reused, at least: bugs are known that show only behind 200 tokens."""

DEPTH_TOKENS_MAX: Final = 4096
"""And at most: a longer one costs more time than it shows."""

DEEP_TOKENS: Final = 200
"""A case that looks behind so many reused tokens has seen nothing where fewer were reused."""

CONTEXT_TOKENS_MIN: Final = 512
"""A slot of this size holds every case at the least depth."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is asked: a conversation, with tools perhaps, or bare text.

    Args:
        messages: rendered by the engine's own chat template.
        tools: JSON texts of function declarations, in OpenAI's form.
        text: where there is no conversation.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a case, reuse on.

    Args:
        name: what it is, for people.
        prompt: what is asked.
        answer: the pieces of the answer that is forced.
        needles_at: which of them are needles.
        judged: whether the answer's log-probabilities are compared with a cold run's.
        reach_tokens: the step proves nothing unless more tokens than these were reused; -1 where none need be.
    """

    name: str
    prompt: Prompt
    answer: tuple[str, ...]
    judged: bool = False
    reach_tokens: int = 0
    needles_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that follow each other, and a control: the last judged one with other needles in its prompt.

    Args:
        name: one word, as `--case` takes it.
        looks_for: what would be wrong, and where that was reported.
        steps: in order.
        control: the changed prompt; cold, it must make the last judged answer clearly less likely.
        as_chat: asked on the chat endpoint rather than as tokens.
        at_once: with reuse, two steps are asked at a time, where the engine has two slots.
    """

    name: str
    looks_for: str
    steps: tuple[Step, ...]
    control: Prompt
    as_chat: bool = False
    at_once: bool = False

    @property
    def judged(self) -> tuple[Step, ...]:
        """The steps that are compared with a cold run."""
        return tuple(step for step in self.steps if step.judged)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the cases are made.

    Args:
        depth_tokens: the longest beginning that is reused.
        tokens_per_word: of this model's vocabulary, on text like that of the cases.
        slots: of the engine: how many conversations are too many.
    """

    depth_tokens: int = DEPTH_TOKENS_MIN
    tokens_per_word: float = 1.2
    slots: int = 2

    def words(self, share: float) -> int:
        """Words for a share of the depth; a token is never longer than a word here."""
        return int(share * self.depth_tokens / max(1.0, self.tokens_per_word))

    @property
    def crowd(self) -> int:
        """One conversation more than there are slots, as far as that is affordable."""
        return min(self.slots, 4) + 1
