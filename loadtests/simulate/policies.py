"""The rules that stand side by side: each is a ledger, and those that the paper compares with are thin around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvgate.core.ask import Size
from kvgate.core.ledger import Denied, Lease, Ledger, Reservation
from kvgate.core.minute import Minute, step_of
from kvgate.core.reason import Reason
from kvgate.core.tenant import Quota

if TYPE_CHECKING:
    from kvgate.core.ledger import Ticket
    from loadtests.simulate.workloads import Request

UNBOUNDED = Quota(queue_max=1 << 40)
"""Queues without an end: what is compared is the order, and who is refused is refused by the rule itself."""


class Policy(Protocol):
    """What a simulation asks of a rule; `ledger` is the one that serves, of which more is asked directly."""

    ledger: Ledger

    def reserve(self, request: Request, now_s: float) -> Lease | Ticket | Denied:
        """Let it in, queue it, or refuse it."""
        ...

    def held_back(self) -> str:
        """Why slots may stand idle now beside a request that would fit; "" where that would be a fault."""
        ...


@dataclass(slots=True)
class FirstCome:
    """One queue in order of arrival: the ledger itself, with every request in the name of one tenant."""

    ledger: Ledger

    def reserve(self, request: Request, now_s: float) -> Lease | Ticket | Denied:
        """In the name of all."""
        return self.ledger.reserve(reservation(request, "all", UNBOUNDED), now_s)

    def held_back(self) -> str:
        """Whoever stands first and does not fit holds up those behind it."""
        return "behind the first"


@dataclass(slots=True)
class RequestsPerMinute:
    """Arrival order behind a limit of requests per tenant and minute; the rest is refused, as in the paper."""

    ledger: Ledger
    requests_per_minute: int
    _minutes: dict[str, Minute] = field(default_factory=dict)

    def reserve(self, request: Request, now_s: float) -> Lease | Ticket | Denied:
        """Count it, or refuse it."""
        minute = self._minutes.setdefault(request.tenant, Minute())
        if wait_s := minute.wait_s(1, self.requests_per_minute, now_s):
            return Denied(request.lease_id, Reason.REQUESTS_PER_MINUTE, 0, wait_s)
        minute.add(step_of(now_s), 1)
        return self.ledger.reserve(reservation(request, "all", UNBOUNDED), now_s)

    def held_back(self) -> str:
        """As in any queue of arrival."""
        return "behind the first"


def reservation(request: Request, tenant: str, quota: Quota) -> Reservation:
    """What a request asks a ledger for: its prompt, and all that it may answer."""
    return Reservation(request.lease_id, tenant, quota, Size(request.prompt_tokens, request.limit_tokens))
