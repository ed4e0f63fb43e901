"""What the gate answers itself: the engine's models and properties, as one tenant may see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvgate.core.profile import EngineProfile
    from kvgate.core.tenant import Tenant

PROPS_SHOWN: Final = (
    "model_alias", "model_ftype", "modalities", "chat_template", "chat_template_caps", "bos_token", "eos_token",
    "build_info", "is_sleeping",
)  # fmt: skip
"""What of the engine's `/props` a tenant sees: no paths, nothing of other slots."""


def window(n_ctx_slot: int, tenant: Tenant) -> int:
    """How much context a tenant has in one request, in tokens."""
    bounds = (n_ctx_slot, tenant.limits.context_tokens_max, tenant.quota.kv_tokens_max)
    return min(bound for bound in bounds if bound is not None)


def models(profile: EngineProfile, tenant: Tenant) -> dict[str, Any]:
    """The engine's models, with the window that this tenant has in them, so that clients compact in time."""
    tokens = window(profile.n_ctx_slot.value, tenant)
    shown = {"context_length": tokens, "max_model_len": tokens, "meta": {"n_ctx": tokens}}
    data = [
        {"id": name, "object": "model", "owned_by": profile.kind, "created": 0, **shown}
        for name in profile.models
        if tenant.models is None or name in tenant.models
    ]
    return {"object": "list", "data": data}


def props(engine: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
    """The engine's `/props` as this tenant sees it: its own window, its own number of slots."""
    given = engine.get("default_generation_settings")
    # Builds that show slot 0 among the default settings show its last prompt with it.
    settings = {name: given[name] for name in ("params", "n_ctx") if name in given} if isinstance(given, dict) else {}
    slots = engine.get("total_slots")
    if isinstance(n_ctx := settings.get("n_ctx"), int):
        settings["n_ctx"] = window(n_ctx, tenant)
    if isinstance(slots, int) and tenant.quota.concurrency_max is not None:
        slots = min(slots, tenant.quota.concurrency_max)
    shown: dict[str, Any] = {name: engine[name] for name in PROPS_SHOWN if name in engine}
    alias = shown.get("model_alias")
    if isinstance(alias, str) and alias == engine.get("model_path"):
        shown["model_alias"] = alias.rpartition("/")[2]  # without an alias it is the file's whole path
    return {"default_generation_settings": settings, "total_slots": slots, **shown}
