"""What state an engine is in, what its operator is told of it, and which of its changes are worth telling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.reason import Reason

if TYPE_CHECKING:
    from kvgate.core.profile import EngineProfile

CHANGE_WARNED_S: Final = 3600.0
"""How long readiness warns of a replacement."""


@dataclass(frozen=True, slots=True)
class _TroubleRow:
    """What happened, and what to check where the engine has never been reached."""

    what: str
    check: str


class Trouble(Enum):
    """Why a call to the engine had no answer."""

    REFUSED = _TroubleRow("nothing listens there", "Start the engine, or correct the port in engine.url")
    NAME_UNKNOWN = _TroubleRow("its name is unknown", "Check the host in engine.url and this machine's name service")
    NO_ROUTE = _TroubleRow("there is no route to it", "Check the network, the firewall and the host in engine.url")
    NO_CONNECTION = _TroubleRow(
        "it takes no connection", "Check the firewall and the host in engine.url, and whether its machine is up"
    )
    TLS = _TroubleRow("TLS failed", "Check its certificate, or whether engine.url must begin with http://")
    BROKEN = _TroubleRow(
        "the connection broke before it had answered", "Check that an inference server is what listens at engine.url"
    )
    SILENT = _TroubleRow("it takes connections and answers nothing", "Look at its machine's load and memory")


@dataclass(frozen=True, slots=True)
class StateRow:
    """One row of the table of states.

    Args:
        label: the metric label, and the word in `/readyz`.
        reason: the refusal that requests get, None where they are served.
        doing: ends "it was ...", said when it is gone.
        event: the log's line when this state begins.
        sentence: for the operator: what is the matter and what to do.
        to_do: for the docs.
    """

    label: str
    reason: Reason | None
    doing: str
    event: str
    sentence: str
    to_do: str


class EngineState(Enum):
    """Every state that an engine can be in."""

    SERVING = StateRow(
        "serving", None, "serving", "the engine serves again", "the engine serves", "Nothing: all is well."
    )
    ASLEEP = StateRow(
        "asleep",
        None,
        "asleep",
        "the engine fell asleep",
        "the engine is asleep: the next request wakes it and waits until the model is loaded",
        "Nothing, or start llama-server without `--sleep-idle-seconds`. kvgate's own watching does not wake it.",
    )
    LOADING = StateRow(
        "loading",
        Reason.ENGINE_LOADING,
        "loading its model",
        "the engine does not serve",
        "the engine has been loading its model for {lasting}; it is served as soon as it has. Where that does not "
        "end, its log says why",
        "Wait. A model on a slow disk takes minutes.",
    )
    UNDERSIZED = StateRow(
        "undersized",
        Reason.ENGINE_UNDERSIZED,
        "there, and too small",
        "the engine does not serve",
        "the engine is too small: {problem}. Start it with a larger -c or a smaller -np, or set "
        'on_undersized = "warn" under [engine]',
        "Start it with a larger `-c` or a smaller `-np`, lower `engine.context_tokens_min`, or set "
        '`engine.on_undersized = "warn"`.',
    )
    UNKNOWN = StateRow(
        "unknown",
        Reason.ENGINE_UNKNOWN,
        "there, without telling what must be known",
        "the engine does not serve",
        "{problem} Check that engine.url leads to a llama-server, with engine.api_key where it asks for one",
        "The sentence names what is missing: a key (`engine.api_key`), an endpoint that a proxy in between hides, "
        "or a setting that contradicts the engine.",
    )
    HUNG = StateRow(
        "hung",
        Reason.ENGINE_UNREACHABLE,
        "hung",
        "the engine does not serve",
        "the engine hangs: {history}{problem}. Restart it if that lasts; kvgate serves by itself once it answers",
        "Look at the machine's load and memory. Restart the engine if it lasts.",
    )
    UNREACHABLE = StateRow(
        "unreachable",
        Reason.ENGINE_UNREACHABLE,
        "gone",
        "the engine does not serve",
        "the engine cannot be reached: {history}{problem}. {check}; kvgate serves by itself once it is there",
        "The sentence tells one that has never been reached (and what to check) from one that was serving and is "
        "gone: then the end of its log says why it ended. Let a supervisor restart it.",
    )

    @property
    def label(self) -> str:
        """The metric label, and the word in `/readyz`."""
        return self.value.label

    @property
    def is_served(self) -> bool:
        """Whether requests are let through to an engine in this state."""
        return self.value.reason is None

    @property
    def answers(self) -> bool:
        """Whether an engine in this state says anything at all."""
        return self not in {EngineState.HUNG, EngineState.UNREACHABLE}


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at an engine found; `problem` gives the figures or the cause, in kvgate's own words."""

    state: EngineState
    problem: str = ""
    trouble: Trouble | None = None


