"""The rules that stand side by side: each is a ledger, and those that the paper compares with are thin around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from kvgate.core.ask import Size
from kvgate.core.fairness import MILLI, FairRule
from kvgate.core.guarantee import guaranteed_part
from kvgate.core.ledger import Denied, Lease, Ledger, Reservation
from kvgate.core.minute import Minute, step_of
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota, Share, Tier
from loadtests.simulate.results import Ruling

if TYPE_CHECKING:
    from kvgate.core.ledger import Ticket
    from loadtests.simulate.workloads import Request, Workload

UNBOUNDED: Final = Quota(queue_max=1 << 40)
"""Queues without an end: what is compared is the order, and who is refused is refused by the rule itself."""

HEAD_OF_LINE: Final = "behind the first in line"
DRAIN: Final = "draining for one that was passed"
PREFILL: Final = "enough prompt tokens in flight"
SPOT: Final = "spot tenants go after all others"
GUARANTEED: Final = "guaranteed to others"


POLICIES: Final = ("fcfs", "rpm", "vtc", "vtc-tiers")


class Policy(Protocol):
    """What a simulation asks of a rule; all else it asks of the ledger in it."""

    @property
    def ledger(self) -> Ledger:
        """The ledger that it asks."""
        ...

    def reserve(self, request: Request, now_s: float) -> Lease | Ticket | Denied:
        """Let it in, queue it, or refuse it."""
        ...

    def held_back(self) -> str:
        """Why slots may stand idle now beside a request that would fit; "" where that would be a fault."""
        ...

    def ruling(self, now_s: float) -> Ruling:
        """What it says of itself in the end."""
        ...


@dataclass(slots=True)
class FirstCome:
    """One queue in order of arrival: the ledger itself, with every request in the name of one tenant."""

    ledger: Ledger

    def reserve(self, request: Request, now_s: float) -> Lease | Ticket | Denied:
        """In the name of all."""
        return self.ledger.reserve(Reservation(request.lease_id, "all", UNBOUNDED, _size(request)), now_s)

    def held_back(self) -> str:
        """Whoever stands first and does not fit holds up those behind it."""
        return HEAD_OF_LINE

    def ruling(self, now_s: float) -> Ruling:  # noqa: ARG002 - nothing is promised at any time
        """It promises nobody anything."""
        return Ruling()


@dataclass(slots=True)
class RequestsPerMinute:
    """Arrival order behind a limit of requests per tenant and minute; the rest is refused, as in the paper."""

    queue: FirstCome
    requests_per_minute: int
    _minutes: dict[str, Minute] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        """Who lets in what is inside the limit."""
        return self.queue.ledger

    def reserve(self, request: Request, now_s: float) -> Lease | Ticket | Denied:
        """Count it, or refuse it."""
        minute = self._minutes.setdefault(request.tenant, Minute())
        if wait_s := minute.wait_s(1, self.requests_per_minute, now_s):
            return Denied(request.lease_id, Reason.REQUESTS_PER_MINUTE, 0, wait_s)
        minute.add(step_of(now_s), 1)
        return self.queue.reserve(request, now_s)

    def held_back(self) -> str:
        """As in any queue of arrival."""
        return self.queue.held_back()

    def ruling(self, now_s: float) -> Ruling:
        """It promises nobody anything."""
        return self.queue.ruling(now_s)


@dataclass(slots=True)
class Fair:
    """The ledger as it serves: least service first, by weight, and by tier where `tiers`."""

    workload: Workload
    ledger: Ledger
    tiers: bool
    _shares: dict[str, Share] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for sender in self.workload.senders:
            tiered = (sender.tier, sender.guaranteed_ratio) if self.tiers else (Tier.ELASTIC, 0.0)
            self._shares[sender.name] = Share(sender.weight, *tiered)
        if self.tiers:
            self.ledger.guarantee({n: s.guaranteed_ppm for n, s in self._shares.items() if s.guaranteed_ppm}, 0.0)

    def reserve(self, request: Request, now_s: float) -> Lease | Ticket | Denied:
        """In its tenant's name, with its share."""
        share = self._shares[request.tenant]
        return self.ledger.reserve(
            Reservation(request.lease_id, request.tenant, UNBOUNDED, _size(request), share), now_s
        )

    def held_back(self) -> str:
        """A drain, the cap on prompt tokens in flight, or tiers."""
        if self.ledger.is_clearing():
            return DRAIN
        if self.ledger.rule.prefill_tokens_max is not None and self.ledger.fair_view(0.0).prefill_tokens:
            return PREFILL
        view = self.ledger.view()
        running, cells = dict(view.running_by_tenant), dict(view.held_tokens_by_tenant)
        for name, share in self._shares.items():
            part = guaranteed_part(share.guaranteed_ppm, self.ledger.pool)
            if running.get(name, 0) < part.slots or cells.get(name, 0) < part.tokens:
                return GUARANTEED
        spots = any(self._shares[name].tier is Tier.SPOT for name, _ in view.waiting_by_tenant)
        return SPOT if spots else ""

    def ruling(self, now_s: float) -> Ruling:
        """What its figures say."""
        view = self.ledger.fair_view(now_s)
        least = min(share.weight_milli for share in self._shares.values())
        return Ruling(
            bound=self.ledger.rule.gap_bound_milli(self.ledger.pool, least) / MILLI,
            voids=tuple(sorted(view.voids)),
            drains=view.drains,
            bypasses=view.bypasses,
            drain_idle_s=view.drain_idle_s,
        )


def _size(request: Request) -> Size:
    """Its prompt, and all that it may answer."""
    return Size(request.prompt_tokens, request.limit_tokens)


def policy(name: str, workload: Workload, rule: FairRule | None = None) -> Policy:
    """The policy of this name, for this workload; `rule` is that of vtc and vtc-tiers.

    `rpm` alone has the limit that the engine could serve a minute, in even shares; `rpm:N` has another.

    Raises:
        ValueError: there is none of this name.
    """
    kind, _, limit = name.partition(":")
    ledger = Ledger(workload.engine.pool, rule=rule or FairRule())
    if kind == "rpm" and (not limit or (limit.isdecimal() and int(limit))):
        return RequestsPerMinute(FirstCome(ledger), int(limit or workload.even_requests_per_minute))
    if name == "fcfs":
        return FirstCome(ledger)
    if name in {"vtc", "vtc-tiers"}:
        return Fair(workload, ledger, tiers=name == "vtc-tiers")
    raise ValueError(
        f"there is no policy {name!r}; there are fcfs, rpm, rpm:N (requests a minute), vtc and vtc-tiers"
    )
