"""One llama-server as the gate uses it: connections, counting, looks at its slots, the switch for reuse."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.counting import Proof
from kvgate.core.drain import SlotsSeen
from kvgate.core.reason import Reason, refusal
from kvgate.engines.llamacpp.calls import ask, exchange, json_bytes
from kvgate.engines.llamacpp.counting import Counts
from kvgate.engines.llamacpp.discovery import KIND, BoundFacts, busy_slots, profile_of, text_of
from kvgate.engines.llamacpp.errors import LOADING_RETRY_AFTER_S, explain, problem_of
from kvgate.engines.llamacpp.reuse_fields import SWITCHLESS, reuse_edit, unmarked
from kvgate.engines.llamacpp.sleep import Sleep, digest_awake
from kvgate.ports import Counted, LineFailed, Refused
from kvgate.upstream import IDLE_TIMEOUT_S, Connection, Upstream, unanswered

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.ask import Prompt
    from kvgate.core.counting import Standing
    from kvgate.core.json_object import Edit, JsonObject
    from kvgate.core.pool import KvPool
    from kvgate.core.profile import EngineProfile, KvSettings, StartupFacts
    from kvgate.core.reason import Refusal
    from kvgate.core.reuse import Reuse
    from kvgate.engines.llamacpp.counting import CountingSettings
    from kvgate.ports import Clock, Line, ReadRequest, StartupLogSource

log = logging.getLogger("kvgate.engine")

COUNTERS: Final = {
    "openai_chat": "/v1/chat/completions/input_tokens",
    "openai_responses": "/v1/responses/input_tokens",
    "anthropic_messages": "/v1/messages/count_tokens",
}
"""By dialect, the engine's own counter: the very body gives exactly the usage's prompt tokens (ENGINE_FACTS)."""

COUNTS_AT_ONCE = 2
"""Calls to counters and tokenizer in flight; more wait.