def look_refused(reason: Reason, problem: str = "", trouble: Trouble | None = None) -> Look:
    """The look that ended in a refusal."""
    if reason is Reason.ENGINE_UNREACHABLE and trouble is Trouble.SILENT:
        return Look(EngineState.HUNG, problem, trouble)
    found = next((state for state in EngineState if state.value.reason is reason), EngineState.UNKNOWN)
    return Look(EngineState.UNREACHABLE if found is EngineState.HUNG else found, problem, trouble)


# -- changes


class Change(Enum):
    """How an engine differs from the one that was there before; the words end "the engine was ..."."""

    RESTARTED = "restarted", "restarted as it was"
    SMALLER = "smaller", "replaced by a smaller one"
    LARGER = "larger", "replaced by a larger one"
    OTHER_MODEL = "other_model", "replaced by one with another model"
    OTHER_SETUP = "other_setup", "replaced by one of another build or configuration"

    @property
    def label(self) -> str:
        """The metric label, and the word in `/readyz`."""
        return self.value[0]


_CONSEQUENCES: Final = {
    Change.SMALLER: "; requests that fitted before are refused now",
    Change.OTHER_MODEL: "; its answers are another model's",
}


@dataclass(frozen=True, slots=True)
class Changed:
    """A change with its figures: name, before and now, of those that differ."""

    what: Change
    figures: tuple[tuple[str, int | str, int | str], ...] = ()

    @property
    def words(self) -> str:
        """The figures in words, and what they mean for requests."""
        shown = ", ".join(f"{name} {before} -> {now}" for name, before, now in self.figures)
        return (f": {shown}" if shown else "") + _CONSEQUENCES.get(self.what, "")


def change_between(before: EngineProfile, now: EngineProfile) -> Changed | None:
    """What the successor is to its predecessor; None where both are one process of which more is known now.

    1. Another file, size or vocabulary: another model, whatever else differs.
    2. The longest sequence decides between smaller and larger, then the pool, then the slots.
    3. Anything else that the fingerprint holds: another build or configuration.
    """
    if before == now or (before.instance is not None and before.instance == now.instance):
        return None
    sizes = tuple(
        (name, old, new)
        for name, old, new in (
            ("n_ctx_slot", before.n_ctx_slot.value, now.n_ctx_slot.value),
            ("pool_tokens", before.pool_tokens.value, now.pool_tokens.value),
            ("total_slots", before.total_slots.value, now.total_slots.value),
        )
        if old != new
    )
    if _model(before) != _model(now):  # 1
        return Changed(Change.OTHER_MODEL, (*_names(before, now), *sizes))
    if sizes:  # 2
        _, old, new = sizes[0]
        return Changed(Change.SMALLER if new < old else Change.LARGER, sizes)
    if before.fingerprint != now.fingerprint or before.models != now.models:  # 3
        kinds = (("build", before.build, now.build), ("kv_type", before.kv_type, now.kv_type))
        told = tuple((name, old or "?", new or "?") for name, old, new in kinds if old != new)
        return Changed(Change.OTHER_SETUP, (*_names(before, now), *told))
    return Changed(Change.RESTARTED)


def _model(profile: EngineProfile) -> tuple[object, ...]:
    return (profile.model_path, profile.model_ftype, profile.model_bytes, profile.n_params, profile.n_vocab)


def _names(before: EngineProfile, now: EngineProfile) -> tuple[tuple[str, str, str], ...]:
    old, new = (next(iter(profile.models), "?") for profile in (before, now))
    return () if old == new else (("model", old, new),)


