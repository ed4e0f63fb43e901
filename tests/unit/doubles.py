"""The ports, played by scripts: what the tests put where sockets, clocks and engines are."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvgate.core.counting import Proof
from kvgate.core.json_object import Edit
from kvgate.core.ledger import Denied, Lease
from kvgate.core.profile import EngineProfile, Fact, Source, Topology
from kvgate.core.reuse import Reuse
from kvgate.core.tenant import Limits, OnOverflow, Quota, Tenant
from kvgate.engines.llamacpp.errors import explain
from kvgate.ports import Counted, Head, LineFailed, Refused, nothing_yet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from kvgate.core.ask import Usage
    from kvgate.core.json_object import JsonObject
    from kvgate.core.ledger import Reservation
    from kvgate.core.pool import KvPool
    from kvgate.core.reason import Refusal
    from kvgate.ports import Line, ReadRequest, RequestRecord

    Step = EngineProfile | Refused | Callable[[], Awaitable[None]]

NO_CACHE = Edit({"cache_prompt": False}, frozenset({"cache_prompt", "id_slot"}))


def profile(n_ctx: int = 1024, slots: int = 2, **changes: Any) -> EngineProfile:
    """A divided engine of that many slots."""
    found = EngineProfile(
        kind="double",
        n_ctx_slot=Fact(n_ctx, Source.PROPS),
        total_slots=Fact(slots, Source.PROPS),
        topology=Fact(Topology.DIVIDED, Source.SETTING),
        pool_tokens=Fact(n_ctx * slots, Source.SETTING),
        instance="<one>",
        build="b1",
        models=("small",),
    )
    return replace(found, **changes)


def tenant(name: str = "acme", *, clamp: bool = False, **quota: Any) -> Tenant:
    on_overflow = OnOverflow.CLAMP if clamp else OnOverflow.REJECT
    return Tenant(name, Limits(on_overflow=on_overflow), Quota(**quota))


def chat(content: str = "hi", **fields: Any) -> bytes:
    """A chat body."""
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


class ManualClock:
    """Time that passes when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


async def forever() -> None:
    """Never comes back, except by cancellation."""
    await asyncio.get_running_loop().create_future()


@dataclass
class LineDouble:
    """A connection that answers what the script says; `pieces` may end in an exception."""

    profile: EngineProfile = field(default_factory=profile)
    head: Head | Exception = field(default_factory=lambda: Head(200, (("content-type", "application/json"),)))
    pieces: Sequence[bytes | Exception | Callable[[], Awaitable[None]]] = ()
    sent: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    released: int = 0
    reads: int = 0

    def __post_init__(self) -> None:
        self._left = list(self.pieces)

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Head:
        self.sent.append((method, path, dict(headers), body))
        await asyncio.sleep(0)
        if isinstance(self.head, Exception):
            raise self.head
        return self.head

    async def read(self) -> bytes:
        self.reads += 1
        while self._left:
            piece = self._left.pop(0)
            if isinstance(piece, bytes):
                return piece
            if isinstance(piece, Exception):
                raise piece
            await piece()
        return b""

    def release(self) -> None:
        self.released += 1


