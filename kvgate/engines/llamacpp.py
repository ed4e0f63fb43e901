"""llama.cpp's llama-server: how to recognise, discover, count on and watch it, and how to switch reuse off."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.json_object import Edit
from kvgate.core.ledger import BusySlot, SlotsSeen
from kvgate.core.profile import EngineProfile, Fact, KvSettings, Source, StartupFacts, resolve_kv
from kvgate.core.reason import Reason, refusal
from kvgate.core.reuse import Reuse
from kvgate.ports import Counted, LineFailed, Refused
from kvgate.upstream import Connection, Upstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgate.core.pool import KvPool
    from kvgate.ports import Clock, StartupLogSource

log = logging.getLogger("kvgate.engine")

COUNTERS: Final = {"openai_chat": "/v1/chat/completions/input_tokens"}
"""By dialect, the engine's own counter: the very body gives exactly `usage.prompt_tokens` (ENGINE_FACTS)."""

REUSE_FIELDS: Final = frozenset({"cache_prompt", "n_cache_reuse", "id_slot", "slot_id", "prompt_cache_key"})
"""Fields that ask for, key or pin prefix reuse; never taken from a client."""

SAFE_PROBLEMS: Final = (
    "image input is not supported",
    "audio input is not supported",
    "tools param requires --jinja flag",
    "Cannot use custom grammar constraints with tools",
    "Cannot have 2 or more assistant messages at the end of the list",
    "Assistant response prefill is incompatible with enable_thinking",
    "Conversation roles must alternate",
    "System role not supported",
    "unsupported content[].type",
    "Failed to parse messages",
    "Failed to parse tool call arguments as JSON",
)
"""Beginnings of the engine's messages that say what is wrong without quoting the prompt."""

COUNTS_AT_ONCE = 8
"""Counter calls in flight; more wait, so that a flood of large bodies does not take all of the engine's threads."""

