"""kvgate histogram: from the gates' records or an engine's log, with a plan, as text, JSON and a page."""

from __future__ import annotations

import asyncio
import io
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from kvgate.core.ask import Ask
from kvgate.core.pool import KvPool
from kvgate.core.replay import Asked
from kvgate.ports import RequestRecord
from kvgate.store.client import connect
from kvgate.store.embedded import EmbeddedValkey
from kvgate.store.recent_sizes import RecentSizes
from tests.unit.test_histogram import REQUEST, START
from tests.unit.test_tenants_cli import Commands

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

POOL = KvPool(4096, 2, 2048)

TENANTS = """
[tenant.acme]
[tenant.beta]
on_overflow = "clamp"
[tenant.quiet]
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with a hundred requests of acme (20 to 2,000 tokens of prompt, 100 asked) and one of beta; its URL."""
    store = EmbeddedValkey(tmp_path_factory.mktemp("store"))
    asyncio.run(store.start())

    async def write() -> None:
        async with connect(store.url) as client:
            sizes = RecentSizes(client)
            for tenant, prompt, output in [*(("acme", 20 * at, 100) for at in range(1, 101)), ("beta", 3000, 9000)]:
                asked = Asked.of(Ask(None, output, 1, stream=False), (prompt,), POOL)
                sizes.request(RequestRecord("r", tenant, "d", "/", 200, "admit", "", 0.1, asked=asked))
            await sizes.flush()

    asyncio.run(write())
    yield store.url
    asyncio.run(store.stop())


@pytest.fixture
def kvgate(
    recorded: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Commands:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    (tmp_path / "engine.log").write_text(START + REQUEST * 3)
    commands = Commands(capsys, "--store", recorded)
    assert commands("tenants", "apply", "tenants.toml", "--owner", "test")[0] == 0
    return commands


def test_the_records_are_told_by_tenant(kvgate: Commands) -> None:
    """Whoever asked nothing is left out; the slot of today has a share of its own."""
    answer: Any = kvgate.json("histogram")
    acme = answer["tenants"]["acme"]
    assert set(answer["tenants"]) == {"acme", "beta"}
    assert (acme["requests"], acme["n_ctx_slot"]) == (100, 2048)
    assert dict(acme["prompts"]) == {50: 1000, 90: 1800, 95: 1900, 99: 1980, 100: 2000}
    assert dict(acme["totals"])[100] == 2100
    assert {share["tokens"]: share["totals"] for share in acme["shares"]}[2048] == 97
    status, out, err = kvgate("histogram", "--tenant", "acme")
    assert (status, err) == (0, "")
    assert re.search(r"^2k +100% +97.0%  <- n_ctx_slot$", out, re.MULTILINE)
    assert re.search(r"^1,025-2,048 +\|#{40} +51$", out, re.MULTILINE)
    assert "beta" not in out


def test_the_plan_of_the_records(kvgate: Commands) -> None:
    """18,000 bytes a token, as many MiB as two slots of 2,304 take: nothing is rejected but what asks for more."""
    flags = ("--plan", "--kv-bytes-per-token", "18000", "--memory-mib", "80")
    answer: Any = kvgate.json("histogram", *flags, "--n-ctx-train", "8192", "--tenant", "acme")
    best = answer["plan"]["proposals"][0]
    assert (best["flags"], best["rejected"], best["n_ctx_slot"]) == ("-c 4608 -np 2 --no-kv-unified", 0, 2304)
    assert best["kv_mib"] == pytest.approx(4608 * 18000 / 2**20, abs=0.01)
    worse = {one["flags"]: one["rejected"] for one in answer["plan"]["proposals"]}
    assert worse["-c 4096 -np 4 --no-kv-unified"] == sum(20 * at + 100 > 1024 for at in range(1, 101))
    status, out, err = kvgate("histogram", *flags)
    assert (status, "--n-ctx-train" in err) == (0, True)
    assert "kv_topology = " in out


def test_a_log_is_read_from_a_file_or_standard_input(kvgate: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the price and the memory of today, so that a plan needs no flag."""
    answer: Any = kvgate.json("histogram", "--log", "engine.log", "--plan")
    assert dict(answer["tenants"]["engine log"]["totals"])[100] == 37
    assert (answer["plan"]["bytes_per_token"], answer["plan"]["n_ctx_train"]) == (23040.0, 8192)
    assert answer["plan"]["budget_bytes"] == 45 * 2**20
    assert all(one["kv_mib"] <= 45 and one["slots"] <= 16 for one in answer["plan"]["proposals"])
    monkeypatch.setattr("sys.stdin", io.StringIO(REQUEST))
    assert kvgate.json("histogram", "--log", "-")["tenants"]["engine log"]["requests"] == 1


def test_the_price_may_come_from_another_log(kvgate: Commands) -> None:
    assert kvgate.json("histogram", "--plan", "--kv-log", "engine.log")["plan"]["bytes_per_token"] == 23040.0


def test_the_page_is_whole_in_itself(kvgate: Commands, tmp_path: Path) -> None:
    """Well-formed, and nothing in it is loaded from anywhere; names are quoted."""
    flags = ("--plan", "--kv-log", "engine.log", "--html", "page.html")
    status, _, err = kvgate("histogram", *flags)
    assert (status, err) == (0, "written: page.html\n")
    page = (tmp_path / "page.html").read_text()
    ElementTree.fromstring(page.removeprefix("<!doctype html>").replace('<meta charset="utf-8">', ""))
    assert page.count("<svg") == 2
    assert "n_ctx_slot 2,048" in page
    assert "-np 2 --no-kv-unified" in page
    assert not re.search(r"(src|href|url)\s*[=(]|http", page)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--tenant", "acne"), 1, "did you mean acme?"),
        (("--tenant", "quiet"), 1, "no request is recorded"),
        (("--log", "none.log"), 2, "none.log cannot be read"),
        (("--log", "tenants.toml"), 1, "no finished request stands in tenants.toml"),
        (("--log", "engine.log", "--tenant", "acme"), 2, "leave --tenant out"),
        (("--plan",), 2, "--kv-bytes-per-token"),
        (("--plan", "--kv-bytes-per-token", "1000"), 2, "--memory-mib"),
        (("--plan", "--kv-bytes-per-token", "1e6", "--memory-mib", "1"), 1, "hold no slot"),
        (("--html", "no/where.html"), 2, "no/where.html cannot be written"),
        (("--plan", "--memory-mib", "-1"), 2, "is not a number above 0"),
        (("--plan", "--slots-max", "0"), 2, "is not a number from 1 to 64"),
        (("--plan", "--n-ctx-train", "-5"), 2, "is not a number of tokens"),
        (("--memory-mib", "100"), 2, "is for --plan"),
        (("--slots-max", "4"), 2, "is for --plan"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_to_do(
    kvgate: Commands, arguments: tuple[str, ...], status: int, said: str
) -> None:
    found, out, err = kvgate("histogram", *arguments)
    assert (found, out) == (status, "")
    assert said in err