@dataclass
class EngineDouble:
    """An engine whose counts and lines are scripted; each list's last entry stays in force.

    `prompts` are what a count finds, `prompt_tokens` where there is one. `reuse_off` is by dialect, True for those
    that are not in it; what a probe finds, `probes`, goes for all that are. A text has a token a word.
    """

    prompt_tokens: int = 10
    now: EngineProfile = field(default_factory=lambda: profile())  # noqa: PLW0108 - `profile` below is another one
    counts: list[Step] = field(default_factory=list)
    opens: list[Step] = field(default_factory=list)
    counted: list[tuple[str, bytes]] = field(default_factory=list)
    lines: list[LineDouble] = field(default_factory=list)
    fresh: list[bool] = field(default_factory=list)
    answer: Callable[[EngineProfile], LineDouble] = LineDouble
    prompts: tuple[int, ...] = ()
    proof: Proof = Proof.ENGINE
    bounds: list[int | None] = field(default_factory=list)
    erred: list[Counted] = field(default_factory=list)
    is_known: bool = True
    reuse_off: dict[str, bool | None] = field(default_factory=dict)
    probes: list[bool | LineFailed | Callable[[], Awaitable[None]]] = field(default_factory=list)
    probed: list[Line] = field(default_factory=list)
    seen_reusing: list[EngineProfile] = field(default_factory=list)
    text_counts: list[Step] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    controls: dict[str, tuple[int, bytes] | Refused] = field(default_factory=dict)
    controlled: list[tuple[str, bytes]] = field(default_factory=list)
    told_props: dict[str, Any] = field(default_factory=dict)

    @property
    def profile(self) -> EngineProfile | None:
        return self.now if self.is_known else None

    async def bound(self, dialect: str, request: ReadRequest, body: bytes) -> Counted | None:
        bound = self.bounds.pop(0) if self.bounds else None
        return None if bound is None else Counted((bound,), self.now, Proof.BOUND)

    async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
        self.counted.append((dialect, body))
        found = await self._next(self.counts)
        return Counted(self.prompts or (self.prompt_tokens,), found, self.proof)

    async def count_text(self, text: str) -> int:
        self.texts.append(text)
        await self._next(self.text_counts)
        return len(text.split())

    async def text_pieces(self, text: str) -> tuple[int, ...]:
        """A token for each word, with the space before it."""
        await self._next(self.text_counts)
        return tuple(len(word.encode()) for word in re.findall(r"\s*\S+|\s+$", text))

    async def open(self, *, fresh: bool = False) -> LineDouble:
        found = await self._next(self.opens)
        self.fresh.append(fresh)
        self.lines.append(self.answer(found))
        return self.lines[-1]

    def pool(self, profile: EngineProfile) -> KvPool:
        return profile.pool()

    def reuse_edit(self, reuse: Reuse) -> Edit:
        return NO_CACHE if reuse is Reuse.OFF else Edit({"cache_prompt": True}, NO_CACHE.drop)

    def unmarked(self, document: JsonObject) -> JsonObject:
        return document

    def carries_reuse(self, dialect: str) -> bool:
        return dialect not in self.reuse_off

    def reuse_is_off(self, dialect: str, profile: EngineProfile) -> bool | None:
        return self.reuse_off.get(dialect, True)

    async def probe_reuse(self, line: Line) -> None:
        self.probed.append(line)
        await asyncio.sleep(0)
        while self.probes:
            step = self.probes.pop(0)
            if isinstance(step, bool):
                self.reuse_off = dict.fromkeys(self.reuse_off, step)
                return
            if isinstance(step, LineFailed):
                raise step
            await step()

    def reuse_seen(self, profile: EngineProfile) -> None:
        self.seen_reusing.append(profile)

    def count_erred(self, counted: Counted, drift_tokens: int) -> None:
        self.erred.append(counted)

    def explain(self, status: int, body: bytes) -> Refusal:
        return explain(status, body)

    async def control(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.controlled.append((path, body))
        found = self.controls.get(path, (200, b"{}"))
        if isinstance(found, Refused):
            raise found
        return found

    async def props(self) -> dict[str, Any]:
        return self.told_props

    async def _next(self, script: list[Step]) -> EngineProfile:
        await asyncio.sleep(0)
        while script:
            step = script.pop(0)
            if isinstance(step, EngineProfile):
                return step
            if isinstance(step, Refused):
                raise step
            await step()
        return self.now


@dataclass
class LedgerDouble:
    """A ledger that writes down what it is told; `replies` are what reservations get, Leases where none is left."""

    replies: list[Denied | Callable[[], Awaitable[None]]] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    before_settle: Callable[[], Awaitable[None]] | None = None

    async def reserve(self, reservation: Reservation, pool: KvPool) -> Lease | Denied:
        self.reservations.append(reservation)
        self.told.append(("reserve", reservation.lease_id))
        while self.replies:
            reply = self.replies.pop(0)
            if isinstance(reply, Denied):
                return replace(reply, lease_id=reservation.lease_id)
            await reply()
        return Lease(reservation.lease_id, pool.cells(reservation.size), reservation.size.sequences, 0.25)

    def hand_over(self, lease_id: str, streamed: Callable[[], int] = nothing_yet) -> None:
        self.told.append(("hand_over", lease_id))

    def answered(self, lease_id: str) -> None:
        self.told.append(("answered", lease_id))

    async def settle(self, lease_id: str, *, ended: bool, used: Usage | None = None) -> None:
        if self.before_settle is not None:
            await self.before_settle()
        self.told.append(("settle ended" if ended else "settle", lease_id))

    @property
    def settled(self) -> list[str]:
        return [lease_id for what, lease_id in self.told if what.startswith("settle")]


class TenantsDouble:
    """Tenants by the SHA-256 of their keys."""

    def __init__(self, keys: Mapping[str, Tenant]) -> None:
        self._keys = dict(keys)

    def by_key(self, key_sha256: str) -> Tenant | None:
        return self._keys.get(key_sha256)

    def by_name(self, name: str) -> Tenant | None:
        return next((tenant for tenant in self._keys.values() if tenant.name == name), None)


@dataclass
class ObserverDouble:
    """Keeps the records."""

    records: list[RequestRecord] = field(default_factory=list)

    def request(self, record: RequestRecord) -> None:
        self.records.append(record)


@dataclass
class ClientDouble:
    """The tenant's side of a relay; `before_write` may wait or fail as a slow or lost client does."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)
    begun: bool = False
    before_write: Callable[[bytes], Awaitable[None]] | None = None

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers, self.begun = status, dict(headers), True

    async def write(self, data: bytes) -> None:
        if self.before_write is not None:
            await self.before_write(data)
        self.writes.append(data)

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers = status, dict(headers)
        self.writes.append(body)

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)


def refused(refusal: Refusal) -> Refused:
    return Refused(refusal)


def broken(*, sent: bool = True) -> LineFailed:
    return LineFailed("the engine closed the connection", sent=sent)