CONTROL_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 16 * 1024 * 1024
_RETRY_AFTER_S = 2


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """What the operator says of the engine.

    Args:
        kv: topology and pool size, where HTTP does not tell.
        context_tokens_min: the least n_ctx_slot that is served, None for any.
        undersized_refused: False serves an undersized engine all the same, with warnings.
        margin_tokens: cells a sequence may take beyond its output limit.
        headroom_ratio: share of the pool that is never granted.
    """

    kv: KvSettings
    context_tokens_min: int | None = None
    undersized_refused: bool = True
    margin_tokens: int = 0
    headroom_ratio: float = 0.0


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

    kind = "llamacpp"

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
        self.upstream = Upstream(url, self._hello, clock, api_key)
        self._settings = settings
        self._clock = clock
        self._startup_log = startup_log
        self._on_profile = on_profile
        self._counting = asyncio.Semaphore(COUNTS_AT_ONCE)
        self._profile: EngineProfile | None = None
        self._seen: tuple[str, int] | None = None
        self._starts_before = 0

    @property
    def profile(self) -> EngineProfile | None:
        """The latest profile, None until the engine has been reached once."""
        return self._profile

    def pool(self, profile: EngineProfile) -> KvPool:
        """The pool to guard on an engine of this profile."""
        settings = self._settings
        return profile.pool(margin_tokens=settings.margin_tokens, headroom_ratio=settings.headroom_ratio)

    def reuse_edit(self, reuse: Reuse) -> Edit:
        """Reuse off: said explicitly, since llama.cpp's default is on; nothing of the client's own stays."""
        match reuse:
            case Reuse.OFF:
                return Edit({"cache_prompt": False}, REUSE_FIELDS)

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

    async def open(self) -> Connection:
        """A connection for one inference.

        Raises:
            Refused: ENGINE_UNREACHABLE, ENGINE_LOADING, ENGINE_UNKNOWN or ENGINE_UNDERSIZED.
        """
        connection = await self.upstream.open()
        if (refused := self.refusal_now()) is not None:
            connection.release()
            raise refused
        return connection

    async def discover(self) -> EngineProfile:
        """The engine's profile now, asked on a connection of its own.

        Raises:
            Refused: ENGINE_UNREACHABLE, ENGINE_LOADING or ENGINE_UNKNOWN.
        """
        connection = await self.upstream.open()
        try:
            status, _ = await _exchange(connection, "GET", "/health")
        except LineFailed:
            raise Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=_RETRY_AFTER_S)) from None
        finally:
            connection.release()
        if status == 503:
            raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=_RETRY_AFTER_S))
        return connection.profile

    async def count(self, dialect: str, body: bytes) -> Counted:
        """The exact prompt size, by the engine's counter for this dialect.

        Raises:
            Refused: as `open`, or UNCOUNTED where the engine cannot count this body.
        """
        async with self._counting:
            connection = await self.open()
            try:
                status, answer = await _exchange(connection, "POST", COUNTERS[dialect], body)
            except LineFailed:
                raise Refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=_RETRY_AFTER_S)) from None
            finally:
                connection.release()
        tokens = answer.get("input_tokens") if isinstance(answer, dict) else None
        if status == 200 and isinstance(tokens, int) and tokens >= 0:
            return Counted(tokens, connection.profile)
        if status == 503:
            raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=_RETRY_AFTER_S))
        if status in {404, 405, 501} or status == 200:
            problem = f"it has no counter at {COUNTERS[dialect]}"
            raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem=problem, retry_after_s=60))
        raise Refused(refusal(Reason.UNCOUNTED, problem=_problem(answer)))

    async def look(self) -> SlotsSeen | None:
        """One look at the slots at work; None where the engine does not show them.

        The answer comes between two of the engine's batches: during a long prefill it takes seconds.

        Raises:
            Refused: the engine is not to be had.
            LineFailed: the connection broke.
        """
        connection = await self.upstream.open()
        asked_at_s = self._clock()
        try:
            status, slots = await _exchange(connection, "GET", "/slots")
        finally:
            connection.release()
        if status != 200 or not isinstance(slots, list):
            return None
        return SlotsSeen(tuple(_busy(slots)), asked_at_s)

    async def close(self) -> None:
        """Close every connection."""
        await self.upstream.close()

    # -- discovery

    async def _hello(self, connection: Connection) -> EngineProfile:
        """Ask the engine who it is; runs first on every new connection."""
        status, props, raw = await _ask(connection, "GET", "/props")
        if status == 503:
            raise Refused(refusal(Reason.ENGINE_LOADING, retry_after_s=_RETRY_AFTER_S))
        if status != 200 or not isinstance(props, dict):
            raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem=f"GET /props answered {status}", retry_after_s=60))
        facts, starts = self._facts(_text(props.get("media_marker")))
        seen = (hashlib.sha256(raw).hexdigest(), starts)
        if self._profile is not None and seen == self._seen:
            return self._profile
        _, models = await _exchange(connection, "GET", "/v1/models")
        slots_status, slots = await _exchange(connection, "GET", "/slots")
        visible = slots_status == 200 and isinstance(slots, list)
        profile = _profile(props, models, slots if visible else None, facts, self._settings.kv)
        before, self._profile, self._seen = self._profile, profile, seen
        if profile != before and self._on_profile is not None:
            self._on_profile(before, profile)
        return profile

    def _facts(self, instance: str | None) -> tuple[StartupFacts | None, int]:
        """The startup log's facts, where they are certainly this process's own, and how many starts it shows.

        A log outlives the process that wrote it. Its facts count only for the process that was there when
        they were first read; a successor needs a start of its own in the log. Which process it is, the
        instance tells; where there is none, only a child's log is believed, since its end would be noticed.
        """
        source = self._startup_log
        if source is None:
            return None, 0
        found = source.read()
        before = self._profile
        if before is not None and before.instance != instance and found.starts > 0 and self._seen is not None:
            self._starts_before = self._seen[1]
        certain = instance is not None or source.is_childs
        return (found.facts if certain and found.starts > self._starts_before else None), found.starts


