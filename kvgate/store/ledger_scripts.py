"""The ledger's steps at the store: how each script is called, and how values cross to it and back."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

from kvgate.core.drain import LeaseFacts
from kvgate.core.fairness import FairRule, FairView, TenantService, Void
from kvgate.core.ledger import Freed, LedgerView, asked_tokens
from kvgate.core.pool import KvPool
from kvgate.core.tenant import Tier
from kvgate.store.client import scripting
from kvgate.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from kvgate.core.ask import Size, Usage
    from kvgate.core.ledger import Reservation
    from kvgate.core.tenant import Quota
    from kvgate.store.client import StoreClient

STEPS = (
    "join",
    "reserve",
    "cancel",
    "claim",
    "answered",
    "settle",
    "renew",
    "register",
    "free",
    "resize",
    "guarantee",
    "leave",
    "view",
)
_COMMON = ("common", "fair", "line", "holding")


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
        head = "\n".join([source("clock") if clock is None else clock, *map(source, _COMMON), ""])
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
        "weight": reservation.share.weight_milli,
        **({"spot": True} if reservation.share.tier is Tier.SPOT else {}),
    }


def usage_json(usage: Usage) -> dict[str, int]:
    """What a request cost as the scripts take it."""
    return {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}


def rule_json(rule: FairRule) -> dict[str, int]:
    """The rule of fairness as the scripts take it."""
    found = {
        "input": rule.input_price_milli,
        "cached": rule.cached_input_price_milli,
        "output": rule.output_price_milli,
        "bypass_max": rule.bypass_max,
        "lent_max": rule.lent_output_tokens_max,
    }
    return found if rule.prefill_tokens_max is None else {**found, "prefill_max": rule.prefill_tokens_max}


def rule_of(found: dict[str, int]) -> FairRule:
    """The rule of fairness that a script gave."""
    return FairRule(
        input_price_milli=found["input"],
        cached_input_price_milli=found["cached"],
        output_price_milli=found["output"],
        bypass_max=found["bypass_max"],
        prefill_tokens_max=found.get("prefill_max"),
        lent_output_tokens_max=found["lent_max"],
    )


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


def fair_view_of(found: dict[str, Any]) -> FairView:
    """What `view` gave of fairness."""
    fair = found["fair"]
    here = [one for one in found.get("tenants", ()) if one["running"] or one["draining"] or one["waiting"]]
    return FairView(
        tenants=tuple(
            TenantService(
                one["name"],
                weight_milli=int(one["weight"]),
                counter_milli=int(one["counter"]),
                service_milli=int(one["service"]),
                filled_tokens=int(one["filled"]),
                waiting=int(one["waiting"]),
                oldest_since_s=_seconds(one.get("since")),
            )
            for one in sorted(here, key=lambda one: str(one["name"]))
        ),
        gap_milli=int(fair["gap"]),
        gap_max_milli=int(fair["gap_max"]),
        bypasses=int(fair["bypasses"]),
        drains=int(fair["drains"]),
        drain_idle_s=fair["drain_idle"] / 1000,
        prefill_tokens=int(fair["prefill"]),
        voids=frozenset(Void(what) for what in fair["voids"].split()),
        now_s=found["now"] / 1000,
        rule=rule_of(fair["rule"]),
    )


def freed_of(found: dict[str, Any]) -> list[Freed]:
    """What a step gave back."""
    return [Freed(one["tenant"], one["cells"], one["ms"] / 1000) for one in found.get("freed", ())]


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
