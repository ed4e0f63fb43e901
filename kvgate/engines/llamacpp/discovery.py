"""What llama.cpp says of itself: an engine's profile, and the slots at work, from its own answers and log."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

from kvgate.core.drain import BusySlot
from kvgate.core.profile import EngineProfile, Fact, KvSettings, Source, StartupFacts, resolve_kv
from kvgate.core.reason import Reason, refusal
from kvgate.ports import Refused

if TYPE_CHECKING:
    from kvgate.ports import StartupLogSource

T = TypeVar("T")

KIND = "llamacpp"


class BoundFacts:
    """A startup log's facts, given out only for the process whose own they certainly are.

    A log outlives the process that wrote it. Its facts count only for the process that was there when they were
    first read; a successor needs a start of its own in the log. Which process it is, the instance tells; where
    there is none, only a child's log is believed, since its end would be noticed. Once known they are not read
    again: a verbose log quotes clients, who could write a start of their own.
    """

    def __init__(self, source: StartupLogSource | None) -> None:
        self._source = source
        self._instance: str | None = None
        self._bound = False
        self._facts: StartupFacts | None = None
        self._is_whole = False
        self._starts = 0
        self._starts_before = 0

    def of(self, instance: str | None) -> StartupFacts | None:
        """The facts of the process of this instance, None where none are certain."""
        source = self._source
        is_same = self._bound and self._instance == instance
        if source is None or (is_same and self._is_whole):
            return self._facts
        found = source.read()
        if is_same and self._facts is not None:  # the rest of the same start, no other one
            self._is_whole = found.is_settled or found.starts != self._starts
            self._facts = found.facts if found.starts == self._starts else self._facts
            return self._facts
        if self._bound and self._instance != instance:
            self._starts_before = self._starts
        self._bound, self._instance, self._starts = True, instance, found.starts
        certain = instance is not None or source.is_childs
        self._facts = found.facts if certain and found.starts > self._starts_before else None
        self._is_whole = self._facts is not None and found.is_settled
        return self._facts


def profile_of(
    props: dict[str, Any],
    models: Any,
    slots: list[Any] | None,
    facts: StartupFacts | None,
    kv: KvSettings,
    *,
    slots_visible: bool,
) -> EngineProfile:
    """The profile that the engine's answers, its log and the operator's settings make together.

    Args:
        props: of GET /props.
        models: of GET /v1/models, whatever it was.
        slots: of GET /slots, None where the engine does not show them, or was not asked.
        facts: of its startup log.
        kv: what the operator says.
        slots_visible: whether the engine would show its slots.

    Raises:
        Refused: ENGINE_UNKNOWN: what must be known is told nowhere, or contradicts the settings.
    """
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
    model, meta = _model_entry(models, text_of(props.get("model_path")))
    template = text_of(props.get("chat_template"))
    return EngineProfile(
        kind=KIND,
        n_ctx_slot=n_ctx_slot,
        total_slots=total_slots,
        topology=topology,
        pool_tokens=pool_tokens,
        instance=text_of(props.get("media_marker")),
        build=text_of(props.get("build_info")),
        models=model,
        model_path=text_of(props.get("model_path")),
        model_ftype=text_of(props.get("model_ftype")),
        model_bytes=_positive(meta.get("size")),
        n_params=_positive(meta.get("n_params")),
        n_vocab=_positive(meta.get("n_vocab")),
        n_ctx_train=_positive(meta.get("n_ctx_train")),
        chat_template_sha256=(
            hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest() if template else None
        ),
        kv_bytes_per_token=facts.kv_bytes_per_token if facts else None,
        kv_type_k=Fact(facts.kv_type_k, Source.LOG) if facts and facts.kv_type_k else None,
        kv_type_v=Fact(facts.kv_type_v, Source.LOG) if facts and facts.kv_type_v else None,
        slots_visible=slots_visible,
        prompt_cache_mib=_told(facts.prompt_cache_mib if facts else None),
        idle_slots_cached=_told(facts.idle_slots_cached if facts else None),
        context_shift=_told(facts.context_shift if facts else None),
    )


def _told(value: T | None) -> Fact[T] | None:
    """What a startup log says, if it says it."""
    return None if value is None else Fact(value, Source.LOG)


def _n_ctx_slot(props: dict[str, Any], models: Any, slots: list[Any] | None) -> Fact[int] | None:
    """The least of what the three endpoints say; the first that says it is named."""
    settings = props.get("default_generation_settings")
    told = [(_positive(settings.get("n_ctx")) if isinstance(settings, dict) else None, Source.PROPS)]
    told += [(_positive(slot.get("n_ctx")), Source.SLOTS) for slot in slots or () if isinstance(slot, dict)]
    told.append((_positive(_model_entry(models)[1].get("n_ctx")), Source.MODELS))
    found = [Fact(value, source) for value, source in told if value is not None]
    return min(found, key=lambda fact: fact.value, default=None)


def _model_entry(models: Any, path: str | None = None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names under which the engine serves its model, and the model's figures.

    Without an alias the name is the whole path of the model's file, of which tenants see the last part only.
    """
    data = models.get("data") if isinstance(models, dict) else None
    entry = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    aliases = entry.get("aliases")
    names = [entry.get("id"), *(aliases if isinstance(aliases, list) else ())]
    meta = entry.get("meta")
    strings = (name for name in names if isinstance(name, str))
    unique = dict.fromkeys(name.rpartition("/")[2] if name == path else name for name in strings)
    return tuple(unique), meta if isinstance(meta, dict) else {}


def busy_slots(slots: list[Any]) -> list[BusySlot]:
    """The slots at work among the entries of `/slots`."""
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


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def text_of(value: Any) -> str | None:
    """A string that says something."""
    return value if isinstance(value, str) and value else None
