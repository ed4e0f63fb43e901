"""The ledger's steps at the store: how each script is called, and how values cross to it and back."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

from kvgate.core.drain import LeaseFacts
from kvgate.core.ledger import LedgerView, asked_tokens
from kvgate.core.pool import KvPool
from kvgate.store.client import scripting
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.ledger import Reservation
    from kvgate.core.tenant import Quota
    from kvgate.store.client import StoreClient

STEPS = ("join", "reserve", "cancel", "claim", "settle", "renew", "register", "free", "resize", "leave", "view")


def source(name: str) -> str:
    """The text of one of the ledger's Lua files."""
    return files("kvgate.store").joinpath("ledger", f"{name}.lua").read_text(encoding="utf-8")


class Unset(Exception):
    """There is no ledger at the store: it is new, or was flushed; `join` makes one."""


class LedgerScripts:
    """The steps for one engine; each is one atomic script, and loads itself where the server does not know it.

    Args:
        client: of the store.
        engine: the engine's id; all keys have it in their hash tag.
        clock: Lua that defines `now_ms`; tests have one of their own.
    """

    def __init__(self, client: StoreClient, engine: str, *, clock: str | None = None) -> None:
        self._scripting = scripting(client)
        self.prefix = f"{{kvgate:{engine}}}"
        head = f"{source('clock') if clock is None else clock}\n{source('common')}\n"
        self.texts = {step: head + source(step) for step in STEPS}
        self._sha1 = {step: hashlib.sha1(text.encode()).hexdigest() for step, text in self.texts.items()}  # noqa: S324

    async def run(self, step: str, **ask: Any) -> dict[str, Any]:
        """Take a step; its answer.

        Raises:
            Unset: there is no ledger.
            StoreUnavailable: another version of kvgate keeps its ledger there in a way that this one cannot read.
            RedisError, OSError: the store failed; whether the step was taken is unknown.
        """
        argument = json.dumps(ask, separators=(",", ":"))
        try:
            raw = await self._scripting.evalsha(self._sha1[step], 1, self.prefix, argument)
        except NoScriptError:  # flushed, restarted, or another server has taken over: with its text it always runs
            raw = await self._scripting.eval(self.texts[step], 1, self.prefix, argument)
        found: dict[str, Any] = json.loads(raw)
        if "layout" in found:
            raise StoreUnavailable(
                f"the ledger at the store has layout {found['layout']}, which this version of kvgate cannot read"
            )
        if "unset" in found:
            raise Unset
        return found


def pool_json(pool: KvPool) -> dict[str, Any]:
    """A pool as the scripts take it."""
    return {
        "tokens": pool.tokens,
        "slots": pool.slots,
        "tokens_per_slot": pool.tokens_per_slot,
        "prompt_shared": pool.prompt_shared,
        "margin": pool.margin_tokens,
        "headroom": pool.headroom_tokens,
    }


def pool_of(found: dict[str, Any]) -> KvPool:
    """The pool that a script gave."""
    return KvPool(
        tokens=found["tokens"],
        slots=found["slots"],
        tokens_per_slot=found["tokens_per_slot"],
        prompt_shared=found["prompt_shared"],
        margin_tokens=found["margin"],
        headroom_tokens=found["headroom"],
    )


def reservation_json(reservation: Reservation) -> dict[str, Any]:
    """A reservation as the scripts take it."""
    return {
        "id": reservation.lease_id,
        "tenant": reservation.tenant,
        "quota": _quota_json(reservation.quota),
        "size": _size_json(reservation.size),
    }


def _quota_json(quota: Quota) -> dict[str, Any]:
    bounds = {
        "concurrency_max": quota.concurrency_max,
        "kv_tokens_max": quota.kv_tokens_max,
        "requests_per_minute": quota.requests_per_minute,
        "tokens_per_minute": quota.tokens_per_minute,
        "queue_max": quota.queue_max,
    }
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _size_json(size: Size) -> dict[str, Any]:
    return {
        "prompt": size.prompt_tokens,
        "output": size.output_tokens,
        "sequences": size.sequences,
        "prompt_sum": sum(size.distinct),
        "prompts": len(size.distinct),
        "queued": size.queued,
        "asked_tokens": asked_tokens(size),
    }


def facts_of(found: dict[str, Any]) -> tuple[LeaseFacts, str]:
    """What `renew` told of one lease, in seconds of the server's clock, and the gate that holds it."""
    facts = LeaseFacts(
        lease_id=found["id"],
        output_tokens=found["output"],
        queued=found["queued"],
        prompt_tokens=found["prompt_sum"],
        handed_over_at_s=_seconds(found.get("handed")),
        answered_at_s=_seconds(found.get("answered")),
        draining_since_s=_seconds(found.get("since")),
        unsettled_at_s=_seconds(found.get("unsettled")) or float("-inf"),
    )
    return facts, found["gate"]


def view_of(found: dict[str, Any]) -> LedgerView:
    """What `view` gave."""
    tenants = sorted(found.get("tenants", ()), key=lambda one: str(one["name"]))

    def column(name: str, *there: str) -> tuple[tuple[str, int], ...]:
        return tuple(
            (one["name"], int(one[name])) for one in tenants if any(one[field] for field in there or (name,))
        )

    return LedgerView(
        pool=pool_of(found["pool"]),
        held_tokens=int(found["cells"]),
        running=sum(int(one["running"]) for one in tenants),
        draining=sum(int(one["draining"]) for one in tenants),
        waiting=int(found["waiting"]),
        running_by_tenant=column("running"),
        waiting_by_tenant=column("waiting"),
        held_tokens_by_tenant=column("cells", "running", "draining"),
        drains_overdue=int(found["overdue"]),
        leases_expired=int(found["expired"]),
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
