"""What the gate needs from the world, as Protocols, and the few errors that cross them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvgate.core.ask import Size
from kvgate.core.counting import Proof
from kvgate.core.engine_state import Trouble
from kvgate.core.trim_policy import UNSAID, TrimAsk

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence

    from kvgate.core.ask import Ask, Usage
    from kvgate.core.json_object import Edit, JsonObject
    from kvgate.core.ledger import Denied, Lease, Reservation
    from kvgate.core.loops import Loop
    from kvgate.core.pool import KvPool
    from kvgate.core.profile import EngineProfile
    from kvgate.core.reason import Refusal
    from kvgate.core.replay import Asked
    from kvgate.core.reuse import Reuse
    from kvgate.core.startup_log import StartupLog
    from kvgate.core.tenant import Tenant
    from kvgate.core.trim_search import Trimmed
    from kvgate.core.turns import Item


PROBE_SIZE: Final = Size(prompt_tokens=96, output_tokens=1)
"""What a probe of the engine's default reuse holds at most."""


class Refused(Exception):
    """Raised by an adapter that must refuse a request; the gate turns it into a value at once.

    `detail` is the cause for the operator's log and commands, in kvgate's own words; `trouble` its kind, where a
    call to the engine had no answer.
    """

    def __init__(self, refusal: Refusal, detail: str = "", trouble: Trouble | None = None) -> None:
        super().__init__(refusal.reason.label)
        self.refusal = refusal
        self.detail = detail
        self.trouble = trouble


class LineFailed(Exception):
    """The connection to the engine broke; `sent` tells whether bytes of the request may have arrived.

    `silent` where it did not break: the engine just gave no answer in time.
    """

    def __init__(self, problem: str, *, sent: bool, silent: bool = False) -> None:
        super().__init__(problem)
        self.sent = sent
        self.silent = silent

    @property
    def trouble(self) -> Trouble:
        """What kind of trouble this is."""
        return Trouble.SILENT if self.silent else Trouble.BROKEN


class LineStalled(LineFailed):
    """The engine was silent for too long, so the gate gave the connection up; the request had been sent."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, sent=True)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request body as its dialect read it.

    `usage_shown` is whether the client asked to see a stream's usage, `trim` what it says of trimming.
    """

    ask: Ask
    document: JsonObject
    usage_shown: bool
    trim: TrimAsk = UNSAID


@dataclass(frozen=True, slots=True)
class History:
    """The list of a conversation that may be trimmed: the member that holds it, and what its elements are."""

    field: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """The member that holds a text prompt, or several, which may be cut."""

    field: str


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer says it cost.

    Engines tell less than the truth where one request has several answers: llama.cpp tells only of the first.

    Args:
        usage: the figures, as far as they are told.
        prompts: how many of the request's prompts, from the first on, `usage.prompt_tokens` is the sum of.
        untold: the texts of answers whose tokens are in no figure.
        finish: why it ended, one of `core.ending.FINISHES`; empty where it does not say.
    """

    usage: Usage
    prompts: int = 1
    untold: tuple[str, ...] = ()
    finish: str = ""


class StreamTap(Protocol):
    """Watches one answer stream, event by event, in its dialect.

    `told` once the engine said what it cost, `ended` once the dialect's end marker passed, `failure` the data of
    an error event (kept back: the relay says it in the dialect's words), `events` how many carried output, `finish`
    why an answer of it ended, one of `core.ending.FINISHES`.
    """

    ended: bool
    finish: str
    failure: bytes | None
    events: int

    @property
    def told(self) -> Told | None:
        """What the stream has said that it cost."""

    @property
    def text(self) -> tuple[re.Pattern[bytes], ...]:
        """Where the stream has its generated text (`wire.generated.members`); none where there is none."""

    def take(self, event: bytes) -> bytes:
        """One whole event from the engine; returns what of it the client gets, perhaps nothing."""

    def stop(self, events: Sequence[bytes], usage: Usage) -> bytes:
        """Events that end the stream here as if its output limit were reached, and name the loop as the cause.

        `events` are the last that were taken; empty where nothing that goes on from them would be a whole stream.
        """


class Dialect(Protocol):
    """An API shape: how to read a request, cap it, read what it cost, and refuse it."""

    @property
    def name(self) -> str:
        """A short word for metric labels and logs."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Where its inference requests are served, exactly so spelled; the first is the engine's own path."""

    @property
    def controls(self) -> tuple[str, ...]:
        """Paths beside it that run no inference: counters, the tokenizer, the template."""

    @property
    def output_fields(self) -> tuple[str, ...]:
        """The names of the output limit, the winner first; none where nothing is generated."""

    @property
    def canonical_field(self) -> str:
        """The one name under which the limit is sent on; empty where nothing is generated."""

    def read(self, body: bytes) -> ReadRequest:
        """Judge a body.

        Raises:
            Refused: it is not a request that kvgate and the engine would read alike.
        """

    def trimmable(self, request: ReadRequest) -> History | Texts | None:
        """What of the request may be shortened; None where nothing may."""

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The edit that makes the judged output limit, and nothing else, the request's own."""

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """What a whole, unstreamed answer says it cost."""

    @property
    def whole_text(self) -> tuple[re.Pattern[bytes], ...]:
        """Where a whole answer has its generated text, as `StreamTap.text` is for a stream."""

    def tap(self, request: ReadRequest) -> StreamTap:
        """A watcher for the answer stream of this request."""

    def refuse(self, refusal: Refusal) -> bytes:
        """The body of an error answer."""

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """Events that tell of an error after the stream began, and end it."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of the engine's answer; header names are lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        """The first header of that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)