# -- a life


@dataclass(frozen=True, slots=True)
class EngineLife:
    """An engine as the gate has seen it until now: its state, and the change that still matters.

    Args:
        since_s: when this state began.
        look: what the latest look found.
        answered: the latest state in which it answered, None until it has, and when that was seen last.
        before: the profile that `changed` compares with: the one in force before the first change of the last hour.
        changed: what the engine is to that one.
        changed_at_s: when the latest change was noticed.
    """

    since_s: float
    look: Look = Look(EngineState.UNREACHABLE, "it has not been asked yet", Trouble.NO_CONNECTION)
    answered: EngineState | None = None
    answered_at_s: float = 0.0
    before: EngineProfile | None = None
    changed: Changed | None = None
    changed_at_s: float = 0.0

    @property
    def state(self) -> EngineState:
        """The state at the latest look."""
        return self.look.state

    def looked(self, look: Look, now_s: float) -> EngineLife:
        """The life after another look."""
        since_s = self.since_s if look.state is self.state else now_s
        life = replace(self, look=look, since_s=since_s)
        return replace(life, answered=look.state, answered_at_s=now_s) if look.state.answers else life

    def replaced(self, before: EngineProfile, now: EngineProfile, now_s: float) -> EngineLife:
        """The life after the engine's profile has changed.

        Two changes within the hour are compared over both: an engine that comes back smaller and is then restarted
        is still smaller, and one that has its old figures back is as it was.
        """
        if change_between(before, now) is None:
            return self
        first = self.before if self.before is not None and self._matters(now_s) else before
        return replace(self, before=first, changed=change_between(first, now), changed_at_s=now_s)

    def _matters(self, now_s: float) -> bool:
        return self.changed is not None and now_s - self.changed_at_s < CHANGE_WARNED_S

    def sentence(self, now_s: float) -> str:
        """What the matter is and what to do, for the operator."""
        look = self.look
        problem = look.problem
        if look.trouble is not None:
            problem = f"{look.trouble.value.what} ({problem})" if problem else look.trouble.value.what
        return look.state.value.sentence.format(
            lasting=lasting(now_s - self.since_s), problem=problem, history=self._history(now_s), check=self._check()
        )

    def _history(self, now_s: float) -> str:
        if self.answered is None:
            return "it has never been reached since this gate started: "
        gone = "" if self.state is EngineState.HUNG else " and is gone"
        return f"it was {self.answered.value.doing} until {lasting(now_s - self.answered_at_s)} ago{gone}: "

    def _check(self) -> str:
        if self.answered is None and self.look.trouble is not None:
            return self.look.trouble.value.check
        return "If nobody stopped it, it crashed: the end of its log says why"

    def change_sentence(self, now_s: float) -> str | None:
        """The change of the last hour, for the operator."""
        if self.changed is None or not self._matters(now_s):
            return None
        ago = lasting(now_s - self.changed_at_s)
        return f"the engine was {self.changed.what.value[1]} {ago} ago{self.changed.words}"

    def warnings(self, now_s: float) -> list[str]:
        """What readiness warns of although requests are served."""
        warnings = [self.sentence(now_s)] if self.state is EngineState.ASLEEP else []
        told = self.change_sentence(now_s)
        if told is not None and self.changed is not None and self.changed.what is not Change.RESTARTED:
            warnings.append(f"{told}. This warning ends an hour after the change, or when the old figures are back")
        return warnings

    def told(self, now_s: float) -> dict[str, Any]:
        """As JSON values, for `/readyz` and `/status`."""
        changed, sentence = self.changed, self.change_sentence(now_s)
        return {
            "state": self.state.label,
            "sentence": self.sentence(now_s),
            "since_s": round(now_s - self.since_s, 1),
            "changed": changed
            and sentence
            and {
                "what": changed.what.label,
                "sentence": sentence,
                "ago_s": round(now_s - self.changed_at_s, 1),
                "figures": {name: [before, now] for name, before, now in changed.figures},
            },
        }


def lasting(seconds: float) -> str:
    """A stretch of time as one figure that people read at a glance."""
    for unit, unit_s in (("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds // unit_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
