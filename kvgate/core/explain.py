"""A verdict with its arithmetic, line by line: what was counted, what bounds it, and what would make it fit."""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvgate.core.admission import Clamp, Reject, Trim, bounds_of
from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgate.core.admission import Verdict
    from kvgate.core.ask import Ask, Size
    from kvgate.core.counting import Proof
    from kvgate.core.ledger import LedgerView
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Tenant
    from kvgate.core.trim_search import Trimmed

_REASONS = {Clamp.label: Reason.GENERATION_OVERFLOW.label, Trim.label: Reason.PROMPT_OVERFLOW.label}
_NAMES = {
    "slot": "n_ctx_slot",
    "tenant": "context_tokens_max",
    "pool": "the pool",
    "tenant_kv": "kv_tokens_max",
}


@dataclass(frozen=True, slots=True)
class Considered:
    """One bound: how much output each answer could have by it alone.

    Args:
        name: as `admission.Room.limited_by`.
        limit_tokens: the bound.
        usable_generation: what it leaves; negative where the prompt alone is over it.
        binds: whether it is the one that decides.
    """

    name: str
    limit_tokens: int
    usable_generation: int
    binds: bool


@dataclass(frozen=True, slots=True)
class Explained:
    """What one request would get, and why.

    Args:
        verdict: admit, clamp, trim or reject.
        reason, message: of the refusal, or of the clamp or trim.
        trimmed: what would be dropped; all other figures are of what is left.
        proof: what counted the prompt.
        prompt_tokens: of the longest prompt; `prompts` of them run side by side.
        asked_output_tokens: the request's own limit, None where it has none.
        output_limit: what the engine would be told.
        sequences, cells: what it would hold.
        margin_tokens, headroom_tokens: what is kept free of each sequence, and of the pool.
        bounds: each, the tightest marked.
        output_tokens_max: the largest output limit that fits beside this prompt.
        prompt_tokens_over: how many tokens each prompt is too long for what is asked; None where no shorter will do.
        ledger: what the ledger would say now; empty where there is none.
    """

    verdict: str
    reason: str
    message: str
    proof: Proof
    prompt_tokens: int
    prompts: int
    asked_output_tokens: int | None
    output_limit: int | None
    sequences: int
    cells: int | None
    margin_tokens: int
    headroom_tokens: int
    bounds: tuple[Considered, ...]
    output_tokens_max: int | None
    prompt_tokens_over: int | None
    ledger: str
    trimmed: Trimmed | None = None

    @property
    def admitted(self) -> bool:
        """Whether it would run."""
        return self.verdict != "reject"


