"""How the suite reaches an engine: through the ledger, behind everybody who waits."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.ask import Size
from kvgate.core.canary import SUITE_TENANT
from kvgate.core.ledger import Denied, Reservation
from kvgate.core.reason import Reason
from kvgate.core.reuse_suite import Scored
from kvgate.core.tenant import Quota
from kvgate.engines.llamacpp.calls import json_bytes
from kvgate.engines.llamacpp.errors import problem_of
from kvgate.engines.llamacpp.scoring import CHAT_PATH, TEXT_PATH, forced_chat, forced_text, logprobs_of, timings_of
from kvgate.lab.reuse_suite.asking import Stopped, Unasked
from kvgate.ports import LineFailed, Refused
from kvgate.upstream import whole_body
from kvgate.wire.answers import parsed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvgate.core.profile import EngineProfile
    from kvgate.core.reuse import Reuse
    from kvgate.core.reuse_case import Message
    from kvgate.engines.llamacpp import LlamaCpp
    from kvgate.ports import Clock, LedgerPort

QUOTA: Final = Quota(concurrency_max=2, queue_max=2, queue_timeout_s=5.0)
"""The suite holds one slot, two in one of its cases, and leaves the queue soon: whoever came meanwhile goes first."""

PATIENCE_S: Final = 600.0
"""How long one request of the suite waits for a moment when nobody else does."""

POLL_S: Final = 0.2
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
ANSWER_TIMEOUT_S: Final = 600.0


class EngineAccess:
    """Implements `SuiteEngine` for a llama-server; whatever it asks is leased, and given back whatever happens.

    Args:
        engine: the engine.
        profile: the process that the suite is about; another one in its place ends the run.
        ledger: of the gate in front of it, or one of its own where there is none.
        waiting: how many others wait for room; while any do, the suite asks nothing.
        clock: seconds.
    """

    def __init__(
        self,
        engine: LlamaCpp,
        profile: EngineProfile,
        ledger: LedgerPort,
        waiting: Callable[[], Awaitable[int]],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._profile = profile
        self._ledger = ledger
        self._waiting = waiting
        self._clock = clock

    @property
    def profile(self) -> EngineProfile:
        """The engine process that is looked at."""
        return self._profile

    @property
    def room_tokens(self) -> int:
        """The longest sequence, answer included, that a request can ever be let in with."""
        pool = self._engine.pool(self._profile)
        return min(pool.tokens_per_slot, pool.grantable_tokens) - pool.margin_tokens

    async def tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The tokens of a text; `special`: as a prompt, with what the engine puts before it."""
        asked = {"content": text, "add_special": special, "parse_special": special}
        found = await self._control("/tokenize", asked)
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise Stopped("the engine's /tokenize gave no tokens")
        return tuple(tokens)

    async def rendered(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The conversation as the engine's chat template writes it."""
        asked: dict[str, Any] = {"messages": _plain(messages)}
        if tools:
            asked["tools"] = list(tools)
        found = await self._control("/apply-template", asked)
        prompt = found.get("prompt") if isinstance(found, dict) else None
        if not isinstance(prompt, str):
            raise Stopped("the engine's /apply-template gave no prompt")
        return prompt

    async def ask(self, prompt: Sequence[int], answer: Sequence[int], reuse: Reuse) -> Scored:
        """Force an answer to a prompt of tokens."""
        return await self._score(TEXT_PATH, forced_text(prompt, answer), len(prompt), answer, reuse)

    async def chat(
        self, messages: Sequence[Message], prompt_tokens: int, answer: Sequence[int], reuse: Reuse
    ) -> Scored:
        """Force an answer in a conversation, on the endpoint that tenants use."""
        body = forced_chat(_plain(messages), answer)
        return await self._score(CHAT_PATH, body, prompt_tokens, answer, reuse)

    async def _control(self, path: str, asked: dict[str, Any]) -> Any:
        try:
            status, raw = await self._engine.control(path, json_bytes(asked))
        except Refused as refused:
            raise Stopped(_sentence(refused)) from None
        if status != 200:
            raise Unasked(f"the engine answered {status} at {path}: {problem_of(parsed(raw))}")
        return parsed(raw)

    async def _score(
        self, path: str, body: dict[str, Any], prompt_tokens: int, answer: Sequence[int], reuse: Reuse
    ) -> Scored:
        edit = self._engine.reuse_edit(reuse)
        sent = json_bytes({name: value for name, value in body.items() if name not in edit.drop} | dict(edit.put))
        size = Size(prompt_tokens=prompt_tokens, output_tokens=len(answer))
        status, answered, duration_s = await self._leased(path, sent, size)
        if status != 200:
            raise Unasked(f"the engine answered {status} at {path}: {problem_of(answered)}")
        logprobs = logprobs_of(answered, answer)
        if logprobs is None:
            raise Unasked(
                f"the engine does not tell the log-probabilities of an answer forced by a grammar of token ids at "
                f"{path}; llama.cpp does since December 2025"
            )
        cached, computed, prefill_s = timings_of(answered)
        return Scored(logprobs, cached, computed, prefill_s, duration_s)

    async def _leased(self, path: str, body: bytes, size: Size) -> tuple[int, Any, float]:
        """One exchange under a lease of its own: status, the JSON of the answer, seconds.

        The lease's id is minted first; whatever happens, what it holds is given back here, at once where the answer
        ended properly and by draining else.
        """
        until_s = self._clock() + PATIENCE_S
        while True:
            await self._let_others_go(until_s)
            lease_id, ended, line = secrets.token_hex(16), False, None
            try:
                reservation = Reservation(lease_id, SUITE_TENANT, QUOTA, size)
                lease = await self._ledger.reserve(reservation, self._engine.pool(self._profile))
                if isinstance(lease, Denied):
                    self._check_denied(lease, until_s)
                    continue
                line = await self._engine.open()
                if _process(line.profile) != _process(self._profile):
                    raise Stopped("another engine process took this one's place; run the suite on that one")
                self._ledger.hand_over(lease_id)
                asked_at_s = self._clock()
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    head = await line.send("POST", path, {"Content-Type": "application/json"}, body)
                    self._ledger.answered(lease_id)
                    raw = await whole_body(line, ANSWER_BYTES_MAX)
                ended = True
                return head.status, parsed(raw), self._clock() - asked_at_s
            except TimeoutError:
                raise Stopped(f"the engine gave no answer within {ANSWER_TIMEOUT_S:g} s") from None
            except LineFailed as failed:
                raise Stopped(f"the connection to the engine broke: {failed}") from None
            except Refused as refused:
                raise Stopped(_sentence(refused)) from None
            finally:
                if line is not None:
                    line.release()
                await asyncio.shield(self._ledger.settle(lease_id, ended=ended))

    async def _let_others_go(self, until_s: float) -> None:
        while await self._waiting():
            if self._clock() >= until_s:
                raise Stopped(_BUSY)
            await asyncio.sleep(POLL_S)

    def _check_denied(self, denied: Denied, until_s: float) -> None:
        if denied.reason is Reason.ENGINE_CHANGED:
            raise Stopped("the engine changed, or its KV pool never has room for the suite's longest prompt")
        if denied.reason not in {Reason.QUEUE_TIMEOUT, Reason.QUEUE_FULL}:
            raise Stopped(f"the gate let the suite ask nothing ({denied.reason.label})")
        if self._clock() >= until_s:
            raise Stopped(_BUSY)


_BUSY: Final = (
    f"tenants had requests waiting for {PATIENCE_S:g} s without a break, and the suite comes last; run it again "
    "when there is less to do: what is finished is kept"
)


def _process(profile: EngineProfile) -> tuple[str, str | None]:
    return profile.fingerprint, profile.instance


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _sentence(refused: Refused) -> str:
    message = refused.refusal.message
    return f"{message} ({refused.detail})" if refused.detail else message
