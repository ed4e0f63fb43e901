"""Every setting, with its unit and range: kvgate.toml, then KVGATE_* variables, then flags; and tenants.toml."""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvgate.core.canary import SUITE_TENANT
from kvgate.core.fairness import MILLI, FairRule
from kvgate.core.guarantee import over_guaranteed
from kvgate.core.tenant import (
    WEIGHT_MAX,
    WEIGHT_MIN,
    Limits,
    LoopGuard,
    OnOverflow,
    Quota,
    ReusePolicy,
    Share,
    Tenant,
    Tier,
    TrimSide,
    TrimStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENV_PREFIX = "KVGATE_"
ENV_OF_THE_BENCH = frozenset({"KVGATE_MODEL", "KVGATE_CACHE"})
"""Variables of `make run` and the tests, which are not settings of the gate."""

_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
Address = Annotated[str, StringConstraints(pattern=rf"^(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):{_PORT}$")]


class BadSettings(ValueError):
    """Settings that cannot be used; the message names file, key, problem and the nearest known key."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(_Section):
    """The inference server behind the gate."""

    url: str | None = Field(None, description="Where the engine is: http://host:port.")
    kind: Literal["auto", "llamacpp"] = Field("auto", description="The kind of engine; auto asks it.")
    log: Path | None = Field(
        None, description="File with the engine's startup log: tells topology, pool size and KV precision."
    )
    api_key: str | None = Field(None, description="The engine's own key, sent with every request to it.", repr=False)
    context_tokens_min: int | None = Field(
        None, ge=1, description="Tokens. An engine whose n_ctx_slot is smaller is not served."
    )
    on_undersized: Literal["refuse", "warn"] = Field(
        "refuse", description="What to do with an engine below context_tokens_min."
    )
    kv_topology: Literal["auto", "divided", "unified"] = Field(
        "auto", description="Whether slots divide the KV cache or share it; auto reads the log, else assumes a pool."
    )
    pool_tokens: int | None = Field(
        None, ge=1, description="Tokens. Size of the shared pool where it is larger than n_ctx_slot."
    )
    pool_headroom_ratio: float = Field(0.0, ge=0, lt=1, description="Share of the pool that is never granted.")
    margin_tokens: int = Field(
        0, ge=0, description="Tokens a sequence may take beyond its output limit, such as a speculative draft."
    )
    counting: Literal["auto", "engine"] = Field(
        "auto",
        description="How prompts are counted: auto by the cheapest proof that is certain, engine by the engine's own "
        "counter alone (docs/counting.md).",
    )
    tokenizer: Path | None = Field(
        None,
        description="File with the engine's vocabulary, a tokenizer.json; none takes the model's GGUF file where it "
        "can be read here.",
    )
    prefill_tokens_max: int | None = Field(
        None,
        ge=1,
        description="Tokens of prompts that may be read at once: granted, and no output yet. A larger prompt goes "
        "alone. None sets no bound (docs/fairness.md).",
    )
    dedicated_to: tuple[str, ...] = Field(
        (),
        description="Names of the only tenants that this engine serves; empty serves every tenant, none of them with "
        "prefix reuse (docs/reuse.md).",
    )
    drain_max_s: float = Field(
        120.0, gt=0, description="Seconds after which a hung-up request's KV counts as free without proof."
    )
    idle_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds of silence in mid-answer after which the engine counts as stalled; comments count as "
        "life. Before an answer begins only an engine that does not answer /health either is given up.",
    )


class FairnessSettings(_Section):
    """What a token costs, and how strictly the order among tenants is kept."""

    input_price: float = Field(1.0, ge=0, le=1000, description="Service of one prompt token.")
    cached_input_price: float = Field(
        0.25, ge=0, le=1000, description="Service of one prompt token whose KV was reused."
    )
    output_price: float = Field(2.0, ge=0, le=1000, description="Service of one generated token.")
    bypass_max: int = Field(
        4,
        ge=0,
        le=1000,
        description="How often the first in line may be passed by others because it does not fit; then nobody else "
        "goes in until it does. 0 keeps a strict order.",
    )
    lent_output_tokens_max: int = Field(
        512,
        ge=0,
        description="Tokens. A guaranteed share that is idle is lent to requests of at most this output; 0 lends "
        "nothing.",
    )

    def rule(self, prefill_tokens_max: int | None) -> FairRule:
        """What the ledger goes by."""
        return FairRule(
            input_price_milli=round(self.input_price * MILLI),
            cached_input_price_milli=round(self.cached_input_price * MILLI),
            output_price_milli=round(self.output_price * MILLI),
            bypass_max=self.bypass_max,
            prefill_tokens_max=prefill_tokens_max,
            lent_output_tokens_max=self.lent_output_tokens_max,
        )


class StoreSettings(_Section):
    """Redis or Valkey, which holds tenants, keys and the ledger."""

    url: str | None = Field(
        None,
        description="redis://, rediss:// (TLS) or unix:// URL; cluster://HOST:PORT,HOST:PORT; "
        "sentinel://HOST:PORT,HOST:PORT/NAME (clusters://, sentinels:// with TLS). None starts a private Valkey in "
        "data_dir.",
    )
    data_dir: Path | None = Field(
        None, description="Where the embedded Valkey keeps its data; default: .kvgate beside the configuration."
    )
    lease_ttl_s: float = Field(
        15.0, ge=1, le=300, description="Seconds after which what a gate held that is not heard of drains."
    )
    on_outage: Literal["local", "reject"] = Field(
        "local",
        description="Without the store: let in within what this gate held, while its leases last, or nobody.",
    )
    outage_reserve_slots: int = Field(
        0,
        ge=0,
        description="Slots, each with its part of the pool, that this gate may use without the store for as long as "
        "it is out. All gates' reserves together must not exceed the engine.",
    )


class ReportSettings(_Section):
    """What is kept of each request for `kvgate report`; no text of it."""

    keep_s: int = Field(
        24 * 3600, ge=0, description="Seconds for which a request's report is kept in the store; 0 keeps none."
    )
    kept_max: int = Field(
        20_000, ge=0, description="Reports kept at most, of all tenants; the oldest go. About a kilobyte each."
    )


class HttpSettings(_Section):
    """The tenants' side of the gate."""

    body_bytes_max: int = Field(8 * 1024 * 1024, ge=1024, description="Bytes. A larger request body is refused.")
    body_timeout_s: float = Field(60.0, gt=0, description="Seconds within which a request body must arrive.")
    write_timeout_s: float = Field(
        60.0, gt=0, description="Seconds after which a client that reads nothing of its answer is cut."
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose browser pages may ask, such as https://chat.example; * allows every page."
    )
    stop_grace_s: float = Field(30.0, ge=0, description="Seconds that running requests get to finish on SIGTERM.")


class CanarySettings(_Section):
    """Prefix reuse: how its evidence is kept true (docs/reuse.md)."""

    every_h: float = Field(
        0.0,
        ge=0,
        description="Hours after which the suite runs again on a pinned engine, and at once on a process that takes "
        "its place; 0 leaves both to `kvgate canary run`.",
    )


class Settings(BaseSettings):
    """All settings of `kvgate serve`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    listen: Address = Field("127.0.0.1:8600", description="HOST:PORT for tenants.")
    admin_listen: Address = Field(
        "127.0.0.1:8601", description="HOST:PORT for the operator: health, metrics, status."
    )
    workers: int = Field(
        1, ge=1, le=256, description="Processes that serve side by side on one address, over one ledger."
    )
    tenants: Path | None = Field(None, description="The tenants file.")
    tenants_owner: str | None = Field(
        None,
        description="The name under which the file owns its tenants in the store; default: its path. Gates that "
        "share a store and have the same file at different paths set the same name.",
    )
    anonymous_tenant: str | None = Field(
        None, description="The tenant that requests without any key belong to; none refuses them."
    )
    engine: EngineSettings = Field(EngineSettings(), description="The engine.")
    store: StoreSettings = Field(StoreSettings(), description="The store.")
    http: HttpSettings = Field(HttpSettings(), description="The tenants' side.")
    canary: CanarySettings = Field(CanarySettings(), description="Prefix reuse.")
    report: ReportSettings = Field(ReportSettings(), description="What is kept of each request.")
    fairness: FairnessSettings = Field(FairnessSettings(), description="Prices and the order among tenants.")

    @model_validator(mode="after")
    def _two_listeners(self) -> Self:
        if self.listen == self.admin_listen and not self.listen.endswith(":0"):
            raise ValueError("listen and admin_listen are the same address; the operator's listener needs its own")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic names it
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic names it
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags before variables before the file; the file arrives as the last of the init settings."""
        given = init_settings.init_kwargs if isinstance(init_settings, InitSettingsSource) else {}
        flags = InitSettingsSource(settings_cls, given.get("flags", {}))
        file = InitSettingsSource(settings_cls, given.get("file", {}))
        return flags, env_settings, file


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class TenantSection(_Section):
    """One `[tenant.NAME]` of the tenants file."""

    keys_sha256: tuple[Sha256, ...] | None = Field(
        None,
        description="SHA-256 of each key, 64 lower-case hex digits: these and no others. Without this line the "
        "tenant's keys are made and revoked by `kvgate keys`.",
    )
    models: tuple[str, ...] | None = Field(None, description="Models that may be named; none allows every model.")
    context_tokens_max: int | None = Field(
        None, ge=1, description="Limit. Tokens of prompt and output together in one request."
    )
    output_tokens_min: int = Field(1, ge=1, description="Limit. Tokens of output that must fit beside a prompt.")
    output_tokens_default: int = Field(
        1024, ge=1, description="Limit. Tokens of output where the request names no limit, or what fits of it."
    )
    on_overflow: OnOverflow = Field(
        OnOverflow.REJECT,
        description="Limit. What to do where the asked output does not fit: `reject`, `clamp` it to what fits, or "
        "`trim` the conversation's history until `trim_room_tokens` are free, then clamp (docs/trim.md).",
    )
    trim_on_request: bool = Field(
        False,
        description="Limit. Whether a request may ask for trimming in its own words where `on_overflow` is another.",
    )
    trim_strategy: TrimStrategy = Field(
        TrimStrategy.OLDEST_FIRST,
        description="Limit. What goes first: `oldest-first`, `middle-out` or `tool-output-first`.",
    )
    trim_side: TrimSide = Field(
        TrimSide.LEFT, description="Limit. Which end of a text prompt is cut off: `left` or `right`."
    )
    trim_room_tokens: int = Field(
        256, ge=1, description="Limit. Tokens of output that trimming makes room for, where as many are asked."
    )
    trim_stride_tokens: int = Field(
        0,
        ge=0,
        description="Limit. Tokens, at 4 bytes each, in whose multiples history is dropped, so that the kept prefix "
        "stays the same for several turns; 0 drops no more than needed.",
    )
    loop_guard: LoopGuard = Field(
        LoopGuard.OBSERVE,
        description="Limit. What to do about an answer that repeats itself over and over: `off`, `observe` (count "
        "it) or `stop` its stream (docs/loops.md).",
    )
    concurrency_max: int | None = Field(None, ge=1, description="Quota. Sequences that run at once.")
    kv_tokens_max: int | None = Field(None, ge=1, description="Quota. KV tokens held at once.")
    queue_max: int = Field(64, ge=0, description="Quota. Requests that may wait.")
    queue_timeout_s: float = Field(30.0, gt=0, le=3600, description="Quota. Seconds that a request may wait.")
    requests_per_minute: int | None = Field(None, ge=1, description="Quota. Requests in any 60 seconds.")
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Quota. Tokens in any 60 seconds: prompt and output limit, then what was used. A larger request "
        "goes alone.",
    )
    weight: float = Field(
        1.0,
        ge=WEIGHT_MIN,
        le=WEIGHT_MAX,
        description="Share. Two tenants that both wait get service in the ratio of their weights.",
    )
    tier: Tier = Field(
        Tier.ELASTIC,
        description="Share. `guaranteed` has guaranteed_ratio of the pool for itself, `elastic` what is free, `spot` "
        "only what nobody else waits for.",
    )
    guaranteed_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share. Part of the pool, cells and slots, that is there for this tenant whenever it comes; all "
        "tenants' together at most 1.",
    )

    reuse: Literal["off", "canary"] = Field(
        "off",
        description="Whether the tenant is on the allowlist for prefix reuse: `off` or `canary` (docs/reuse.md).",
    )

    @model_validator(mode="after")
    def _ratio_and_tier(self) -> Self:
        if (self.tier is Tier.GUARANTEED) != (self.guaranteed_ratio > 0):
            raise ValueError('tier = "guaranteed" and a guaranteed_ratio above 0 go together; set both or neither')
        return self

    def tenant(self, name: str) -> Tenant:
        """The tenant that this section declares."""
        return Tenant(
            name=name,
            limits=Limits(
                context_tokens_max=self.context_tokens_max,
                output_tokens_min=self.output_tokens_min,
                output_tokens_default=self.output_tokens_default,
                on_overflow=self.on_overflow,
                trim_on_request=self.trim_on_request,
                trim_strategy=self.trim_strategy,
                trim_side=self.trim_side,
                trim_room_tokens=self.trim_room_tokens,
                trim_stride_tokens=self.trim_stride_tokens,
                loop_guard=self.loop_guard,
            ),
            quota=Quota(
                concurrency_max=self.concurrency_max,
                kv_tokens_max=self.kv_tokens_max,
                queue_max=self.queue_max,
                queue_timeout_s=self.queue_timeout_s,
                requests_per_minute=self.requests_per_minute,
                tokens_per_minute=self.tokens_per_minute,
            ),
            models=None if self.models is None else frozenset(self.models),
            share=Share(self.weight, self.tier, self.guaranteed_ratio),
            reuse=ReusePolicy(self.reuse),
        )


TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class TenantsFile(_Section):
    """The tenants file."""

    tenant: dict[TenantName, TenantSection] = Field(default_factory=dict)


def load(config: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in force: the file's, overridden by KVGATE_* variables, overridden by flags.

    Raises:
        BadSettings: a file cannot be read, a key is unknown, or a value is out of range.
    """
    _check_environment(environment)
    file = {} if config is None else _toml(config)
    store = file.get("store", {})
    if config is not None and isinstance(store, dict) and "data_dir" not in store:
        file = {**file, "store": {**store, "data_dir": config.resolve().parent / ".kvgate"}}
    try:
        return Settings(flags=dict(flags), file=file)  # type: ignore[call-arg]  # taken apart by the sources
    except ValidationError as error:
        raise _bad(error, "the settings" if config is None else str(config), Settings) from None
    except SettingsError as error:
        raise BadSettings(f"a {ENV_PREFIX}* variable that holds a section must be a JSON object: {error}") from None


RELOADABLE: Final = frozenset(
    {
        "anonymous_tenant",
        "engine.context_tokens_min",
        "engine.on_undersized",
        "engine.kv_topology",
        "engine.pool_tokens",
        "engine.pool_headroom_ratio",
        "engine.margin_tokens",
        "engine.idle_timeout_s",
        "http.body_bytes_max",
        "http.body_timeout_s",
        "http.write_timeout_s",
        "http.cors_origins",
        "http.stop_grace_s",
    }
)
"""Settings that a running gate takes over on SIGHUP; the others hold sockets, stores and processes."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Settings read anew: those in force from now on, which of them changed, and what changed in vain."""

    settings: Settings
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def reloaded(before: Settings, found: Settings) -> Reloaded:
    """Of what was found, take over what may change while a gate runs."""
    old, new = _values(before), _values(found)
    differing = [name for name in new if new[name] != old[name]]
    changed = tuple(name for name in differing if name in RELOADABLE)
    in_force = before
    for name in changed:
        section, _, field = name.rpartition(".")
        if section:
            part = getattr(in_force, section).model_copy(update={field: new[name]})
            in_force = in_force.model_copy(update={section: part})
        else:
            in_force = in_force.model_copy(update={field: new[name]})
    return Reloaded(in_force, changed, tuple(name for name in differing if name not in RELOADABLE))


def _values(settings: Settings) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return {
        name: functools.reduce(getattr, name.split("."), settings)
        for name, *_ in described()
        if not name.startswith("tenant.")
    }


def load_tenants(path: Path) -> dict[str, tuple[Tenant, tuple[str, ...] | None]]:
    """The tenants that a file declares, each with the SHA-256 of its keys, or None where it leaves them to others.

    Raises:
        BadSettings: as `load`, or one key is declared for two tenants, or more than the pool is guaranteed, or a name
            is not to be had.
    """
    try:
        file = TenantsFile.model_validate(_toml(path))
    except ValidationError as error:
        raise _bad(error, str(path), TenantsFile) from None
    owners: dict[str, str] = {}
    if SUITE_TENANT in file.tenant:
        raise BadSettings(f"{path}: tenant.{SUITE_TENANT}: that name is the reuse suite's own (`kvgate canary run`)")
    for name, section in file.tenant.items():
        for digest in section.keys_sha256 or ():
            if owners.setdefault(digest, name) != name:
                raise BadSettings(f"{path}: tenants {owners[digest]!r} and {name!r} declare the same key")
    if (over := over_guaranteed({name: one.guaranteed_ratio for name, one in file.tenant.items()})) is not None:
        raise BadSettings(f"{path}: {over}")
    return {name: (section.tenant(name), section.keys_sha256) for name, section in file.tenant.items()}


def described() -> Iterator[tuple[str, str, Any, str]]:
    """Every setting and tenant field: dotted name, type, default, description. The reference is made of it."""
    yield from _described("", Settings)
    yield from _described("tenant.NAME.", TenantSection)


def _described(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, str, Any, str]]:
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, _Section):
            yield from _described(f"{prefix}{name}.", section)
        else:
            kind = str(section) if not isinstance(section, type) else section.__name__
            yield f"{prefix}{name}", kind, field.get_default(), field.description or ""


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSettings(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path} is not TOML: {error}") from None