def explained(
    ask: Ask,
    prompts: tuple[int, ...],
    proof: Proof,
    *,
    pool: KvPool,
    tenant: Tenant,
    verdict: Verdict,
    view: LedgerView | None,
) -> Explained:
    """Say what a verdict is made of.

    Args:
        ask: what is wanted.
        prompts: tokens of each prompt.
        proof: what counted them.
        pool: what the engine can hold.
        tenant: whose bounds apply.
        verdict: what was decided of these.
        view: the ledger as it is now, None where there is none to ask.
    """
    at_once = max(1, min(len(prompts), pool.slots // ask.sequences))
    held = tuple(sorted(prompts, reverse=True)[:at_once])
    sequences = at_once * ask.sequences
    room = verdict.room
    found = () if room is None else bounds_of(held, sequences, pool, tenant)
    tightest = min(found, key=lambda bound: bound.usable_generation, default=None)
    usable = None if tightest is None else tightest.usable_generation
    size = None if isinstance(verdict, Reject) else verdict.size
    refusal = verdict.refusal if isinstance(verdict, Reject) else None
    least = tenant.limits.output_tokens_min if ask.generates else 0
    needed = max(ask.output_tokens or 0, least)
    return Explained(
        verdict=verdict.label,
        reason=refusal.reason.label if refusal else _REASONS.get(verdict.label, ""),
        message=refusal.message if refusal else "",
        proof=proof,
        prompt_tokens=held[0],
        prompts=at_once,
        asked_output_tokens=ask.output_tokens,
        output_limit=None if size is None else size.output_tokens,
        sequences=sequences,
        cells=None if size is None else pool.cells(size),
        margin_tokens=pool.margin_tokens,
        headroom_tokens=pool.headroom_tokens,
        bounds=tuple(
            Considered(bound.limited_by, bound.limit_tokens, bound.usable_generation, bound is tightest)
            for bound in found
        ),
        output_tokens_max=usable if usable is not None and usable >= least else None,
        prompt_tokens_over=None if room is None else _over(held, sequences, needed, pool, tenant),
        ledger="" if size is None or view is None else _ledger_now(size, pool, tenant, view),
        trimmed=verdict.trimmed if isinstance(verdict, Trim) else None,
    )


def _over(prompts: tuple[int, ...], sequences: int, needed: int, pool: KvPool, tenant: Tenant) -> int | None:
    """The least that every prompt must be shorter by: answers that share a prompt's cells need more of it each."""

    def fits(less: int) -> bool:
        shorter = tuple(max(prompt - less, 0) for prompt in prompts)
        return min(found.usable_generation for found in bounds_of(shorter, sequences, pool, tenant)) >= needed

    most = max(prompts)
    found = bisect.bisect_left(range(most + 1), 1, key=fits)
    return found if found <= most else None


def _ledger_now(size: Size, pool: KvPool, tenant: Tenant, view: LedgerView) -> str:
    """What a reservation of this size would meet now; the next moment may be another."""
    cells, quota = pool.cells(size), tenant.quota
    mine = dict(view.running_by_tenant).get(tenant.name, 0)
    mine_cells = dict(view.held_tokens_by_tenant).get(tenant.name, 0)
    free_slots = pool.slots - view.running - view.draining
    free_cells = pool.grantable_tokens - view.held_tokens
    waits = []
    if view.waiting:
        waits.append(f"{view.waiting} requests wait before it")
    if size.sequences > free_slots:
        waits.append(f"it needs {size.sequences} slots and {max(free_slots, 0)} of {pool.slots} are free")
    if cells > free_cells:
        waits.append(f"it needs {cells} cells and {max(free_cells, 0)} of {pool.grantable_tokens} are free")
    if quota.concurrency_max is not None and mine + size.sequences > quota.concurrency_max:
        waits.append(f"the tenant runs {mine} of its {quota.concurrency_max} sequences")
    if quota.kv_tokens_max is not None and mine_cells + cells > quota.kv_tokens_max:
        waits.append(f"the tenant holds {mine_cells} of its {quota.kv_tokens_max} cells")
    minute = quota.requests_per_minute is not None or quota.tokens_per_minute is not None
    unseen = "; what the tenant's minute says is not looked at" if minute else ""
    if not waits:
        return f"it would run at once{unseen}"
    mine_waiting = dict(view.waiting_by_tenant).get(tenant.name, 0)
    if mine_waiting >= quota.queue_max:
        return f"it would be refused: the tenant's queue of {quota.queue_max} is full ({'; '.join(waits)})"
    return f"it would wait, {quota.queue_timeout_s:g} s at most: {'; '.join(waits)}{unseen}"


def as_json(found: Explained) -> dict[str, Any]:
    """All of it, as JSON values."""
    names = Explained.__slots__
    plain: dict[str, Any] = {name: getattr(found, name) for name in names}
    plain["bounds"] = [{name: getattr(bound, name) for name in Considered.__slots__} for bound in found.bounds]
    plain["trimmed"] = None if found.trimmed is None else asdict(found.trimmed)
    return plain | {"proof": found.proof.value, "admitted": found.admitted}


def lines_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The arithmetic as a table of two columns, made of `as_json`."""
    verdict = found["verdict"] + (f" ({found['reason']})" if found["reason"] else "")
    bound = found["proof"] == "bound"
    each = f", the longest of {found['prompts']} side by side" if found["prompts"] > 1 else ""
    lines = [
        ("verdict", verdict),
        ("prompt", f"{'at most ' if bound else ''}{found['prompt_tokens']} tokens, by {found['proof']}{each}"),
    ]
    lines += [("trimmed", line) for line in _trimmed(found["trimmed"])]
    lines += [(one["name"], _bound_line(one, found)) for one in found["bounds"]]
    lines += [("usable", f"{one['usable_generation']} tokens") for one in found["bounds"] if one["binds"]]
    asked = found["asked_output_tokens"]
    lines.append(
        ("asked", "no output limit: the tenant's default, or what fits" if asked is None else _tokens(asked))
    )
    if (limit := found["output_limit"]) is not None:
        clamped = f", clamped from {asked}" if asked is not None and asked > limit else ""
        lines.append(("output limit", f"{_tokens(limit)}{clamped}"))
    if found["cells"] is not None:
        lines.append(("holds", f"{found['cells']} cells in {found['sequences']} slots"))
    if found["message"]:
        lines.append(("answer", found["message"]))
    lines += _fitting(found)
    if found["ledger"]:
        lines.append(("ledger", found["ledger"]))
    return lines


def _trimmed(found: dict[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    what = f"{found['messages']} messages" if found["messages"] else "text"
    yield f"{what}, {found['tokens']} tokens, {found['how']}; the prompt above is what is left"
    for run in found["dropped"]:
        places = f"item {run['first']}" if run["first"] == run["last"] else f"items {run['first']} to {run['last']}"
        yield f"{places}: {run['roles']}, about {run['tokens']} tokens"


def _bound_line(one: dict[str, Any], found: dict[str, Any]) -> str:
    left, limit = one["usable_generation"], one["limit_tokens"]
    sequences = found["sequences"]
    if one["name"] in {"slot", "tenant"} or sequences == 1:
        sum_ = f"{limit} - {found['prompt_tokens']} prompt - {found['margin_tokens']} margin = {left}"
    else:
        sum_ = f"{limit} shared by {sequences} sequences, with their prompts and margins: {left} each"
    kept = (
        f" ({found['headroom_tokens']} of it kept free)" if one["name"] == "pool" and found["headroom_tokens"] else ""
    )
    return f"{_NAMES[one['name']]}: {sum_}{kept}{'  <- binds' if one['binds'] else ''}"


def _fitting(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What would make it fit."""
    if found["verdict"] == "admit" or not found["bounds"]:
        return []
    over, most = found["prompt_tokens_over"], found["output_tokens_max"]
    lines = []
    if most is not None:
        lines.append(("would fit", f"an output limit of at most {most}"))
    if over is not None:
        lines.append(("or" if lines else "would fit", f"a prompt shorter by {over} tokens"))
    return lines


def _tokens(number: int) -> str:
    return f"{number} tokens of output" if number else "nothing is generated"