def _profile(
    props: dict[str, Any],
    models: Any,
    slots: list[Any] | None,
    facts: StartupFacts | None,
    kv: KvSettings,
) -> EngineProfile:
    n_ctx_slot = _n_ctx_slot(props, models, slots)
    total = _positive(props.get("total_slots"))
    total_slots = Fact(total, Source.PROPS) if total else Fact(len(slots or ()), Source.SLOTS)
    if n_ctx_slot is None or total_slots.value < 1:
        problem = "neither /props, /slots nor /v1/models says how much context a slot has"
        raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem=problem, retry_after_s=60))
    try:
        topology, pool_tokens = resolve_kv(n_ctx_slot.value, total_slots.value, facts, kv)
    except ValueError as error:
        raise Refused(refusal(Reason.ENGINE_UNKNOWN, problem=str(error), retry_after_s=60)) from None
    model, meta = _model_entry(models)
    template = _text(props.get("chat_template"))
    return EngineProfile(
        kind=LlamaCpp.kind,
        n_ctx_slot=n_ctx_slot,
        total_slots=total_slots,
        topology=topology,
        pool_tokens=pool_tokens,
        instance=_text(props.get("media_marker")),
        build=_text(props.get("build_info")),
        models=model,
        model_path=_text(props.get("model_path")),
        model_ftype=_text(props.get("model_ftype")),
        model_bytes=_positive(meta.get("size")),
        n_params=_positive(meta.get("n_params")),
        n_vocab=_positive(meta.get("n_vocab")),
        n_ctx_train=_positive(meta.get("n_ctx_train")),
        chat_template_sha256=(
            hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest() if template else None
        ),
        kv_type_k=Fact(facts.kv_type_k, Source.LOG) if facts and facts.kv_type_k else None,
        kv_type_v=Fact(facts.kv_type_v, Source.LOG) if facts and facts.kv_type_v else None,
        slots_visible=slots is not None,
    )


def _n_ctx_slot(props: dict[str, Any], models: Any, slots: list[Any] | None) -> Fact[int] | None:
    """The least of what the three endpoints say; the first that says it is named."""
    settings = props.get("default_generation_settings")
    told = [(_positive(settings.get("n_ctx")) if isinstance(settings, dict) else None, Source.PROPS)]
    told += [(_positive(slot.get("n_ctx")), Source.SLOTS) for slot in slots or () if isinstance(slot, dict)]
    told.append((_positive(_model_entry(models)[1].get("n_ctx")), Source.MODELS))
    found = [Fact(value, source) for value, source in told if value is not None]
    return min(found, key=lambda fact: fact.value, default=None)


def _model_entry(models: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names under which the engine serves its model, and the model's figures."""
    data = models.get("data") if isinstance(models, dict) else None
    entry = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    aliases = entry.get("aliases")
    names = [entry.get("id"), *(aliases if isinstance(aliases, list) else ())]
    meta = entry.get("meta")
    unique = dict.fromkeys(name for name in names if isinstance(name, str))
    return tuple(unique), meta if isinstance(meta, dict) else {}


def _busy(slots: list[Any]) -> list[BusySlot]:
    busy = []
    for at, slot in enumerate(slots):
        if isinstance(slot, dict) and slot.get("is_processing"):
            params = slot.get("params")
            limit = params.get("n_predict") if isinstance(params, dict) else None
            task = slot.get("id_task")
            busy.append(
                BusySlot(
                    slot_id=at,
                    task_id=task if isinstance(task, int) else None,
                    output_tokens=limit if isinstance(limit, int) else None,
                )
            )
    return busy


def _problem(answer: Any) -> str:
    """What the engine says is wrong, only where that cannot quote the prompt."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if isinstance(message, str):
        known = next((phrase for phrase in SAFE_PROBLEMS if phrase in message), None)
        if known is not None:
            return f"{known}."
    return "its chat template or its request parser refused the body."


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


async def _exchange(connection: Connection, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    status, answer, _ = await _ask(connection, method, path, body)
    return status, answer


async def _ask(connection: Connection, method: str, path: str, body: bytes = b"") -> tuple[int, Any, bytes]:
    """One control call: status, the JSON of its answer (None where it is none), and its bytes."""
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            head = await connection.send(method, path, headers, body)
            raw = await connection.read_all(_ANSWER_BYTES_MAX)
    except TimeoutError:
        raise LineFailed(f"no answer to {method} {path} in {CONTROL_TIMEOUT_S:g} s", sent=True) from None
    try:
        return head.status, json.loads(raw), raw
    except (ValueError, RecursionError):
        return head.status, None, raw
