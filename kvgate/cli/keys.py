"""kvgate keys: make a tenant's key, list keys by their IDs, revoke one; a key itself is shown exactly once."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import os
import re
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

from kvgate.cli.answers import Told, refuse, table, utc
from kvgate.cli.store_access import add_options, nearest, run
from kvgate.store.errors import StoreUnavailable
from kvgate.store.records import ID_DIGITS
from kvgate.store.registry import Declared, NotDone, UnknownKey, UnknownTenant

if TYPE_CHECKING:
    from kvgate.cli.store_access import Desk
    from kvgate.store.records import KeyRecord

KEY_PREFIX: Final = "sk-kvg-"
KEY_BYTES: Final = 32
LABEL_CHARS_MAX: Final = 100
ID_DIGITS_MIN: Final = 8

_ID = re.compile(rf"[0-9a-f]{{{ID_DIGITS_MIN},64}}")


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser(
        "keys",
        help="make, list and revoke tenants' keys",
        description="Make, list and revoke tenants' keys. They are stored as SHA-256 and spoken of by ID, the first "
        f"{ID_DIGITS} hex digits of it.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser(
        "create",
        help="make a key and show it, this once",
        description="Make a key for a tenant whose keys are not declared in its file. The key alone goes to standard "
        "output, this once.",
        allow_abbrev=False,
    )
    create.add_argument("tenant", metavar="TENANT", help="whose key it will be")
    create.add_argument("--label", default="", type=_label, metavar="TEXT", help="what or whom it is for")
    create.set_defaults(run=_create)
    listing = actions.add_parser(
        "list", help="show keys by ID", description="Show keys by ID, never the keys.", allow_abbrev=False
    )
    listing.add_argument("tenant", nargs="?", metavar="TENANT", help="only this tenant's")
    listing.set_defaults(run=_list)
    revoke = actions.add_parser(
        "revoke",
        help="refuse a key from now on",
        description="Refuse a key from now on: within a second on every gate that reaches the store. Requests that "
        "run already finish.",
        allow_abbrev=False,
    )
    revoke.add_argument(
        "key_id",
        metavar="ID",
        help=f"from `kvgate keys list`, at least {ID_DIGITS_MIN} digits of it; - reads the key itself from standard "
        "input",
    )
    revoke.set_defaults(run=_revoke)
    for each in (create, listing, revoke):
        add_options(each)


def key_fields(key: KeyRecord) -> dict[str, Any]:
    """A key for programs, without the key."""
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "origin": "minted" if key.minted else "file",
        "label": key.label or None,
        "created_at": utc(key.created_s),
        "created_by": key.created_by or None,
    }


def _create(options: argparse.Namespace, _: list[str]) -> int:
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()

    async def work(desk: Desk) -> Told:
        try:
            made = await desk.registry.create_key(options.tenant, digest, label=options.label, created_by=_me())
        except (UnknownTenant, UnicodeEncodeError):
            known = (await desk.registry.read()).tenants
            raise NotDone(f"there is no tenant {options.tenant!r}{nearest(options.tenant, known)}") from None
        except Declared as error:
            raise NotDone(
                f"{error} (keys_sha256). Add the SHA-256 of a new key there, or remove that line, and apply it: "
                "without the line `kvgate keys create` makes the tenant's keys"
            ) from None
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"{error}. Whether a key was made is unknown, and nobody has seen it: if `kvgate keys list` shows "
                f"{digest[:ID_DIGITS]}, revoke it"
            ) from None
        label = f" ({made.label})" if made.label else ""
        note = (
            f"key {made.key_id} of tenant {made.tenant}{label}: shown this once. Every gate on this store takes it "
            f"within a second. To revoke it: kvgate keys revoke {made.key_id}"
        )
        return Told({"key": key, **key_fields(made)}, [key], [note])

    return run(options, work)


def _list(options: argparse.Namespace, _: list[str]) -> int:
    async def work(desk: Desk) -> Told:
        holdings = await desk.registry.read()
        if options.tenant is not None and options.tenant not in holdings.tenants:
            raise NotDone(f"there is no tenant {options.tenant!r}{nearest(options.tenant, holdings.tenants)}")
        names = list(holdings.tenants) if options.tenant is None else [options.tenant]
        keys = [key for name in names for key in holdings.keys_of(name)]
        rows = [("ID", "TENANT", "ORIGIN", "CREATED", "BY", "LABEL")]
        for key in keys:
            origin = "minted" if key.minted else "file"
            created = utc(key.created_s) or "-"
            rows.append((key.key_id, key.tenant, origin, created, key.created_by or "-", key.label or "-"))
        nobody = "no tenant has a key" if options.tenant is None else f"tenant {options.tenant} has no key"
        notes = [] if keys else ["to make one: kvgate keys create " + (options.tenant or "TENANT")]
        return Told({"keys": [key_fields(key) for key in keys]}, table(rows) if keys else [nobody], notes)

    return run(options, work)


def _revoke(options: argparse.Namespace, _: list[str]) -> int:
    try:
        digits, missing = _from_input() if options.key_id == "-" else _from_argument(options.key_id.lower())
    except _NoKeyNamed as problem:
        return refuse("keys revoke", str(problem), 2, as_json=options.json)

    async def work(desk: Desk) -> Told:
        try:
            gone = await desk.registry.revoke_key(digits)
        except UnknownKey:
            raise NotDone(missing) from None
        except Declared as error:
            raise NotDone(f"{error}: remove its SHA-256 from keys_sha256 there, and apply it") from None
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error}. Whether it is revoked is unknown; revoking again is safe") from None
        label = f" ({gone.label})" if gone.label else ""
        line = (
            f"revoked: key {gone.key_id} of tenant {gone.tenant}{label}. Every gate on this store refuses it within "
            "a second; a gate that cannot reach the store, once it can again. Requests that run already finish"
        )
        return Told(key_fields(gone), [line])

    return run(options, work)


class _NoKeyNamed(ValueError):
    """What was given names no key; the message does not repeat it."""


def _from_input() -> tuple[str, str]:
    """The SHA-256 of the key on standard input, and what to say where nobody has it."""
    key = getpass.getpass("key: ").encode() if sys.stdin.isatty() else sys.stdin.buffer.readline()
    if not key.strip():
        raise _NoKeyNamed("standard input held no key")
    missing = "no tenant has this key: it is revoked already, or was never one of this store's"
    return hashlib.sha256(key.strip()).hexdigest(), missing


def _from_argument(digits: str) -> tuple[str, str]:
    """The ID that was given, and what to say where no key has it."""
    if not _ID.fullmatch(digits):
        raise _NoKeyNamed(
            f"that is no key's ID, which is {ID_DIGITS_MIN} or more hex digits from `kvgate keys list`. If it is a "
            "key: arguments are seen by others (ps, shell history), so count it as leaked and give it on standard "
            "input: kvgate keys revoke -"
        )
    missing = f"no key has the ID {digits}: it is revoked already, or was never one (`kvgate keys list` shows all)"
    if len(digits) > ID_DIGITS:  # that may be a key made of hex digits, so it is not repeated
        missing = (
            "no key has this ID: it is revoked already, or was never one (`kvgate keys list` shows all). A key "
            "itself belongs on standard input: kvgate keys revoke -"
        )
    return digits, missing


def _label(text: str) -> str:
    if len(text) > LABEL_CHARS_MAX or not text.isprintable():
        raise argparse.ArgumentTypeError(f"a label is at most {LABEL_CHARS_MAX} printable characters")
    return text


def _me() -> str:
    """Who makes a key, for whoever wonders later."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
