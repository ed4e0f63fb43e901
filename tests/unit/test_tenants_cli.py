"""`kvgate tenants` and `kvgate keys`: every answer can be acted on, and shows no key but a new one."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.cli import main
from kvgate.core.ask import Ask
from kvgate.core.pool import KvPool
from kvgate.core.replay import Asked
from kvgate.ports import RequestRecord
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.recent_sizes import RecentSizes

if TYPE_CHECKING:
    from pathlib import Path

POOL = KvPool(40_000, 4, 10_000)
FILE_KEY = "sk-file-secret-0451-abcdef"
BASE = f"""
[tenant.acme]
context_tokens_max = 8000
[tenant.filed]
keys_sha256 = ["{hashlib.sha256(FILE_KEY.encode()).hexdigest()}"]
"""


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of the developer's own, and a directory in which nothing is yet."""
    for name in [name for name in os.environ if name.startswith("KVGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(server: str) -> str:
    async def empty() -> None:
        async with connect(server) as client:
            await client.flushall()

    asyncio.run(empty())
    return server


class Commands:
    """The commands at one store: each gives its exit status, what it printed, and what it complained of."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *flags: str) -> None:
        self._capsys = capsys
        self._flags = flags

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        try:
            status = main([*arguments, *self._flags])
        except SystemExit as end:
            status = int(str(end.code))
        said = self._capsys.readouterr()
        return status, said.out, said.err

    def json(self, *arguments: str) -> Any:
        """The answer of a command that does what it is asked."""
        status, out, err = self(*arguments, "--json")
        assert (status, err) == (0, ""), err
        answer = json.loads(out)
        assert answer["ok"] is True
        return answer


@pytest.fixture
def kvgate(store: str, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys, "--store", store)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(BASE)
    return path


@pytest.fixture
def applied(kvgate: Commands, file: Path) -> Path:
    """The file, applied."""
    assert kvgate("tenants", "apply", str(file))[0] == 0
    return file


def record(store: str, tenant: str, *asked: tuple[int, int | None]) -> None:
    """Requests as a gate remembers them: prompt and asked output, in tokens."""

    async def write() -> None:
        async with connect(store) as client:
            sizes = RecentSizes(client)
            for prompt, output in asked:
                found = Asked.of(Ask(None, output, 1, stream=False), (prompt,), POOL)
                sizes.request(RequestRecord("r", tenant, "d", "/", 200, "admit", "", 0.1, asked=found))
            await sizes.flush()

    asyncio.run(write())


# -- apply


def test_apply_tells_what_it_did(kvgate: Commands, file: Path) -> None:
    """By name; a second time there is nothing to do."""
    status, out, err = kvgate("tenants", "apply", "tenants.toml")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "added: acme, no key yet (kvgate keys create makes one)",
        "added: filed, 1 key",
        "every gate on this store follows within a second",
    ]
    assert kvgate("tenants", "apply", str(file)) == (0, f"nothing to change: 2 tenants as {file} declares\n", "")


def test_apply_tells_every_setting_that_changed_and_every_key(kvgate: Commands, applied: Path) -> None:
    made = kvgate.json("keys", "create", "acme", "--label", "ci")
    applied.write_text('[tenant.acme]\non_overflow = "clamp"\nkeys_sha256 = []\n')
    status, out, _ = kvgate("tenants", "apply", str(applied))
    assert status == 0
    first, revoked, removed, filed, _ = out.splitlines()
    assert first == (
        "changed: acme: context_tokens_max 8000 -> none, on_overflow reject -> clamp, keys_made_by kvgate keys -> "
        "its file"
    )
    assert revoked.startswith(f"  key {made['id']} revoked (made by ")
    assert revoked.endswith(", ci)")
    assert removed == "removed: filed, and 1 key of it revoked"
    assert filed == f"  key {sha(FILE_KEY)[:12]} revoked (declared in the file)"


def test_apply_as_json(kvgate: Commands, file: Path) -> None:
    """One object: names, differences, IDs."""
    answer = kvgate.json("tenants", "apply", str(file))
    assert (answer["added"], answer["changed"], answer["removed"]) == (["acme", "filed"], {}, [])
    assert (answer["owner"], answer["dry_run"], answer["version"]) == (str(file), False, 1)
    assert [key["id"] for key in answer["keys_added"]] == [sha(FILE_KEY)[:12]]
    file.write_text(BASE.replace("8000", "4000"))
    answer = kvgate.json("tenants", "apply", str(file))
    assert answer["changed"] == {"acme": {"context_tokens_max": {"before": 8000, "after": 4000}}}
    assert answer["unchanged"] == 1


def test_what_another_file_declares_is_not_taken(kvgate: Commands, applied: Path, tmp_path: Path) -> None:
    """And the sentence says whose it is, and what to do in either case."""
    other = tmp_path / "other.toml"
    other.write_text("[tenant.acme]")
    status, out, err = kvgate("tenants", "apply", "other.toml")
    assert (status, out) == (1, "")
    assert err.startswith(f"kvgate tenants apply: {other} was not applied: tenant 'acme' is declared by '{applied}'")
    assert "--owner" in err
    assert "kvgate tenants remove" in err
    assert kvgate("tenants", "apply", "other.toml", "--owner", str(applied))[0] == 0


def test_the_owner_is_the_one_that_a_gate_with_this_configuration_would_be(
    kvgate: Commands, applied: Path, tmp_path: Path
) -> None:
    """`tenants_owner` names the configuration's own file, and no other."""
    (tmp_path / "kvgate.toml").write_text('tenants = "tenants.toml"\ntenants_owner = "fleet"\n')
    applied.write_text("[tenant.beta]")
    assert kvgate.json("tenants", "apply", "--config", "kvgate.toml")["owner"] == "fleet"
    other = tmp_path / "other.toml"
    other.write_text("[tenant.gamma]")
    assert kvgate.json("tenants", "apply", "other.toml", "--config", "kvgate.toml")["owner"] == str(other)
    (tmp_path / "kvgate.toml").write_text('tenants_owner = "fleet"\n')
    answer = kvgate.json("tenants", "apply", "tenants.toml", "--config", "kvgate.toml")
    assert (answer["owner"], answer["unchanged"]) == ("fleet", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[tenant", "is not TOML"),
        ("[tenant.a]\nqueue_mx = 1", "did you mean queue_max?"),
    ],
)
def test_a_file_that_cannot_be_used_touches_no_store(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, said: str
) -> None:
    """Not even one that would have been made for it."""
    if text is not None:
        (tmp_path / "tenants.toml").write_text(text)
    status, out, err = Commands(capsys)("tenants", "apply", "tenants.toml")
    assert (status, out) == (2, "")
    assert said in err
    assert not (tmp_path / ".kvgate").exists()


def test_apply_without_a_file_asks_which(kvgate: Commands) -> None:
    status, _, err = kvgate("tenants", "apply")
    assert status == 2
    assert "which file?" in err


# -- dry run


def test_a_dry_run_replays_recent_requests(kvgate: Commands, applied: Path, store: str) -> None:
    """What would be refused, why, and how that is now; and nothing is written."""
    asked = [(7000, 10)] * 120 + [(3000, 5000)] * 8 + [(3000, 6000)] * 4 + [(100, 100)] * 3868
    record(store, "acme", *asked)
    before = kvgate.json("tenants", "list")
    applied.write_text(BASE.replace("8000", "6000"))
    status, out, err = kvgate("tenants", "apply", "tenants.toml", "--dry-run")
    assert (status, err) == (0, "")
    reasons = "prompt_overflow 120, generation_overflow 12"
    assert out.splitlines() == [
        "would be changed: acme: context_tokens_max 8000 -> 6000",
        "unchanged: 1 tenant",
        "nothing was written",
        "",
        f"acme: would reject 132 of 4,000 recent requests (now 4): {reasons}; largest prompt 7,000 tokens",
    ]
    assert kvgate.json("tenants", "list") == before
    applied.write_text(BASE.replace("8000", '6000\non_overflow = "clamp"'))
    _, out, _ = kvgate("tenants", "apply", "tenants.toml", "--dry-run")
    assert "would reject 120 of 4,000 recent requests (now 4): prompt_overflow 120; would clamp 12 (now 0);" in out


def test_a_dry_run_as_json(kvgate: Commands, applied: Path, store: str) -> None:
    record(store, "acme", (7000, 10), (10, 10))
    made = kvgate.json("keys", "create", "acme")
    applied.write_text("[tenant.acme]\ncontext_tokens_max = 6000\nkeys_sha256 = []\n[tenant.new]\n")
    answer = kvgate.json("tenants", "apply", "tenants.toml", "--dry-run")
    assert answer["dry_run"] is True
    assert {key["id"] for key in answer["keys_revoked"]} == {made["id"], sha(FILE_KEY)[:12]}
    then = {
        "would_reject": 1,
        "reasons": {"prompt_overflow": 1},
        "would_clamp": 0,
        "would_trim": 0,
        "prompt_tokens_max": 7000,
    }
    now = {"would_reject": 0, "reasons": {}, "would_clamp": 0, "would_trim": 0, "prompt_tokens_max": 7000}
    none = {"would_reject": 0, "reasons": {}, "would_clamp": 0, "would_trim": 0, "prompt_tokens_max": 0}
    assert answer["replay"] == {
        "acme": {"requests": 2, "now": now, "then": then},
        "filed": {"requests": 0, "now": none, "then": None},
        "new": {"requests": 0, "now": None, "then": none},
    }


def test_a_dry_run_says_what_a_removal_means_and_what_is_not_known(
    kvgate: Commands, applied: Path, store: str
) -> None:
    record(store, "filed", (10, 10), (20, 20))
    applied.write_text("[tenant.acme]\ncontext_tokens_max = 10\n[tenant.new]\n")
    _, out, _ = kvgate("tenants", "apply", "tenants.toml", "--dry-run")
    assert "would be removed: filed, and 1 key of it would be revoked" in out
    assert "filed: would refuse all of its last 2 requests: unknown key" in out
    assert "no recent requests are recorded of acme, new, so nothing is known" in out


def test_a_dry_run_of_a_conflict_is_one(kvgate: Commands, applied: Path, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("[tenant.acme]")
    assert kvgate("tenants", "apply", "other.toml", "--dry-run")[0] == 1


def test_a_dry_run_makes_no_store(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    status, _, err = Commands(capsys)("tenants", "apply", "tenants.toml", "--dry-run")
    assert status == 2
    assert f"there is no store in {tmp_path / '.kvgate'}" in err
    assert not (tmp_path / ".kvgate").exists()


# -- list, show, remove


def test_list_and_show(kvgate: Commands, applied: Path) -> None:
    """Everything of a tenant, and which of it is a default; keys by their IDs."""
    made = kvgate.json("keys", "create", "acme", "--label", "ci")
    _, out, _ = kvgate("tenants", "list")
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["acme", "1", "kvgate", "keys", str(applied)],
        ["filed", "1", "its", "file", str(applied)],
    ]
    _, out, _ = kvgate("tenants", "show", "acme")
    assert f"declared by      {applied}" in out
    assert f"  {made['id']}  ci  " in out
    lines = [line.split() for line in out.splitlines()]
    assert ["context_tokens_max", "8000"] in lines
    assert ["queue_max", "64", "(default)"] in lines
    shown = kvgate.json("tenants", "show", "acme")
    assert shown["settings"]["context_tokens_max"] == 8000
    assert "context_tokens_max" not in shown["defaults"]
    assert "queue_max" in shown["defaults"]
    assert shown["recent_requests"] == 0


def test_nothing_there_is_said_with_what_to_do(kvgate: Commands) -> None:
    assert kvgate("tenants", "list")[0] == 0
    assert kvgate.json("tenants", "list")["tenants"] == kvgate.json("keys", "list")["keys"] == []
    assert "kvgate tenants apply FILE" in kvgate("tenants", "list")[2]
    assert "nor any other: `kvgate tenants apply FILE`" in kvgate("tenants", "show", "acme")[2]


@pytest.mark.parametrize(
    "arguments",
    [("tenants", "show"), ("tenants", "remove"), ("keys", "create"), ("keys", "list")],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("name", "said"),
    [("acm", "did you mean acme?"), ("zz", "there are acme, filed"), ("\udc80", "there is no tenant")],
)
def test_an_unknown_tenant_is_told_with_the_nearest(
    kvgate: Commands, applied: Path, arguments: tuple[str, ...], name: str, said: str
) -> None:
    status, out, err = kvgate(*arguments, name)
    assert (status, out) == (1, "")
    assert said in err


def test_a_tenant_of_a_file_is_removed_there(kvgate: Commands, applied: Path) -> None:
    """By name only on behalf of its owner, named exactly; and a file that is still there is spoken of."""
    status, _, err = kvgate("tenants", "remove", "acme")
    assert status == 1
    assert f"tenant 'acme' is declared by '{applied}': remove its section there, and apply it" in err
    status, _, err = kvgate("tenants", "remove", "acme", "--owner", f"{applied}x")
    assert status == 1
    assert "--owner must name it exactly" in err
    kvgate("keys", "create", "acme")
    status, out, err = kvgate("tenants", "remove", "acme", "--owner", str(applied))
    assert (status, out) == (0, "removed: tenant acme; 1 key of it refused within a second\n")
    assert f"{applied} is still there" in err
    assert [tenant["tenant"] for tenant in kvgate.json("tenants", "list")["tenants"]] == ["filed"]


# -- keys


def test_a_key_is_shown_once(kvgate: Commands, applied: Path) -> None:
    """Alone on standard output, so that a script can take it; nowhere else, ever."""
    status, out, err = kvgate("keys", "create", "acme", "--label", "for ci")
    key = out.strip()
    assert status == 0
    assert key.startswith("sk-kvg-")
    assert len(key) == len("sk-kvg-") + 43
    assert f"key {sha(key)[:12]} of tenant acme (for ci): shown this once" in err
    said = "".join(
        str(kvgate(*arguments))
        for arguments in (("keys", "list"), ("keys", "list", "--json"), ("tenants", "show", "acme"))
    )
    assert sha(key)[:12] in said
    assert key not in err + said
    assert key[7:] not in err + said


def test_every_key_is_another(kvgate: Commands, applied: Path) -> None:
    keys = {kvgate("keys", "create", "acme")[1] for _ in range(3)}
    assert len(keys) == 3
    assert len(kvgate.json("keys", "list", "acme")["keys"]) == 3


def test_a_tenant_with_its_keys_in_the_file_gets_none_here(kvgate: Commands, applied: Path) -> None:
    status, out, err = kvgate("keys", "create", "filed")
    assert (status, out) == (1, "")
    assert f"the keys of tenant 'filed' are declared by '{applied}' (keys_sha256)" in err


def test_a_revoked_key_is_gone(kvgate: Commands, applied: Path) -> None:
    """By its ID in either case, or the first 8 digits; the answer says how far it reaches. A second time: no."""
    for spelled in (lambda key_id: key_id[:8], str.upper):
        key_id = kvgate.json("keys", "create", "acme")["id"]
        status, out, err = kvgate("keys", "revoke", spelled(key_id))
        assert (status, err) == (0, "")
        assert f"revoked: key {key_id} of tenant acme. Every gate on this store refuses it within a second" in out
        assert "a gate that cannot reach the store, once it can again" in out
        status, out, err = kvgate("keys", "revoke", key_id)
        assert (status, out) == (1, "")
        assert f"no key has the ID {key_id}: it is revoked already" in err


def test_a_leaked_key_is_revoked_by_itself(kvgate: Commands, applied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard input, where nobody else sees it; whether it is there or not, nothing of it is repeated."""
    key = kvgate("keys", "create", "acme")[1]
    seen = []
    for status in (0, 1):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(key.encode())))
        seen.append(kvgate("keys", "revoke", "-"))
        assert seen[-1][0] == status
    assert "revoked: key" in seen[0][1]
    assert "no tenant has this key" in seen[1][2]
    assert key.strip() not in str(seen)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert kvgate("keys", "revoke", "-")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "revoke", "{}"),
        ("keys", "revoke", "{}", "--json"),
        ("keys", "create", "{}"),
        ("keys", "list", "{}"),
        ("tenants", "show", "{}"),
        ("tenants", "remove", "{}", "--owner", "x"),
        ("keys", "create", "acme", "{}"),
        ("keys", "revoke", "--key", "{}"),
        ("keys", "revoke", "--key={}", "x"),
        ("{}",),
    ],
    ids=" ".join,
)
def test_a_key_where_it_does_not_belong_is_not_repeated(
    kvgate: Commands, applied: Path, arguments: tuple[str, ...]
) -> None:
    """People paste keys: the answer is no, and standard error often ends up in a log."""
    key = kvgate("keys", "create", "acme")[1].strip()
    status, out, err = kvgate(*(word.format(key) for word in arguments))
    assert status in {1, 2}
    assert key[7:] not in out + err
    assert kvgate.json("keys", "list", "acme")["keys"] != []


def test_a_key_of_hex_digits_is_not_repeated_either(kvgate: Commands, applied: Path) -> None:
    """Keys of a file can be any string; 32 hex digits look like an ID."""
    status, _, err = kvgate("keys", "revoke", "0123456789abcdef" * 2)
    assert status == 1
    assert "0123456789" not in err
    assert "kvgate keys revoke -" in err


def test_a_key_of_a_file_is_revoked_there(kvgate: Commands, applied: Path) -> None:
    status, _, err = kvgate("keys", "revoke", sha(FILE_KEY)[:12])
    assert status == 1
    assert f"is declared by '{applied}': remove its SHA-256 from keys_sha256 there, and apply it" in err
    assert FILE_KEY not in err


@pytest.mark.parametrize("label", ["a\nb", "x" * 101, "\udc80"])
def test_a_label_is_short_and_printable(kvgate: Commands, applied: Path, label: str) -> None:
    assert kvgate("keys", "create", "acme", "--label", label)[0] == 2
    assert kvgate.json("keys", "list")["keys"] == [
        {
            "id": sha(FILE_KEY)[:12],
            "tenant": "filed",
            "origin": "file",
            "label": None,
            "created_at": None,
            "created_by": None,
        }
    ]


# -- which store


def test_the_embedded_store_is_started_and_stopped(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    """Where no gate runs; what one command wrote the next one finds, beside the configuration that both name."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/kvgate.toml").write_text("")
    kvgate = Commands(capsys, "--config", "conf/kvgate.toml")
    assert kvgate("tenants", "list")[0] == 2
    assert kvgate("tenants", "apply", "tenants.toml")[0] == 0
    kvgate.json("keys", "create", "acme")
    assert len(kvgate.json("keys", "list", "acme")["keys"]) == 1
    assert not (tmp_path / ".kvgate").exists()
    store = EmbeddedValkey(tmp_path / "conf/.kvgate")
    assert not asyncio.run(store._answers())


def test_commands_side_by_side_do_not_stop_each_others_store(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    """Where no gate runs, each starts a store and stops it: one after the other."""
    kvgate = Commands(capsys)
    assert kvgate("tenants", "apply", "tenants.toml")[0] == 0
    command = [sys.executable, "-m", "kvgate", "keys", "create", "acme"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    ends = [(process.communicate(timeout=60), process.returncode) for process in running]
    assert [status for _, status in ends] == [0] * 4, ends
    assert len(kvgate.json("keys", "list", "acme")["keys"]) == 4


def test_a_running_store_is_shared(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    """With a gate, whose store it stays."""
    store = EmbeddedValkey(tmp_path / ".kvgate")
    asyncio.run(store.start())
    try:
        assert Commands(capsys)("tenants", "apply", "tenants.toml")[0] == 0
        assert store.pid is not None
        assert asyncio.run(store._answers())
    finally:
        asyncio.run(store.stop())


@pytest.mark.parametrize(
    "arguments", [("tenants", "list"), ("keys", "list"), ("keys", "revoke", "00000000")], ids=" ".join
)
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://ann:pass-word-0451@127.0.0.1:1", "the store redis://127.0.0.1:1 cannot be used: Error 111"),
        ("unix:///nowhere/x.sock", "the store unix:///nowhere/x.sock cannot be used"),
        ("http://x", "no URL of a store"),
        ("nonsense", "no URL of a store"),
    ],
)
def test_a_store_that_cannot_be_asked(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], url: str, said: str
) -> None:
    """Neither yes nor no; the sentence names it, without its password."""
    status, out, err = Commands(capsys, "--store", url)(*arguments)
    assert (status, out) == (2, "")
    assert said in err
    status, _, err = Commands(capsys, "--store", url)(*arguments, "--json")
    assert status == 2
    assert json.loads(err)["ok"] is None
    assert "0451" not in err


def test_a_variable_names_the_store_too(
    capsys: pytest.CaptureFixture[str], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATE_STORE__URL", store)
    assert Commands(capsys).json("tenants", "list") == {"ok": True, "tenants": []}


def test_no_as_json(kvgate: Commands, applied: Path) -> None:
    status, out, err = kvgate("keys", "create", "filed", "--json")
    assert (status, out) == (1, "")
    assert json.loads(err)["ok"] is False