class Line(Protocol):
    """One connection to the engine, good for one exchange at a time."""

    @property
    def profile(self) -> EngineProfile:
        """The engine at the other end of this very connection."""

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Head:
        """Send a request and wait for the head of its answer.

        Raises:
            LineFailed: the connection broke.
        """

    async def read(self) -> bytes:
        """The next bytes of the answer's body; empty at its proper end.

        Raises:
            LineFailed: the engine ended the answer before it was complete.
        """

    def release(self) -> None:
        """Give the connection back; it is closed at once unless an exchange ended properly on it."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A request's prompt sizes, in tokens and in its own order, and the engine that said so.

    `proof` is what said so.
    """

    prompts: tuple[int, ...]
    profile: EngineProfile
    proof: Proof = Proof.ENGINE

    @property
    def exact(self) -> bool:
        """False where a figure is a certain bound rather than the count."""
        return self.proof is not Proof.BOUND


class Engine(Protocol):
    """The inference server, as the gate sees it."""

    async def bound(self, dialect: str, request: ReadRequest, body: bytes) -> Counted | None:
        """More tokens than the prompt can have, where that is certain and costs next to nothing; else None.

        Raises:
            Refused: the engine is not to be had, or is too small.
        """

    async def count(self, dialect: str, request: ReadRequest, body: bytes) -> Counted:
        """The exact number of prompt tokens, by the cheapest proof that is certain.

        Raises:
            Refused: the engine is not to be had, is too small, or cannot count this body.
        """

    async def count_text(self, text: str) -> int:
        """The tokens of a bare text, nothing added.

        Raises:
            Refused: as `count`.
        """

    async def text_pieces(self, text: str) -> tuple[int, ...]:
        """How many bytes of a bare text each of its tokens stands for, in order; nothing is added to it.

        Raises:
            Refused: as `count`.
        """

    async def open(self, *, fresh: bool = False) -> Line:
        """A connection for one inference.

        Raises:
            Refused: the engine is not to be had.
        """

    def pool(self, profile: EngineProfile) -> KvPool:
        """The pool to guard on an engine of this profile."""

    def reuse_edit(self, reuse: Reuse) -> Edit:
        """The edit that tells this kind of engine what prefix reuse the request may have."""

    def unmarked(self, document: JsonObject) -> JsonObject:
        """The body without the marks, deep inside it, that ask for or key reuse; every other byte as it came."""

    def carries_reuse(self, dialect: str) -> bool:
        """Whether a request of this dialect can ask for reuse, or against it."""

    def reuse_is_off(self, dialect: str, profile: EngineProfile) -> bool | None:
        """Whether a request of this dialect can be kept from reuse on this engine.

        True where the request carries the switch, or the engine was seen to have reuse off; False where it was
        seen to have it on; None where it must be probed first.
        """

    async def probe_reuse(self, line: Line) -> None:
        """Find out, on a line of one's own and with a lease of `PROBE_SIZE`, whether reuse is on by default.

        Raises:
            LineFailed: the connection broke.
        """

    def explain(self, status: int, body: bytes) -> Refusal:
        """What the engine's error answer means, in words that quote neither prompt nor key."""


