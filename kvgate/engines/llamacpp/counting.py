"""Counts prompts by the cheapest proof that is certain, and drops a proof at its first error."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvgate.core.counting import UNCOUNTED_FIELDS, Kept, PlainChat, Proof, Standing, plain_chat
from kvgate.core.reason import Reason, refusal
from kvgate.engines.llamacpp.flights import Flights
from kvgate.engines.llamacpp.proofs import Proofs, cut, probe
from kvgate.engines.llamacpp.template import RenderFailed, RenderTooLong
from kvgate.ports import Counted, Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kvgate.core.profile import EngineProfile
    from kvgate.engines.llamacpp.proofs import Ask
    from kvgate.engines.llamacpp.tokenizer import Tokenizer
    from kvgate.ports import Clock, ReadRequest

log = logging.getLogger("kvgate.counting")

CHAT: Final = "openai_chat"
"""The dialect whose messages are what the template gets."""

PIECES_MAX: Final = 131_072
ANSWERS_MAX: Final = 8192
"""Counts that are kept: of pieces, and of whole bodies by the engine; some 200 bytes each."""

INLINE_CHARS: Final = 1_048_576
"""A longer chat is rendered and hashed in a thread; hashing so much takes a millisecond."""

INLINE_NEW_CHARS: Final = 4096
"""As much new text is tokenized on the spot; more goes to a thread."""

INLINE_RENDER_S: Final = 0.004
RENDER_S: Final = 1.0
"""How long the template may run on the event loop, and in a thread; the second time is its last."""

PROBE_AGAIN_S: Final = 10.0
"""After a probe that the engine did not live through."""


@dataclass(frozen=True, slots=True)
class CountingSettings:
    """How to count.

    Args:
        local: False leaves it all to the engine's own counter, whose answers are kept.
        vocabulary: a tokenizer.json (or GGUF file) with the engine's vocabulary; None takes the model's own file.
    """

    local: bool = True
    vocabulary: Path | None = None


class Current(Protocol):
    """The engine at the end of a connection that lives."""

    async def __call__(self) -> EngineProfile:
        """Its profile.

        Raises:
            Refused: it is not to be had.
        """


@dataclass(frozen=True, slots=True)
class _Piece:
    key: bytes
    text: str


class Counts:
    """Counts for one engine.

    Args:
        ask: asks it.
        current: which engine is there now.
        settings: how to count; None asks the engine for everything and keeps nothing.
        clock: seconds.
    """

    def __init__(self, ask: Ask, current: Current, settings: CountingSettings | None, clock: Clock) -> None:
        self._ask = ask
        self._current = current
        self._settings = settings
        self._clock = clock
        self._proofs: Proofs | None = None
        self._probing: asyncio.Task[None] | None = None
        self._probe_not_before_s = 0.0
        self._erred: dict[tuple[Proof, str], str] = {}
        self._pieces: Kept[int] = Kept(PIECES_MAX)
        self._answers: Kept[Counted] = Kept(ANSWERS_MAX)
        self._flights: Flights[Counted] = Flights()
        self._read: tuple[ReadRequest, PlainChat | None] | None = None

    # -- counting

    async def bound(self, dialect: str, request: ReadRequest, body: bytes) -> Counted | None:
        """A bound by the body's bytes: a text has no more tokens than bytes, and the body holds every byte of it.

        Raises:
            Refused: the engine is not to be had.
        """
        proofs = await self._proved(dialect)
        if proofs is None or proofs.growth is None or not self._stands(proofs, Proof.BOUND):
            return None
        chat = self._plain(request)
        if chat is None or not proofs.takes(chat):
            return None
        if proofs.ascii_only and (not request.document.text.isascii() or "\\u" in request.document.text):
            return None
        tokens = proofs.added_tokens + proofs.growth.bound(len(body), len(chat.messages))
        return Counted((tokens,), proofs.profile, Proof.BOUND)

    async def local(self, dialect: str, request: ReadRequest) -> Counted | None:
        """The count without the engine's counter, where a proof holds for this request; else None.

        Raises:
            Refused: the engine is not to be had, or changed meanwhile.
        """
        if request.ask.prompts:
            return await self._of_prompts(request)
        proofs = await self._proved(dialect)
        chat = None if proofs is None or proofs.template is None else self._plain(request)
        if proofs is None or chat is None or not proofs.takes(chat):
            return None
        if self._stands(proofs, Proof.SUM):
            return await self._summed(proofs, chat)
        if self._stands(proofs, Proof.TOKENIZER):
            return await self._tokenized(proofs, chat)
        return None

    async def asked(self, dialect: str, request: ReadRequest, start: Callable[[], Awaitable[Counted]]) -> Counted:
        """The engine's own count: asked once for one question, however often and by how many it is put.

        Raises:
            Refused: as `start` does.
        """
        if self._settings is None:
            return await start()
        key = _question(dialect, request)
        found = self._answers.get(key)
        if found is not None and found.profile == await self._current():
            return found
        counted = await self._flights.join(key, start)
        self._answers.put(key, counted)
        return counted

    # -- the proofs

    def standings(self) -> tuple[Standing, ...]:
        """Which proofs are in force, and why the others are not."""
        proofs = self._proofs
        found = []
        for proof in (Proof.BOUND, Proof.SUM, Proof.TOKENIZER):
            if self._settings is None or not self._settings.local:
                found.append(Standing(proof, in_force=False, reason='engine.counting is "engine"'))
            elif proofs is None:
                found.append(Standing(proof, in_force=False, reason="the engine has not been probed yet"))
            else:
                erred = self._erred.get((proof, proofs.profile.fingerprint))
                reason = erred or proofs.off.get(proof, "")
                found.append(Standing(proof, in_force=not reason, reason=reason))
        return (*found, Standing(Proof.ENGINE, in_force=True))

    def erred(self, counted: Counted, drift_tokens: int) -> None:
        """An answer's usage differs from what was counted: the proof that said so is out of force from now on.

        The engine's own counter is the last: it cannot be dropped, only what was kept of it.
        """
        self._answers.clear()
        self._pieces.clear()
        if counted.proof is not Proof.ENGINE:
            reason = f"an answer had {drift_tokens:+d} tokens of prompt against it"
            self._erred[(counted.proof, counted.profile.fingerprint)] = reason
        extra = {"proof": counted.proof.value, "drift_tokens": drift_tokens}
        log.error("the engine's usage differs from what was counted; the proof is not used any more", extra=extra)

    def errors(self) -> list[str]:
        """A sentence for each proof that has erred on the engine that is there."""
        if self._proofs is None:
            return []
        fingerprint = self._proofs.profile.fingerprint
        return [
            f"prompts are not counted by {proof.value} any more: {reason}"
            for (proof, of), reason in self._erred.items()
            if of == fingerprint
        ]

    async def settled(self) -> None:
        """Wait for the probe that is under way, if one is."""
        if self._probing is not None:
            await asyncio.wait([self._probing])

    async def close(self) -> None:
        """End what is under way."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])

    async def _proved(self, dialect: str) -> Proofs | None:
        """What is proved of the engine that is there now; where it is another one, its probe begins."""
        if self._settings is None or not self._settings.local or dialect != CHAT:
            return None
        profile = await self._current()
        if self._proofs is not None and (self._proofs.profile is profile or self._proofs.profile == profile):
            return self._proofs
        self.look_at(profile)
        return None

    def look_at(self, profile: EngineProfile) -> None:
        """Probe this engine, in the background, unless that is done or under way."""
        if self._settings is None or not self._settings.local or self._probing is not None:
            return
        if (self._proofs is not None and self._proofs.profile == profile) or self._clock() < self._probe_not_before_s:
            return
        self._proofs = None
        self._probing = asyncio.create_task(self._probe(profile, self._settings.vocabulary))

    async def _probe(self, profile: EngineProfile, vocabulary: Path | None) -> None:
        try:
            proofs = await probe(self._ask, profile, vocabulary)
        except Refused as refused:
            self._probe_not_before_s = self._clock() + PROBE_AGAIN_S
            reason = refused.refusal.reason.label
            log.info("how to count could not be found out yet, the engine counts", extra={"reason": reason})
            return
        finally:
            self._probing = None
        # Pieces belong to a vocabulary and a boundary.
        self._pieces.clear()
        self._proofs = proofs
        standings = self.standings()
        in_force = [standing.proof.value for standing in standings if standing.in_force]
        off = {standing.proof.value: standing.reason for standing in standings if not standing.in_force}
        log.info("counting", extra={"proofs": in_force, "off": off})

    def _stands(self, proofs: Proofs, proof: Proof) -> bool:
        return proof not in proofs.off and (proof, proofs.profile.fingerprint) not in self._erred

    def _plain(self, request: ReadRequest) -> PlainChat | None:
        if self._read is None or self._read[0] is not request:
            document = request.document
            self._read = request, plain_chat(frozenset(document.members), document.get("messages"))
        return self._read[1]

    # -- sum, tokenizer

    async def _summed(self, proofs: Proofs, chat: PlainChat) -> Counted | None:
        """The sum over the pieces, each of which was counted once."""
        boundary = proofs.boundary
        if boundary is None or (text := await self._rendered(proofs, chat)) is None:
            return None
        if len(text) <= INLINE_CHARS:
            pieces = _pieces(text, boundary[0])
        else:
            pieces = await asyncio.to_thread(_pieces, text, boundary[0])
        known = {piece.key: self._pieces.get(piece.key) for piece in pieces}
        missing = {piece.key: piece.text for piece in pieces if known[piece.key] is None}
        if missing:
            counts = await self._counts_of(proofs, list(missing.values()))
            if counts is None:
                return None
            for key, tokens in zip(missing, counts, strict=True):
                self._pieces.put(key, tokens)
                known[key] = tokens
        total = proofs.added_tokens + sum([known[piece.key] or 0 for piece in pieces])
        return Counted((total,), proofs.profile, Proof.SUM)

    async def _counts_of(self, proofs: Proofs, texts: list[str]) -> list[int] | None:
        """The tokens of pieces: by the vocabulary that is here, or by the engine's tokenizer, in one call."""
        if self._stands(proofs, Proof.TOKENIZER) and (counts := await self._by_vocabulary(proofs, texts)) is not None:
            return counts
        value = {"content": texts, "add_special": False, "parse_special": True}
        status, answer, profile = await self._ask("POST", "/tokenize", value)
        if profile != proofs.profile:
            raise Refused(refusal(Reason.ENGINE_CHANGED, retry_after_s=1))
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if not isinstance(tokens, list) or proofs.boundary is None:
            return None
        return _divided(tokens, texts, proofs.boundary)

    async def _tokenized(self, proofs: Proofs, chat: PlainChat) -> Counted | None:
        text = await self._rendered(proofs, chat)
        if text is None or proofs.tokenizer is None:
            return None
        pieces = [text] if proofs.boundary is None else cut(text, proofs.boundary[0])
        counts = await self._by_vocabulary(proofs, pieces)
        if counts is None:
            return None
        return Counted((proofs.added_tokens + sum(counts),), proofs.profile, Proof.TOKENIZER)

    async def _of_prompts(self, request: ReadRequest) -> Counted | None:
        """Prompts that are bare texts."""
        prompts = request.ask.prompts
        if any(prompt.extra_tokens or len(prompt.pieces) != 1 or not prompt.pieces[0] for prompt in prompts):
            return None
        texts = [prompt.pieces[0] for prompt in prompts if isinstance(prompt.pieces[0], str)]
        proofs = await self._proved(CHAT)
        if len(texts) < len(prompts) or proofs is None or not self._stands(proofs, Proof.TOKENIZER):
            return None
        counts = await self._by_vocabulary(proofs, texts)
        if counts is None:
            return None
        return Counted(tuple(proofs.added_tokens + tokens for tokens in counts), proofs.profile, Proof.TOKENIZER)

    async def _by_vocabulary(self, proofs: Proofs, texts: list[str]) -> list[int] | None:
        """By the vocabulary that is here; None where it does not certainly know all of the characters."""
        if (vocabulary := proofs.tokenizer) is None:
            return None
        if sum(map(len, texts)) <= INLINE_NEW_CHARS:
            return _known(vocabulary, texts)
        return await asyncio.to_thread(_known, vocabulary, texts)

    async def _rendered(self, proofs: Proofs, chat: PlainChat) -> str | None:
        """The prompt as text; None where the template refuses the chat, which is then the engine's to say."""
        template = proofs.template
        if template is None:
            return None
        try:
            if chat.chars <= INLINE_CHARS:
                try:
                    return template.render(chat, INLINE_RENDER_S)
                except RenderTooLong:  # or somebody else had this core meanwhile
                    pass
            return await asyncio.to_thread(template.render, chat, RENDER_S)
        except RenderTooLong:
            reason = f"the template took more than {RENDER_S:g} s, or made too much, of a chat"
            proofs.template = None
            proofs.off |= {Proof.SUM: reason, Proof.BOUND: reason}
            log.error(  # noqa: TRY400 - there is nothing in the traceback but the template's own lines
                "the chat template is not rendered here any more", extra={"reason": reason}
            )
            return None
        except RenderFailed:
            return None


def _known(vocabulary: Tokenizer, texts: list[str]) -> list[int] | None:
    if not all(map(vocabulary.knows, texts)):
        return None
    return [vocabulary.count(text) for text in texts]


def _pieces(text: str, boundary: str) -> list[_Piece]:
    return [_Piece(hashlib.sha256(piece.encode()).digest(), piece) for piece in cut(text, boundary)]


def _divided(tokens: list[Any], texts: list[str], boundary: tuple[str, int]) -> list[int] | None:
    """How many of the tokens belong to each text, which begin with the boundary, but perhaps the first."""
    starts = [at for at, token in enumerate(tokens) if token == boundary[1]]
    if not texts[0].startswith(boundary[0]):
        starts.insert(0, 0)
    if len(starts) != len(texts):
        return None
    ends = [*starts[1:], len(tokens)]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _question(dialect: str, request: ReadRequest) -> bytes:
    """What is counted of a request, hashed: its members as they stand there, but for those that nothing reads."""
    document = request.document
    digest = hashlib.sha256(dialect.encode())
    for name, member in document.members.items():
        if name not in UNCOUNTED_FIELDS:
            digest.update(b"\0")
            digest.update(document.text[member.key_start : member.value_end].encode())
    return digest.digest()
