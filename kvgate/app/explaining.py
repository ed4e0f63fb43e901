"""Answers what a body would get, by the same steps as serving it, and takes nothing for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgate.core.explain import as_json, explained
from kvgate.gate import Call, Rejected
from kvgate.web.routes import Inference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvgate.core.ledger import LedgerView
    from kvgate.core.tenant import Tenant
    from kvgate.gate import Gate
    from kvgate.ports import Tenants
    from kvgate.web.routes import Route


class CannotExplain(LookupError):
    """There is no such tenant or path; the message says which."""


class Explainer:
    """Explains verdicts.

    Args:
        gate: the one that serves.
        tenants: by name.
        routes: the allow-list.
        ledger: what is held and who waits, None where there is no ledger to look at.
    """

    def __init__(
        self, gate: Gate, tenants: Tenants, routes: Mapping[str, Route], ledger: Callable[[], LedgerView | None]
    ) -> None:
        self._gate = gate
        self._tenants = tenants
        self._routes = routes
        self._ledger = ledger

    async def explain(self, tenant: str, path: str, body: bytes) -> dict[str, Any]:
        """What this tenant would get for this body at this path, as JSON values.

        Raises:
            CannotExplain: nobody is asked of, or a path that is not counted.
        """
        who, route = self._tenants.by_name(tenant), self._routes.get(path)
        if who is None:
            raise CannotExplain(f"there is no tenant {tenant!r}")
        if not isinstance(route, Inference):
            counted = ", ".join(sorted(path for path, route in self._routes.items() if isinstance(route, Inference)))
            raise CannotExplain(f"nothing is counted at {path!r}; these are: {counted}")
        return await self._explained(who, route, body)

    async def _explained(self, tenant: Tenant, route: Inference, body: bytes) -> dict[str, Any]:
        weighed = await self._gate.weigh(Call(tenant, route.dialect, body))
        asked = {"tenant": tenant.name, "path": route.engine_path, "dialect": route.dialect.name}
        if isinstance(weighed, Rejected):
            refused = weighed.refusal
            row = refused.reason.value
            return {
                **asked,
                "verdict": "reject",
                "admitted": False,
                "reason": row.label,
                "status": row.status,
                "message": refused.message,
                "param": refused.param,
            }
        found = explained(
            weighed.request.ask,
            weighed.counted.prompts,
            weighed.counted.proof,
            pool=weighed.pool,
            tenant=tenant,
            verdict=weighed.verdict,
            view=self._ledger(),
        )
        return {**asked, **as_json(found)}