class StartupLogSource(Protocol):
    """Where an engine's startup log comes from."""

    @property
    def is_childs(self) -> bool:
        """Whether the log is that of kvgate's own child, which cannot be replaced unnoticed."""

    def read(self) -> StartupLog:
        """All that the log has said until now, read."""


class ReuseRule(Protocol):
    """Who may be served by this engine, and who of them may reuse (the rule itself is `core.canary`)."""

    def serves(self, tenant: Tenant) -> bool:
        """Whether the engine is there for this tenant at all."""

    def of(self, tenant: Tenant, profile: EngineProfile, *, asked: bool) -> Reuse:
        """What a request has on the engine of this very connection; `asked` is whether it asks for reuse."""


def nothing_yet() -> int:
    """No output has come."""
    return 0


class LedgerPort(Protocol):
    """Who holds what, for all requests of one engine (the rule itself is `core.ledger`)."""

    async def reserve(self, reservation: Reservation, pool: KvPool) -> Lease | Denied:
        """Wait for room, at most the tenant's `queue_timeout_s`; cancelling it leaves nothing behind."""

    def hand_over(self, lease_id: str, streamed: Callable[[], int] = nothing_yet) -> None:
        """The request's bytes go to the engine now; `streamed` is asked how much output has come."""

    def answered(self, lease_id: str) -> None:
        """The engine has begun to answer."""

    async def settle(self, lease_id: str, *, ended: bool, used: Usage | None = None) -> None:
        """Give back what the id holds, if anything; see `core.ledger.Ledger.settle`."""


class Tenants(Protocol):
    """Who may ask."""

    def by_key(self, key_sha256: str) -> Tenant | None:
        """The tenant that a key's SHA-256 (64 hex digits) belongs to."""

    def by_name(self, name: str) -> Tenant | None:
        """The tenant of that name."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """All that is remembered of one request; no prompt, no key, nothing of the client's own wording.

    Times are seconds, sizes tokens; None where the request did not come that far. `tenant` is "-" where no
    key was accepted, `path` only ever a served path or "-". `proof` is what counted the prompt, and
    `count_drift_tokens` by how much the engine's usage differs from that; 0 is as it must be. `asked` is for judging
    it again (`core.replay`); neither the log nor the metrics show it. `finish` is why the engine ended the answer,
    `ended_by_context` which bound of the context did, `answered_s` when the answer's head went out.
    """

    request_id: str
    tenant: str
    dialect: str
    path: str
    status: int
    verdict: str
    reason: str
    duration_s: float
    stream: bool = False
    sequences: int | None = None
    proof: str = ""
    prompt_tokens: int | None = None
    output_limit: int | None = None
    usable_generation: int | None = None
    n_ctx_slot: int | None = None
    queued_s: float | None = None
    usage: Usage | None = None
    hung_up: bool = False
    reuse_violation: bool = False
    count_drift_tokens: int = 0
    detail: str = ""
    asked: Asked | None = None
    trimmed: Trimmed | None = None
    finish: str = ""
    loop: Loop | None = None
    loop_stopped: bool = False
    ended_by_context: str = ""
    profile: EngineProfile | None = None
    reuse: str = ""
    answered_s: float | None = None


class Observer(Protocol):
    """Whoever keeps account: metrics, the request log, the recent sizes."""

    def request(self, record: RequestRecord) -> None:
        """A request has ended, one way or another."""


class Clock(Protocol):
    """Seconds that only go forward."""

    def __call__(self) -> float:
        """Now, in seconds since some fixed moment."""
