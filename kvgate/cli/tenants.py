"""kvgate tenants: apply a file that declares tenants, or try it first; show them; remove one whose file is gone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.answers import Told, plural, table, utc
from kvgate.cli.keys import key_fields
from kvgate.cli.store_access import add_options, nearest, run, run_prepared
from kvgate.cli.tenants_told import applied_fields, applied_lines, replay_lines, shown, trial_fields
from kvgate.core.replay import replay
from kvgate.core.tenant import Tenant
from kvgate.settings import BadSettings, load_tenants
from kvgate.store.errors import StoreUnavailable
from kvgate.store.records import settings_of
from kvgate.store.registry import Declared, DeclaredTenant, NotDone, TenantsConflict, UnknownTenant

if TYPE_CHECKING:
    import argparse

    from kvgate.cli.store_access import Desk, Work
    from kvgate.cli.tenants_told import Trials
    from kvgate.settings import Settings
    from kvgate.store.records import KeyRecord, TenantRecord
    from kvgate.store.registry import Applied


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the parser."""
    parser = commands.add_parser(
        "tenants",
        help="apply, show and remove tenants",
        description="Apply, show and remove tenants. A tenant belongs to the file that declares it, and is changed "
        "by applying that file alone.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    apply = actions.add_parser(
        "apply",
        help="make the store hold what a file declares",
        description="Make the store hold, of the tenants that the file owns, exactly those that it declares; all or "
        "nothing. Gates follow within a second.",
        allow_abbrev=False,
    )
    apply.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="tenants.toml; default: the configuration's"
    )
    apply.add_argument(
        "--owner", metavar="NAME", help="under which the file owns its tenants (default: tenants_owner, or its path)"
    )
    apply.add_argument(
        "--dry-run",
        action="store_true",
        help="write nothing; tell what would change, and what it would have made of recent requests",
    )
    apply.set_defaults(run=_apply)
    listing = actions.add_parser("list", help="show all tenants", description="Show all tenants.", allow_abbrev=False)
    listing.set_defaults(run=_list)
    show = actions.add_parser(
        "show",
        help="show all of one tenant",
        description="Show a tenant's owner, limits, quota and keys (by ID).",
        allow_abbrev=False,
    )
    show.add_argument("tenant", metavar="NAME", help="the tenant")
    show.set_defaults(run=_show)
    remove = actions.add_parser(
        "remove",
        help="remove a tenant whose file is gone for good",
        description="Remove a tenant and all its keys where the file that declared it is gone for good; otherwise "
        "remove its section there, and apply.",
        allow_abbrev=False,
    )
    remove.add_argument("tenant", metavar="NAME", help="the tenant")
    remove.add_argument("--owner", metavar="NAME", help="who declared it, exactly as `kvgate tenants show` says")
    remove.set_defaults(run=_remove)
    for each in (apply, listing, show, remove):
        add_options(each)


def _apply(options: argparse.Namespace, _: list[str]) -> int:
    def prepare(settings: Settings) -> Work:
        path, owner = _file_and_owner(options, settings)
        sections = {name: DeclaredTenant(*one) for name, one in load_tenants(path).items()}
        return lambda desk: _applied(desk, sections, path, owner, dry_run=options.dry_run)

    return run_prepared(options, prepare, makes_store=not options.dry_run)


async def _applied(desk: Desk, sections: dict[str, DeclaredTenant], path: Path, owner: str, *, dry_run: bool) -> Told:
    try:
        applied = await desk.registry.apply(sections, owner, dry_run=dry_run)
    except TenantsConflict as error:
        raise NotDone(
            f"{path} was not applied: {error}. Where the file has moved, name its old owner with --owner (and in "
            "tenants_owner, for the gates); where a tenant's owner is gone for good, `kvgate tenants remove` it"
        ) from None
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{error}. It was applied whole or not at all; applying it again is safe") from None
    unchanged = len(sections) - len(applied.added) - len(applied.changed)
    answer = {"dry_run": dry_run, "file": str(path), "owner": owner, "unchanged": unchanged}
    answer |= applied_fields(applied)
    lines = applied_lines(applied, unchanged, path, would=dry_run)
    if not dry_run:
        return Told(answer, lines)
    trials = await _trials(desk, applied)
    return Told({**answer, "replay": trial_fields(trials)}, [*lines, *replay_lines(trials)])


def _file_and_owner(options: argparse.Namespace, settings: Settings) -> tuple[Path, str]:
    """The file to apply, and the name under which a gate with these settings would own its tenants."""
    path: Path | None = options.file or settings.tenants
    if path is None:
        raise BadSettings("which file? kvgate tenants apply FILE, or `tenants` in the configuration")
    path = path.resolve()
    if options.owner:
        return path, str(options.owner)
    is_theirs = settings.tenants is None or settings.tenants.resolve() == path
    return path, settings.tenants_owner if settings.tenants_owner and is_theirs else str(path)