llama-server has a few HTTP threads (slots + 4), and each open connection keeps one: beside these stand one line for
each slot, one for health and one for looks at the slots. One too many waits until another has been idle for 2 s.
"""


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """What the operator says of the engine.

    Args:
        kv: topology and pool size, where HTTP does not tell.
        context_tokens_min: the least n_ctx_slot that is served, None for any.
        undersized_refused: False serves an undersized engine all the same, with warnings.
        margin_tokens: cells a sequence may take beyond its output limit.
        headroom_ratio: share of the pool that is never granted.
        idle_timeout_s: how long it may be silent in mid-answer, and how long one that answers no `/health` may keep a
            request waiting for the beginning of its answer.
        counting: how to count; None asks the engine for everything, anew each time.
    """

    kv: KvSettings
    context_tokens_min: int | None = None
    undersized_refused: bool = True
    margin_tokens: int = 0
    headroom_ratio: float = 0.0
    idle_timeout_s: float = IDLE_TIMEOUT_S
    counting: CountingSettings | None = None


@dataclass(frozen=True, slots=True)
class _Called:
    """An answered call: its status, the JSON of its body if it is any, its bytes, and who answered."""

    status: int
    answer: Any
    raw: bytes
    profile: EngineProfile


class LlamaCpp:
    """One llama-server; implements `ports.Engine`.

    Args:
        url: where it is.
        settings: what the operator says of it.
        clock: seconds.
        startup_log: its startup log, where there is one.
        on_profile: told of every profile that comes into force, with the one before it.
        api_key: the engine's own key.
    """

    kind = KIND

    def __init__(
        self,
        url: str,
        settings: LlamaCppSettings,
        clock: Clock,
        *,
        startup_log: StartupLogSource | None = None,
        on_profile: Callable[[EngineProfile | None, EngineProfile], None] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.upstream = Upstream(url, self._hello, api_key, settings.idle_timeout_s)
        self._settings = settings
        self._clock = clock
        self._facts = BoundFacts(startup_log)
        self._on_profile = on_profile
        self._counting = asyncio.Semaphore(COUNTS_AT_ONCE)
        self._counts = Counts(self._asked, self._current, settings.counting, clock)
        self._profile: EngineProfile | None = None
        self._seen: tuple[str, StartupFacts | None] | None = None
        self._calling: set[Connection] = set()
        self._reuse_off: dict[str, bool] = {}
        self._unheard_since_s: float | None = None
        self._sleep = Sleep()
        self._slots_asked = False

    def configure(self, settings: LlamaCppSettings) -> None:
        """Go by other settings from the next request on: the profile is made anew of what the engine says.

        Requests that are under way go on under those that they were judged by.
        """
        self._settings = settings
        self.upstream.idle_timeout_s = settings.idle_timeout_s
        self._seen = None
        self.upstream.retire()

    @property
    def profile(self) -> EngineProfile | None:
        """The latest profile, None until the engine has been reached once."""
        return self._profile

    @property
    def is_asleep(self) -> bool:
        """Whether the engine had put its model away at the last look (`--sleep-idle-seconds`)."""
        return self._sleep.asleep

    def pool(self, profile: EngineProfile) -> KvPool:
        """The pool to guard on an engine of this profile."""
        settings = self._settings
        return profile.pool(margin_tokens=settings.margin_tokens, headroom_ratio=settings.headroom_ratio)

    def reuse_edit(self, reuse: Reuse) -> Edit:
        """What the request says of reuse: see `reuse_fields`."""
        return reuse_edit(reuse)

    def unmarked(self, document: JsonObject) -> JsonObject:
        """The body without the marks of reuse inside it."""
        return unmarked(document)

    def carries_reuse(self, dialect: str) -> bool:
        """Whether a request of this dialect can ask for reuse, or against it."""
        return dialect not in SWITCHLESS

    @property
    def is_undersized(self) -> bool:
        """Whether the engine as it was last seen is below the product's minimum."""
        profile, least = self._profile, self._settings.context_tokens_min
        return profile is not None and least is not None and profile.n_ctx_slot.value < least

    def refusal_now(self) -> Refused | None:
        """Why the engine as it was last seen may not serve, if it may not."""
        if self._profile is None or not self.is_undersized or not self._settings.undersized_refused:
            return None
        found, least = self._profile.n_ctx_slot.value, self._settings.context_tokens_min or 0
        return Refused(
            refusal(
                Reason.ENGINE_UNDERSIZED,
                figures=(("n_ctx_slot", found), ("context_tokens_min", least)),
                retry_after_s=60,
                n_ctx_slot=found,
                context_tokens_min=least,
            )
        )

    async def open(self, *, fresh: bool = False) -> Connection:
        """A connection for one inference, or a new one for several in a row.

        Raises:
            Refused: ENGINE_UNREACHABLE, ENGINE_LOADING, ENGINE_UNKNOWN or ENGINE_UNDERSIZED.
        """
        connection = await self.upstream.open(fresh=fresh)
        if (refused := self.refusal_now()) is not None:
            connection.release()
            raise refused
        return connection

    async def discover(self) -> EngineProfile:
        """The engine's profile now, asked on a connection of its own.

        Raises:
            Refused: ENGINE_UNREACHABLE, ENGINE_LOADING or ENGINE_UNKNOWN.
        """
        try:
            called = await self._call("GET", "/health", for_tenant=False)
            if called.status == 200 and self._sleep.is_told:
                await self._see_sleep()
        except Refused:
            self._unheard()
            # It hangs or is gone: who waits for a count waits for nothing. Inference is left to its own line.
            for connection in list(self._calling):
                connection.close()
            # A successor that shows no instance could have the same fingerprint and other flags: probe it anew.
            if self._profile is not None and self._profile.instance is None:
                self._reuse_off.clear()
            raise
        self._unheard_since_s = None
        if called.status == 503:
            raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=LOADING_RETRY_AFTER_S))
        if not self.is_asleep:  # a probe would wake it
            self._counts.look_at(called.profile)
        return called.profile

    def _unheard(self) -> None:
        """It did not answer. Of a long prefill nothing is heard either, but then `/health` answers."""
        now_s, allowed_s = self._clock(), self._settings.idle_timeout_s
        if self._unheard_since_s is None:
            self._unheard_since_s = now_s
        elif now_s - self._unheard_since_s >= allowed_s:
            self.upstream.end_silent(f"the engine has not answered /health for {allowed_s:g} s either")

    async def _see_sleep(self) -> None:
        called = await self._call("GET", "/props", for_tenant=False)
        if called.status == 200 and isinstance(called.answer, dict):
            self._sleep.note(called.answer)

    async def bound(self, dialect: str, request: ReadRequest, body: bytes) -> Counted | None:
        """A certain bound for the prompt, where one is proved of this engine.

        Raises:
            Refused: as `open`.
        """
        return await self._counts.bound(dialect, request, body)

    async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
        """The prompt sizes, by the cheapest proof; the last is the engine's own counter.

        Raises:
            Refused: as `open`, or UNCOUNTED where the engine cannot count this body.
        """
        found = await self._counts.local(dialect, request)
        return found or await self._counts.asked(
            dialect, request, lambda: self._count_by_engine(dialect, request, body)
        )

    def count_erred(self, counted: Counted, drift_tokens: int) -> None:
        """An answer's usage differs from what was counted."""
        self._counts.erred(counted, drift_tokens)

    def proofs(self) -> tuple[Standing, ...]:
        """Which proofs of a prompt's size are in force, and why the others are not."""
        return self._counts.standings()

    def erred_proofs(self) -> list[str]:
        """A sentence for each proof that an answer contradicted."""
        return self._counts.errors()

    async def proofs_settled(self) -> None:
        """Wait until it is known which proofs hold."""
        await self._counts.settled()

    async def _count_by_engine(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
        """The prompt sizes: by the engine's counter for this dialect, or piece by piece by its tokenizer."""
        prompts = request.ask.prompts
        if not prompts:
            return await self._count_by(COUNTERS[dialect], body)
        counting = [asyncio.ensure_future(self._count_prompt(prompt)) for prompt in prompts]
        try:
            found = await asyncio.gather(*counting)
        finally:
            for task in counting:  # where one cannot be counted the others need not be
                task.cancel()
        tokens = tuple(tokens for tokens, _ in found)
        proof = Proof.BOUND if any(prompt.extra_tokens for prompt in prompts) else Proof.ENGINE
        return Counted(tokens, self._agreed([profile for _, profile in found]), proof)

    async def count_text(self, text: str) -> int:
        """The tokens of a bare text, nothing added.

        Raises:
            Refused: as `count`.
        """
        answer, _ = await self._control("/tokenize", json_bytes({"content": text}))
        return len(_tokens(answer))

    async def text_pieces(self, text: str) -> tuple[int, ...]:
        """How many bytes of a bare text each of its tokens stands for.

        Raises:
            Refused: as `count`.
        """
        asked = {"content": text, "parse_special": True, "with_pieces": True}
        answer, _ = await self._control("/tokenize", json_bytes(asked))
        pieces = [token.get("piece") if isinstance(token, dict) else None for token in _tokens(answer)]
        # A piece that is no whole text (half a character) comes as a list of its bytes.
        lengths = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        return tuple(len(piece) if isinstance(piece, bytes | list) else 0 for piece in lengths)

    async def _count_by(self, path: str, body: bytes) -> Counted:
        answer, profile = await self._control(path, body)
        tokens = answer.get("input_tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, int) or tokens < 0:
            raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem=f"{path} gave no count", retry_after_s=60))
        return Counted((tokens,), profile)

    async def _count_prompt(self, prompt: Prompt) -> tuple[int, EngineProfile]:
        """One prompt's tokens, and its bound for what the engine adds.

        Token ids need no counter; with text among them the engine's tokenizer takes the same mixed list that the
        engine itself would. BOS is added as for a real prompt: /tokenize leaves it out unless told.
        """
        pieces = prompt.pieces
        if prompt.extra_tokens == 0 and all(isinstance(piece, int) for piece in pieces):
            return len(pieces), await self._current()
        # With a frame around them the pieces are tokenized one by one, and each could be joined to it differently.
        content = pieces[0] if len(pieces) == 1 else list(pieces)
        asked = {"content": content, "add_special": True, "parse_special": True}
        answer, profile = await self._control("/tokenize", json_bytes(asked))
        return len(_tokens(answer)) + prompt.extra_tokens, profile

    async def _current(self) -> EngineProfile:
        connection = await self.open()
        connection.release()
        return connection.profile

    def _agreed(self, profiles: list[EngineProfile]) -> EngineProfile:
        if any(profile != profiles[0] for profile in profiles):
            raise Refused(refusal(Reason.ENGINE_CHANGED, retry_after_s=1))
        return profiles[0]

    async def _control(self, path: str, body: bytes) -> tuple[Any, EngineProfile]:
        """One counter call; the JSON of its answer.

        Raises:
            Refused: the engine is not to be had, lacks the endpoint, or refuses the body.
        """
        async with self._counting:
            called = await self._call("POST", path, body)
        if called.status == 200 and called.answer is not None:
            return called.answer, called.profile
        if called.status == 503:
            raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=LOADING_RETRY_AFTER_S))
        if called.status in {200, 404, 405, 501}:
            raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem=f"it has no counter at {path}", retry_after_s=60))
        raise Refused(refusal(Reason.UNCOUNTED, problem=problem_of(called.answer)))

    async def _asked(self, method: str, path: str, value: Any = None) -> tuple[int, Any, EngineProfile]:
        """One call about counting.

        Raises:
            Refused: the engine is not to be had.
        """
        async with self._counting:
            called = await self._call(method, path, b"" if value is None else json_bytes(value))
        return called.status, called.answer, called.profile

    async def control(self, path: str, body: bytes) -> tuple[int, bytes]:
        """One call for a tenant that runs no inference (tokenizer, template, counters): status and body.

        Raises:
            Refused: the engine is not to be had.
        """
        async with self._counting:
            called = await self._call("POST", path, body)
        return called.status, called.raw

    async def props(self) -> dict[str, Any]:
        """The engine's `/props`, whole.

        Raises:
            Refused: the engine is not to be had.
        """
        called = await self._call("GET", "/props")
        if called.status != 200 or not isinstance(called.answer, dict):
            raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=LOADING_RETRY_AFTER_S))
        return called.answer

    async def _call(self, method: str, path: str, body: bytes = b"", *, for_tenant: bool = True) -> _Called:
        """One short call on a connection of its own; for a tenant, an engine that may not serve is asked nothing.

        It runs no inference: where a kept connection breaks, as one does that the engine closed in that moment, it is
        made once more on a new one.

        Raises:
            Refused: ENGINE_UNREACHABLE, with the cause; what a new connection finds out.
        """
        opened = self.open if for_tenant else self.upstream.open
        connection = await opened()
        try:
            return await self._called(connection, method, path, body)
        except LineFailed as failed:
            if failed.silent or not connection.is_kept:
                raise unanswered(str(failed), failed.trouble) from None
        try:
            return await self._called(await opened(fresh=True), method, path, body)
        except LineFailed as failed:
            raise unanswered(str(failed), failed.trouble) from None

    async def _called(self, connection: Connection, method: str, path: str, body: bytes) -> _Called:
        self._calling.add(connection)
        try:
            told = await ask(connection, method, path, body, waking=self._sleep.waking)
        finally:
            self._calling.discard(connection)
            connection.release()
        if method == "POST":
            self._sleep.answered()
        return _Called(*told, connection.profile)

    def reuse_is_off(self, dialect: str, profile: EngineProfile) -> bool | None:
        """True where the request carries the switch; for the others, what the probe of this process saw."""
        if dialect not in SWITCHLESS:
            return True
        return self._reuse_off.get(_process(profile))

    def reuse_seen(self, profile: EngineProfile) -> None:
        """An answer showed reuse where there should be none: the dialects that the probe let in are closed."""
        self._reuse_off[_process(profile)] = False

    async def probe_reuse(self, line: Line) -> None:
        """Ask the same twice, in words of its own that nobody else can have left behind, and look.

        Raises:
            LineFailed: the connection broke.
        """
        words = " ".join(secrets.token_hex(4) for _ in range(4))
        body = json_bytes({"messages": [{"role": "user", "content": words}], "max_tokens": 1})
        reused = []
        for _ in range(3):
            status, answer = await exchange(line, "POST", "/v1/messages", body)
            usage = answer.get("usage") if status == 200 and isinstance(answer, dict) else None
            if not isinstance(usage, dict):
                return
            reused.append(usage.get("cache_read_input_tokens") or 0)
        # The first may find a slot that shares the template's head, which only reuse can tell.
        self._reuse_off = {_process(line.profile): not any(reused)}
        log.info("probed the engine's default reuse", extra={"reuse_on": any(reused)})

    def explain(self, status: int, body: bytes) -> Refusal:
        """What an error answer means, in words that quote neither prompt nor key."""
        return explain(status, body)

    async def look(self) -> SlotsSeen | None:
        """One look at the slots at work; None where the engine does not show them.

        The answer comes between two of the engine's batches: during a long prefill it takes seconds. An engine that
        sleeps is not asked, which would wake it: it does so only when every slot is idle.

        Raises:
            Refused: the engine is not to be had.
            LineFailed: the connection broke.
        """
        connection = await self.upstream.open()
        asked_at_s = self._clock()
        try:
            if self._sleep.is_told and await self._sleeps(connection):
                return SlotsSeen((), asked_at_s)
            if not connection.usable:  # that was the last exchange the engine has on one connection
                connection = await self.upstream.open()
            slots = await _slots(connection)
        finally:
            connection.release()
        if slots is None:
            return None
        return SlotsSeen(tuple(busy_slots(slots)), asked_at_s)

    async def _sleeps(self, connection: Connection) -> bool:
        status, props = await exchange(connection, "GET", "/props")
        if status == 200 and isinstance(props, dict):
            self._sleep.note(props)
        return self._sleep.asleep

    async def close(self) -> None:
        """Close every connection."""
        await self._counts.close()
        await self.upstream.close()

    # -- discovery

    async def _hello(self, connection: Connection) -> EngineProfile:
        """Ask the engine who it is; runs first on every new connection."""
        status, props = await exchange(connection, "GET", "/props")
        if status == 503:
            raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=LOADING_RETRY_AFTER_S))
        if status != 200 or not isinstance(props, dict):
            raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem=f"GET /props answered {status}", retry_after_s=60))
        self._sleep.note(props)
        facts = self._facts.of(text_of(props.get("media_marker")))
        seen, waking = (digest_awake(props), facts), self._sleep.waking
        if self._profile is not None and seen == self._seen and (self._slots_asked or waking):
            return self._profile
        _, models = await exchange(connection, "GET", "/v1/models")
        # Asked for its slots it would wake, or answer when it has loaded. /props says whether it shows them; they
        # are looked at once it is up.
        slots = None if waking else await _slots(connection)
        visible = slots is not None or (waking and props.get("endpoint_slots") is True)
        profile = profile_of(props, models, slots, facts, self._settings.kv, slots_visible=visible)
        before, self._profile, self._seen, self._slots_asked = self._profile, profile, seen, not waking
        if profile != before and self._on_profile is not None:
            self._on_profile(before, profile)
        return profile


async def _slots(connection: Connection) -> list[Any] | None:
    status, slots = await exchange(connection, "GET", "/slots")
    return slots if status == 200 and isinstance(slots, list) else None


def _process(profile: EngineProfile) -> str:
    """What tells this engine process from others; without an instance, its fingerprint is all there is."""
    return profile.instance or profile.fingerprint


def _tokens(answer: Any) -> list[Any]:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list):
        raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem="/tokenize gave no tokens", retry_after_s=60))
    return tokens
