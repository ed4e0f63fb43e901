"""How tenants and keys are written in the store: the names of its hashes, a tenant's record, a key's ID."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from kvgate.core.tenant import Tenant

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "{kvgate}"
"""A hash tag: on a cluster all that is changed together lives on one node."""

ID_DIGITS: Final = 12
"""A key's ID is the first so many hex digits of its SHA-256: it can be shown, and tells nothing of the key."""

_TENANT = TypeAdapter(Tenant)


@dataclass(frozen=True, slots=True)
class Names:
    """What the store's keys are called.

    `tenants` is a hash from name to record; `keys` one from a key's SHA-256 to the name of its tenant; `minted` one
    from the SHA-256 of each key that was made here to what is known of it; `version` counts the changes.
    """

    prefix: str = PREFIX

    @property
    def all(self) -> tuple[str, str, str, str]:
        """The four, in the order that every script takes them."""
        prefix = self.prefix
        return f"{prefix}:tenants", f"{prefix}:keys", f"{prefix}:keys:minted", f"{prefix}:tenants:version"

    def sizes(self, tenant: str) -> str:
        """The list of a tenant's recent request sizes."""
        return f"{self.prefix}:sizes:{tenant}"

    def report(self, request_id: str) -> str:
        """The list of what is kept of requests with this id."""
        return f"{self.prefix}:report:{request_id}"

    @property
    def reports(self) -> str:
        """The sorted set of the ids that something is kept of, by when their last request ended."""
        return f"{self.prefix}:reports"


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant as the store has it.

    Args:
        owner: whoever declares it, such as the path of a file.
        tenant: None where this version of kvgate cannot read it.
        keys_declared: whether its owner declares its keys too; otherwise they are made here.
    """

    owner: str
    tenant: Tenant | None
    keys_declared: bool


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key as the store has it; `minted` where it was made here, and then the rest is known."""

    sha256: str
    tenant: str
    minted: bool
    label: str = ""
    created_s: int | None = None
    created_by: str = ""

    @property
    def key_id(self) -> str:
        """What the key is called wherever it is spoken of."""
        return self.sha256[:ID_DIGITS]


def script_of(client: Any, name: str) -> Any:  # redis-py's scripts are untyped
    """One of the .lua files beside this one, to be run by this client."""
    return client.register_script(files("kvgate.store").joinpath(name).read_text())


def encode_tenant(tenant: Tenant) -> dict[str, Any]:
    """The tenant as JSON values; equal tenants give equal values."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(tenant), allow_nan=False, default=sorted))
    return values


def decode_tenant(values: object) -> Tenant:
    """The tenant that `encode_tenant` made these values of, perhaps in another version of kvgate.

    A field that is missing, and a word that this version does not know (a later policy), is the default, which
    is the strict choice for every such word; fields unknown here are ignored.

    Raises:
        ValueError: anything else is wrong with them.
    """
    try:
        return _TENANT.validate_python(values)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        if any(problem["type"] != "enum" for problem in problems):
            raise
        known = json.loads(json.dumps(values))
        for *way, last in (problem["loc"] for problem in problems):
            holder = known
            for step in way:
                holder = holder[step]
            del holder[last]
        return _TENANT.validate_python(known)


def settings_of(tenant: Tenant) -> dict[str, Any]:
    """A tenant's settings by the names that they have in `tenants.toml`, as JSON values."""
    settings: dict[str, Any] = {}
    for name, value in encode_tenant(tenant).items():
        if name != "name":
            settings |= value if isinstance(value, dict) else {name: value}
    return settings


def encode_record(owner: str, tenant: Tenant, *, keys_declared: bool) -> str:
    """A tenant's record; the scripts read its `owner` and `keys_declared`."""
    record = {"owner": owner, "tenant": encode_tenant(tenant), "keys_declared": keys_declared}
    return json.dumps(record, sort_keys=True)


def decode_record(text: str) -> TenantRecord:
    """What `encode_record` wrote; what cannot be read is told as such, never as a tenant without limits."""
    try:
        values = json.loads(text)
        owner, keys_declared = str(values["owner"]), values.get("keys_declared") is not False
    except (ValueError, KeyError, TypeError, AttributeError):
        return TenantRecord("?", None, keys_declared=True)
    try:
        return TenantRecord(owner, decode_tenant(values["tenant"]), keys_declared)
    except (ValueError, KeyError, TypeError):
        return TenantRecord(owner, None, keys_declared)


def key_records(names: Mapping[str, str], minted: Mapping[str, str]) -> dict[str, KeyRecord]:
    """Every key, by its SHA-256."""
    return {sha256: key_record(sha256, name, minted.get(sha256)) for sha256, name in names.items()}


def key_record(sha256: str, tenant: str, minted: str | None) -> KeyRecord:
    """One key, and what is known of it where it was made here."""
    if not minted:
        return KeyRecord(sha256, tenant, minted=False)
    try:
        known = json.loads(minted)
        return KeyRecord(sha256, tenant, True, str(known["label"]), int(known["created_s"]), str(known["created_by"]))
    except (ValueError, KeyError, TypeError):
        return KeyRecord(sha256, tenant, minted=True)


def text_of(value: object) -> str:
    """An answer of the store, which gives bytes, as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def texts_of(mapping: Mapping[object, object]) -> dict[str, str]:
    """The same for a hash."""
    return {text_of(key): text_of(value) for key, value in mapping.items()}