def _check_environment(environment: Mapping[str, str]) -> None:
    known = {f"{ENV_PREFIX}{name.upper().replace('.', '__')}" for name, *_ in _described("", Settings)}
    sections = {name.rpartition("__")[0] for name in known if "__" in name}
    for name in environment:
        if name.startswith(ENV_PREFIX) and name not in known | sections | ENV_OF_THE_BENCH:
            raise BadSettings(f"the variable {name} is no setting{_nearest(name, known)}")


def _bad(error: ValidationError, where: str, model: type[BaseModel]) -> BadSettings:
    problems = []
    for found in error.errors(include_url=False, include_input=False):
        path = ".".join(str(part) for part in found["loc"])
        if found["type"] == "extra_forbidden":
            known = _siblings(model, found["loc"][:-1])
            problems.append(f"{path} is unknown{_nearest(str(found['loc'][-1]), known)}")
        else:
            problems.append(f"{path}: {_said(found['type'], path, found['msg'])}")
    return BadSettings(f"{where}: " + "; ".join(problems))


def _said(kind: str, path: str, message: str) -> str:
    """What is wrong with a value, and what it must look like."""
    if kind == "string_pattern_mismatch" and path.endswith("listen"):
        return "must look like HOST:PORT, such as 127.0.0.1:8600"
    if kind == "string_pattern_mismatch" and ".keys_sha256." in path:
        return 'must be a key\'s SHA-256 as 64 lower-case hex digits: printf %s "$KEY" | sha256sum'
    if kind == "string_pattern_mismatch" and path.startswith("tenant."):
        return "a tenant's name has letters, digits, '.', '_' and '-', at most 64"
    if kind == "tuple_type":
        return "must be a list"
    return message


def _siblings(model: type[BaseModel], path: tuple[int | str, ...]) -> set[str]:
    for part in path:
        if part in model.model_fields:
            inner = model.model_fields[str(part)].annotation
            model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else TenantSection
    return set(model.model_fields)


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(sorted(known))}"
