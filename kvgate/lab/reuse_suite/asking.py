"""Turns the cases' prompts into tokens, asks them cold or with reuse, and remembers what may lie in a slot."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from kvgate.core.reuse import Reuse
from kvgate.core.reuse_suite import common_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgate.core.profile import EngineProfile
    from kvgate.core.reuse_case import Message, Prompt, Step
    from kvgate.core.reuse_suite import Scored


class Unasked(Exception):
    """The engine would not answer this; the message says why, and quotes no prompt."""


class Stopped(Exception):
    """The run cannot go on; the message says why and what to do."""


class SuiteEngine(Protocol):
    """What the suite needs of an engine. Every method may raise `Unasked` and `Stopped`."""

    @property
    def profile(self) -> EngineProfile:
        """The engine process that is looked at."""

    @property
    def room_tokens(self) -> int:
        """The longest sequence, answer included, that it can be asked for."""

    async def tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The tokens of a text; `special`: as a prompt, with what the engine puts before it."""

    async def rendered(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The conversation as the engine's chat template writes it."""

    async def ask(self, prompt: Sequence[int], answer: Sequence[int], reuse: Reuse) -> Scored:
        """Force an answer to a prompt of tokens."""

    async def chat(
        self, messages: Sequence[Message], prompt_tokens: int, answer: Sequence[int], reuse: Reuse
    ) -> Scored:
        """Force an answer in a conversation, on the endpoint that tenants use."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and the answer to force, in tokens.

    Args:
        prompt: its tokens, as the engine makes them.
        own_from: at this token something begins that only this run's prompts have.
        answer: the forced tokens.
        needles_at: where in the answer each needle begins.
        messages: where it is asked as a conversation.
    """

    prompt: tuple[int, ...]
    own_from: int
    answer: tuple[int, ...]
    needles_at: tuple[int, ...]
    messages: tuple[Message, ...] = ()

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What tells it from others."""
        return self.prompt, self.answer


class Desk:
    """Asks for one run of the suite, and of each answer keeps what it says of the needles.

    Args:
        engine: whom.
        nonce: how every prompt begins.
        on_asked: told, of each answer, how many prompt tokens were computed for it.
    """

    def __init__(self, engine: SuiteEngine, nonce: str, on_asked: Callable[[int], None]) -> None:
        self._engine = engine
        self._nonce = nonce
        self._on_asked = on_asked
        self._cold: dict[tuple[tuple[int, ...], tuple[int, ...]], Scored] = {}
        self._left: list[tuple[int, ...]] = []
        self._heads: dict[str, int] = {}
        self._pieces: dict[str, tuple[int, ...]] = {}
        self.chat_refused = False
        self._system_refused = False

    async def prepared(self, prompt: Prompt, step: Step, *, as_chat: bool = False) -> Asked:
        """The tokens of a prompt, and of the step's answer."""
        messages, text = prompt.messages, prompt.text
        if messages:
            messages, text = await self._rendered(prompt)
        answer: list[int] = []
        needles_at = []
        for at, piece in enumerate(step.answer):
            if at in step.needles_at:
                needles_at.append(len(answer))
            answer += await self._piece(piece)
        return Asked(
            prompt=await self._engine.tokens(text, special=True),
            own_from=await self._own_from(text),
            answer=tuple(answer),
            needles_at=tuple(needles_at),
            messages=messages if as_chat and not self.chat_refused else (),
        )

    async def cold(self, asked: Asked) -> Scored:
        """Its answer without reuse; asked once only."""
        if (known := self._cold.get(asked.key)) is not None:
            return known
        found = await self._ask(asked, Reuse.OFF)
        if found.cached_tokens:
            raise Unasked(
                f"the engine reused {found.cached_tokens} tokens although it was told not to, so there is no cold "
                "answer to compare with"
            )
        self._cold[asked.key] = found
        self._left.append(asked.prompt + asked.answer[:-1])
        return found

    async def twice(self, asked: Asked) -> tuple[Scored, Scored]:
        """Its answer without reuse, with what stands before the first needle computed token by token, and in one go.

        The same tokens in the same order, in other batches: what differs is noise, of the kind that reuse makes too.
        """
        at = asked.needles_at[0]
        needles_at = tuple(place - at for place in asked.needles_at)
        begun = Asked(asked.prompt + asked.answer[:at], asked.own_from, asked.answer[at:], needles_at)
        return await self.cold(asked), await self.cold(begun)

    async def reused(self, asked: Asked) -> tuple[Scored, int]:
        """Its answer with reuse, and the longest beginning that it could have reused."""
        found = await self._ask(asked, Reuse.KEEP)
        common = max((common_tokens(asked.prompt, left) for left in self._left), default=0)
        self._left.append(asked.prompt + asked.answer[:-1])
        return found, max(common, asked.own_from)

    async def _ask(self, asked: Asked, reuse: Reuse) -> Scored:
        found = None
        if asked.messages and not self.chat_refused:
            found = await self._ask_chat(asked, reuse)
        if found is None:
            found = await self._engine.ask(asked.prompt, asked.answer, reuse)
        self._on_asked(found.computed_tokens)
        return replace(found, logprobs=tuple(found.logprobs[at] for at in asked.needles_at))

    async def _ask_chat(self, asked: Asked, reuse: Reuse) -> Scored | None:
        """As a conversation; None where the endpoint does not do what is needed: then tokens are asked instead."""
        try:
            found = await self._engine.chat(asked.messages, len(asked.prompt), asked.answer, reuse)
        except Unasked:
            self.chat_refused = True
            return None
        if reuse is Reuse.OFF and (found.cached_tokens or 0) + found.computed_tokens != len(asked.prompt):
            self.chat_refused = True  # it renders the conversation otherwise than it says
            return None
        return found

    async def _rendered(self, prompt: Prompt) -> tuple[tuple[Message, ...], str]:
        """The messages as they are asked, and as the engine's template writes them.

        1. A template that knows no system message has it as the beginning of the user's first.
        2. One that knows no tools has them in there, as agents without tool calls do it.
        """
        messages, tools, text = prompt.messages, [json.loads(tool) for tool in prompt.tools], ""
        if not self._system_refused:
            try:
                text = await self._engine.rendered(messages, tools)
            except Unasked:
                self._system_refused = True
        if self._system_refused:  # 1
            messages = _merged(messages)
            text = await self._engine.rendered(messages, tools)
        if not all(tool["function"]["name"] in text for tool in tools):  # 2
            first, *rest = messages
            messages = (replace(first, content="\n".join([first.content, *prompt.tools])), *rest)
            text = await self._engine.rendered(messages, [])
        return messages, text

    async def _piece(self, piece: str) -> tuple[int, ...]:
        if piece not in self._pieces:
            self._pieces[piece] = await self._engine.tokens(piece, special=False)
        return self._pieces[piece]

    async def _own_from(self, text: str) -> int:
        """Behind the nonce nothing is shared with what others left in a slot."""
        head = text[: text.find(self._nonce) + len(self._nonce)]
        if head not in self._heads:
            self._heads[head] = len(await self._engine.tokens(head, special=True))
        return self._heads[head]


def _merged(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    system, first, *rest = messages
    return (replace(first, content=f"{system.content}\n\n{first.content}"), *rest)
