"""The headers that kvgate adds to answers, each with its meaning."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from kvgate.core.admission import Clamp, Trim
from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from kvgate.core.trim_search import Trimmed
    from kvgate.gate import Admitted, Rejected
    from kvgate.ports import Counted

HEADERS: Final = {
    "x-request-id": "The request's id in the log: the client's own where it looks like one, else minted.",
    "x-kvgate-verdict": "`admit`, `clamp`, `trim` or `reject`.",
    "x-kvgate-reason": "Why it was refused, clamped or trimmed: a label of the table of reasons.",
    "x-kvgate-prompt-tokens": "Tokens of the prompt, counted before anything was sent; the longest of a list.",
    "x-kvgate-prompt-tokens-max": "In its place where only a certain bound is known (`x-kvgate-count: bound`).",
    "x-kvgate-count": "What counted them: `engine`, `tokenizer`, `sum` or `bound` (docs/counting.md).",
    "x-kvgate-output-limit": "Tokens of output that the engine was told to stop at.",
    "x-kvgate-usable-generation": "Tokens of output that fit beside this prompt.",
    "x-kvgate-trimmed-messages": "How many messages, or items of the input, were dropped; absent for a text prompt.",
    "x-kvgate-trimmed-tokens": "Tokens of the prompt that were dropped.",
    "x-kvgate-trim-details": "Asked for with `x-kvgate-trim-details: 1`: what was dropped, as JSON; no text.",
    "x-kvgate-n-ctx-slot": "Tokens that one sequence may hold on this engine.",
    "x-kvgate-kv-type": "Precision of the KV cache, `unknown` where no startup log told it.",
    "x-kvgate-engine-build": "The engine's own name for its build.",
    "x-kvgate-reuse": "What prefix reuse the request had: `off`, `on`, or `cold` where the engine process that kept "
    "the conversation's KV is gone (docs/reuse.md).",
    "x-kvgate-queue-ms": "Milliseconds that it waited for room.",
    "x-kvgate-ended-by-context": "On a whole answer that the context cut short, not the client's own limit: which "
    "bound of it, `slot`, `tenant`, `pool` or `tenant_kv`.",
    "x-kvgate-loop": "On a whole answer that repeats itself: what does, `text`, `line` or `words` (docs/loops.md).",
    "retry-after": "Whole seconds, 1 to 60, after which trying again can help (429 and 503).",
}
"""Every header that kvgate itself adds; the reference is made of it."""

RUNS_MAX: Final = 16
ROLES_MAX: Final = 120
"""How much the details of a trim may say: clients refuse a header of more than about 8 KiB."""


def verdict_headers(admitted: Admitted, *, details: bool = False) -> dict[str, str]:
    """What an admitted request's answer says of its verdict (DESIGN section 8); `details` of a trim on request."""
    size, room, profile = admitted.verdict.size, admitted.verdict.room, admitted.profile
    headers = {
        "x-kvgate-verdict": admitted.verdict.label,
        **_count_headers(size.prompt_tokens, admitted.counted),
        "x-kvgate-output-limit": str(size.output_tokens),
        "x-kvgate-usable-generation": str(room.usable_generation),
        "x-kvgate-n-ctx-slot": str(profile.n_ctx_slot.value),
        "x-kvgate-kv-type": profile.kv_type,
        "x-kvgate-engine-build": re.sub(r"[^\x20-\x7e]", "?", profile.build or "unknown"),
        "x-kvgate-reuse": "cold" if admitted.cold else admitted.reuse.value,
        "x-kvgate-queue-ms": str(round(admitted.lease.queued_s * 1000)),
    }
    if isinstance(admitted.verdict, Clamp):
        headers["x-kvgate-reason"] = Reason.GENERATION_OVERFLOW.label
    if isinstance(admitted.verdict, Trim):
        headers |= {"x-kvgate-reason": Reason.PROMPT_OVERFLOW.label, **_trim_headers(admitted.verdict, details)}
    return headers


def rejected_headers(rejected: Rejected) -> dict[str, str]:
    """What a rejected request's answer says of its verdict."""
    headers = {"x-kvgate-verdict": "reject"}
    if rejected.counted is None:
        return headers
    if (verdict := rejected.verdict) is not None and verdict.room is not None:
        headers |= _count_headers(verdict.room.prompt_tokens, rejected.counted)
        headers["x-kvgate-usable-generation"] = str(max(verdict.room.usable_generation, 0))
    headers["x-kvgate-n-ctx-slot"] = str(rejected.counted.profile.n_ctx_slot.value)
    return headers


def _trim_headers(verdict: Trim, details: bool) -> dict[str, str]:
    trimmed = verdict.trimmed
    headers = {"x-kvgate-trimmed-tokens": str(trimmed.tokens)}
    if trimmed.dropped:
        headers["x-kvgate-trimmed-messages"] = str(trimmed.messages)
    if details:
        headers["x-kvgate-trim-details"] = _details(trimmed)
    return headers


def _details(trimmed: Trimmed) -> str:
    """What went: indexes in the client's own list, roles, and tokens shared out by size. Bounded like any header."""
    shown = [
        {
            "first": run.first,
            "last": run.last,
            "roles": re.sub(r"[^a-z_,.]", "", run.roles)[:ROLES_MAX],
            "tokens": run.tokens,
        }
        for run in trimmed.dropped[:RUNS_MAX]
    ]
    told = {"how": trimmed.how, "counts": trimmed.counts, "dropped": shown}
    more = len(trimmed.dropped) - len(shown)
    return json.dumps(told | ({"more": more} if more else {}), separators=(",", ":"))


def _count_headers(prompt_tokens: int, counted: Counted) -> dict[str, str]:
    name = "x-kvgate-prompt-tokens" if counted.exact else "x-kvgate-prompt-tokens-max"
    return {name: str(prompt_tokens), "x-kvgate-count": counted.proof.value}
