"""kvgate explain: the verdict that a body would get, with its arithmetic."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.app.explaining import CannotExplain, Explainer
from kvgate.cli.answers import refuse
from kvgate.cli.check import problem_of
from kvgate.core.explain import lines_of
from kvgate.core.profile import KvSettings
from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.gate import Gate
from kvgate.ports import Refused
from kvgate.settings import BadSettings, load_tenants
from kvgate.store.local_ledger import LocalLedger
from kvgate.web import served_routes

if TYPE_CHECKING:
    import argparse

    from kvgate.core.tenant import Tenant

TIMEOUT_S = 60.0
ADMIN = "http://127.0.0.1:8601"


class CannotAsk(Exception):
    """Nobody answered; the message says who was asked, and what to do."""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "explain",
        help="say what a request would get, and why",
        description="Judge a body as a running gate would, by asking it, and show the arithmetic. Nothing is "
        "reserved and nothing generated. Exit 0 where it would run, 1 where it would be refused, 2 where it cannot "
        "be asked.",
        allow_abbrev=False,
    )
    parser.add_argument("body", metavar="BODY", help="file with the request's body, - for standard input")
    parser.add_argument("--tenant", required=True, metavar="NAME", help="whose request it is")
    parser.add_argument("--path", default="/v1/chat/completions", metavar="PATH", help="(default %(default)s)")
    parser.add_argument("--admin", default=ADMIN, metavar="URL", help="admin listener (default %(default)s)")
    parser.add_argument("--upstream", metavar="URL", help="without a gate: the engine itself, http://host:port")
    parser.add_argument("--tenants", type=Path, metavar="FILE", help="without a gate: tenants.toml")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Ask and say."""
    if (options.upstream is None) != (options.tenants is None):
        problem = "--upstream and --tenants go together: the engine, and whose limits apply"
        return refuse("explain", problem, 2, as_json=options.json)
    try:
        body = sys.stdin.buffer.read() if options.body == "-" else _read(Path(options.body))
        found = _directly(options, body) if options.upstream is not None else _of_gate(options, body)
    except (CannotAsk, CannotExplain, BadSettings) as cannot:
        return refuse("explain", str(cannot), 2, as_json=options.json)
    except (Refused, ValueError) as error:
        return refuse("explain", problem_of(error), 2, as_json=options.json)
    if found["verdict"] == "reject" and found.get("status", 400) >= 500:
        return refuse(
            "explain", found["message"], 2, as_json=options.json
        )  # not the body's fault: nobody could judge it
    print(json.dumps({"ok": found["admitted"], **found}) if options.json else _table(found))
    return 0 if found["admitted"] else 1


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CannotAsk(f"{path} cannot be read: {error.strerror}") from None


def _of_gate(options: argparse.Namespace, body: bytes) -> dict[str, Any]:
    """What the running gate says."""
    query = urllib.parse.urlencode({"tenant": options.tenant, "path": options.path})
    url = f"{options.admin.rstrip('/')}/explain?{query}"
    if not url.startswith(("http://", "https://")):
        raise CannotAsk(f"{options.admin} is no http:// URL")
    asked = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})  # noqa: S310 - http
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310 - likewise
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise CannotAsk(_problem(error.read()) or f"{options.admin} answered {error.code}") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise CannotAsk(
            f"no gate answers at {options.admin} ({cause}): name its admin listener with --admin URL, or ask an "
            "engine with --upstream URL --tenants FILE"
        ) from None
    return found


def _problem(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["problem"])
    except (ValueError, KeyError, TypeError):
        return ""


def _directly(options: argparse.Namespace, body: bytes) -> dict[str, Any]:
    """What a gate in front of this engine would say, with these tenants and an empty ledger."""
    tenants = load_tenants(options.tenants)
    return asyncio.run(_ask_engine(options, body, {name: tenant for name, (tenant, _) in tenants.items()}))


async def _ask_engine(options: argparse.Namespace, body: bytes, tenants: dict[str, Tenant]) -> dict[str, Any]:
    engine = LlamaCpp(options.upstream, LlamaCppSettings(KvSettings()), time.monotonic)
    gate = Gate(engine, LocalLedger(time.monotonic, 0), new_id=lambda: "none")
    try:
        await engine.discover()
        explainer = Explainer(gate, _Declared(tenants), served_routes(), lambda: None)
        return await explainer.explain(options.tenant, options.path, body)
    finally:
        await engine.close()


class _Declared:
    """The tenants of a file, by name; nobody comes with a key here."""

    def __init__(self, tenants: dict[str, Tenant]) -> None:
        self._tenants = tenants

    def by_key(self, key_sha256: str) -> Tenant | None:  # noqa: ARG002 - the port's
        """Nobody."""
        return None

    def by_name(self, name: str) -> Tenant | None:
        """The tenant of that name."""
        return self._tenants.get(name)


def _table(found: dict[str, Any]) -> str:
    if "bounds" not in found:  # it did not come as far as the arithmetic
        lines = [("verdict", f"reject ({found['reason']})"), ("answer", found["message"])]
    else:
        lines = lines_of(found)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines)
