"""How a prompt's size is known: which proof counted it, and when a bound is proof enough."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvgate.core.admission import Admit

if TYPE_CHECKING:
    from kvgate.core.admission import Verdict
    from kvgate.core.ask import Ask
    from kvgate.core.pool import KvPool
    from kvgate.core.tenant import Tenant

V = TypeVar("V")


class Proof(StrEnum):
    """What says how many tokens a prompt has, the cheapest first."""

    BOUND = "bound"
    SUM = "sum"
    TOKENIZER = "tokenizer"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a proof is used on the engine that is there now, and why not."""

    proof: Proof
    in_force: bool
    reason: str = ""


def bound_suffices(verdict: Verdict, ask: Ask, pool: KvPool, tenant: Tenant) -> bool:
    """Whether a verdict that was made of a bound may stand, though the prompt is shorter than it says.

    A bound only ever admits; refusing, clamping and saying how much fits need the count.

    1. What does not fit beside the bound may fit beside the prompt.
    2. No output limit asked: the tenant's default fits whole, so that the bound takes nothing of it.
    3. The reservation is larger than need be until it is settled. That costs nobody anything only where cells are
       never what anyone waits for: where every slot has a whole context of its own, and the tenant no bound on cells,
       nor on the tokens of a minute.
    """
    if not isinstance(verdict, Admit):  # 1
        return False
    if ask.output_tokens is None and verdict.size.output_tokens < tenant.limits.output_tokens_default:  # 2
        return False
    quota = tenant.quota
    unbounded = quota.kv_tokens_max is None and quota.tokens_per_minute is None
    return unbounded and pool.grantable_tokens >= pool.slots * pool.tokens_per_slot  # 3


UNCOUNTED_FIELDS: Final = frozenset(
    {
        "max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens", "stream", "stream_options", "n",
        "n_cmpl", "best_of", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "logprobs",
        "top_logprobs", "presence_penalty", "frequency_penalty", "repeat_penalty", "repeat_last_n", "ignore_eos",
        "logit_bias", "user", "metadata", "store", "cache_prompt", "n_cache_reuse", "id_slot", "timings_per_token",
        "prompt_cache_key", "safety_identifier", "service_tier",
    }
)  # fmt: skip
"""Fields that say how to answer and never what is read: they are no part of what is counted."""

PLAIN_ROLES: Final = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True)
class PlainChat:
    """A chat of roles and texts alone: all that a template makes of it, it makes of these.

    `in_parts` is whether some text came as a list of parts, which the engine joins by line ends.
    """

    messages: tuple[tuple[str, str], ...]
    chars: int
    in_parts: bool = False

    @property
    def is_continued(self) -> bool:
        """Whether the last message is an answer that the engine is to go on with."""
        return self.messages[-1][0] == "assistant"


def plain_chat(fields: frozenset[str], messages: list[dict[str, object]]) -> PlainChat | None:
    """The chat where it is a plain one, else None: tools, schemas, names, images and unknown fields need the engine.

    Args:
        fields: the names of the body's members.
        messages: as they came.
    """
    if fields - UNCOUNTED_FIELDS - {"messages", "model"}:
        return None
    try:
        pairs = [(message["role"], message["content"]) for message in messages]
    except KeyError:
        return None
    if set(map(len, messages)) != {2} or not {role for role, _ in pairs} <= PLAIN_ROLES:
        return None
    in_parts = False
    if {type(text) for _, text in pairs} != {str}:
        pairs, in_parts = [(role, _joined(text)) for role, text in pairs], True
        if any(text is None for _, text in pairs):
            return None
    found: tuple[tuple[str, str], ...] = tuple(pairs)  # type: ignore[arg-type]  # looked at above, all at once
    return PlainChat(found, sum([len(text) for _, text in found]), in_parts)


def _joined(content: object) -> str | None:
    """The text of a content, where it is text alone; as llama.cpp, nothing stands before the first that is not empty.

    Other engines may join otherwise: the probe of parts tells.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    text = ""
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            return None
        if not isinstance(part["text"], str):
            return None
        text = f"{text}\n{part['text']}" if text else part["text"]
    return text


class Kept(Generic[V]):
    """The values of the latest keys: at most `entries_max`, the one that was asked for longest ago goes first.

    Keys are digests: what is kept grows with their number alone, and holds nobody's text.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._values: OrderedDict[bytes, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> V | None:
        """The value, if it is still there."""
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
        return found

    def put(self, key: bytes, value: V) -> None:
        """Keep a value."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._entries_max:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