async def _trials(desk: Desk, applied: Applied) -> Trials:
    """Each tenant whose limits change, with what they make of its recent requests now and then."""
    trials: Trials = []
    for change in applied.changes:
        if change.after is not None and change.before is not None and not change.differences:
            continue
        sizes = await desk.sizes.of(change.name)
        now, then = (
            None if record is None or record.tenant is None else replay(sizes, record.tenant)
            for record in (change.before, change.after)
        )
        trials.append((change, len(sizes), now, then))
    return trials


def _list(options: argparse.Namespace, _: list[str]) -> int:
    async def work(desk: Desk) -> Told:
        holdings = await desk.registry.read()
        rows, answer = [("TENANT", "KEYS", "MADE BY", "DECLARED BY")], []
        for name, record in holdings.tenants.items():
            keys = holdings.keys_of(name)
            made = "its file" if record.keys_declared else "kvgate keys"
            rows.append((name, str(len(keys)), made, record.owner))
            answer.append(_tenant_fields(name, record, keys))
        empty = [f"no tenants in {desk.where}"]
        notes = [] if answer else ["to declare some: kvgate tenants apply FILE"]
        return Told({"tenants": answer}, table(rows) if answer else empty, notes)

    return run(options, work)


def _show(options: argparse.Namespace, _: list[str]) -> int:
    async def work(desk: Desk) -> Told:
        holdings = await desk.registry.read()
        record = holdings.tenants.get(options.tenant)
        if record is None:
            raise NotDone(f"there is no tenant {options.tenant!r}{nearest(options.tenant, holdings.tenants)}")
        keys = holdings.keys_of(options.tenant)
        sizes = await desk.sizes.of(options.tenant)
        answer = {**_tenant_fields(options.tenant, record, keys), "recent_requests": len(sizes)}
        return Told(
            answer, [*_tenant_lines(options.tenant, record, keys), f"recent requests  {len(sizes):,} recorded"]
        )

    return run(options, work)


def _remove(options: argparse.Namespace, _: list[str]) -> int:
    is_there = bool(options.owner) and Path(options.owner).is_absolute() and Path(options.owner).exists()

    async def work(desk: Desk) -> Told:
        name = options.tenant
        try:
            # Without --owner this tells whose it is, and removes nothing: nobody is called "".
            applied = await desk.registry.remove(name, options.owner or "")
        except (UnknownTenant, UnicodeEncodeError):
            known = (await desk.registry.read()).tenants
            raise NotDone(f"there is no tenant {name!r}{nearest(name, known)}") from None
        except Declared as error:
            gone = f"Where that is gone for good: --owner {error.owner}"
            advice = f"remove its section there, and apply it. {gone}"
            if options.owner:
                advice = f"not by {options.owner!r}, and --owner must name it exactly"
            raise NotDone(f"{error}: {advice}") from None
        (change,) = applied.changes
        line = f"removed: tenant {name}; {plural(len(change.revoked), 'key')} of it refused within a second"
        notes = [f"{options.owner} is still there: a gate that applies it declares {name} again"] if is_there else []
        return Told({"tenant": name, "keys_revoked": [key_fields(key) for key in change.revoked]}, [line], notes)

    return run(options, work)


def _tenant_fields(name: str, record: TenantRecord, keys: tuple[KeyRecord, ...]) -> dict[str, Any]:
    return {
        "tenant": name,
        "owner": record.owner,
        "keys_made_by": "file" if record.keys_declared else "kvgate keys",
        "keys": [key_fields(key) for key in keys],
        "settings": None if record.tenant is None else settings_of(record.tenant),
        "defaults": sorted(_defaults(record.tenant)),
    }


def _tenant_lines(name: str, record: TenantRecord, keys: tuple[KeyRecord, ...]) -> list[str]:
    made = "declared there too" if record.keys_declared else "made by kvgate keys"
    lines = [f"tenant           {name}", f"declared by      {record.owner}", f"keys             {len(keys)}, {made}"]
    for key in keys:
        known = (key.label, utc(key.created_s), f"by {key.created_by}" if key.created_by else "")
        lines.append("  " + "  ".join([key.key_id, *(word for word in known if word)]))
    if record.tenant is None:
        return [*lines, "settings         not readable by this version of kvgate: its keys are refused"]
    defaults = _defaults(record.tenant)
    settings = settings_of(record.tenant)
    rows = [(f"  {key}", shown(value), "(default)" if key in defaults else "") for key, value in settings.items()]
    return [*lines, "settings", *table(rows)]


def _defaults(tenant: Tenant | None) -> set[str]:
    """The settings that are as they are where the file says nothing."""
    if tenant is None:
        return set()
    bare = settings_of(Tenant(tenant.name))
    return {name for name, value in settings_of(tenant).items() if bare[name] == value}
