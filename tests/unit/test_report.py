"""kvgate report: what is kept of a request, for people, for programs and for an issue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.cli.report import markdown, rows_of, sentences
from kvgate.store.client import connect
from kvgate.store.reports import Reports, report_of
from tests.contract.test_reports import FULL, RECORD, record
from tests.unit.test_tenants_cli import Commands

if TYPE_CHECKING:
    from pathlib import Path

    from kvgate.ports import RequestRecord


@pytest.fixture
def kvgate(
    server: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Commands:
    monkeypatch.chdir(tmp_path)
    return Commands(capsys, "--store", server)


def keep(server: str, *records: RequestRecord) -> None:
    async def write() -> None:
        async with connect(server) as client:
            reports = Reports(client)
            for one in records:
                reports.request(one)
            await reports.flush()

    asyncio.run(write())


def rows(one: RequestRecord) -> dict[str, str]:
    return dict(rows_of(report_of(one, 1_700_000_000.0)))


def test_a_report_says_all_that_a_bad_answer_needs() -> None:
    told = rows(FULL)
    assert told["request"] == "r1, ended 2023-11-14T22:13:20Z, tenant acme"
    assert told["verdict"] == "trim (prompt_overflow), status 200; why"
    assert "1024 tokens a slot (n_ctx_slot, from props), 2 slots" in told["context"]
    assert told["KV precision"] == "unknown"
    assert told["prefix reuse"] == "off; 3 tokens of the prompt came from a cache, although it was off"
    assert told["prompt"] == "900 tokens, counted by engine"
    assert told["trimmed"] == "1000 tokens, 4 messages (oldest-first)"
    assert told["output"] == "500 asked, room for 124, limit 100"
    assert told["usage"] == "900 prompt, 100 output tokens; +2 against the count"
    assert told["ended by"] == (
        "length; cut short by the context (slot), not by the client's own limit; stopped by the loop guard (line); "
        "the client left"
    )
    assert told["timings"] == "waited 250.0 ms, answer began after 500.0 ms, 100.0 ms in all"


def test_a_request_that_came_not_far_has_a_report_too() -> None:
    told = rows(record("r", status=400, verdict="", reason="malformed", detail="messages"))
    assert told["verdict"] == "none: it was not judged (malformed), status 400; messages"
    assert told["engine"].startswith("not known") == told["prompt"].startswith("not known") is True
    assert told["ended by"] == "refused"


@pytest.mark.parametrize("one", [FULL, RECORD])
def test_a_report_can_be_pasted_into_an_issue(one: RequestRecord) -> None:
    """Every line is a row of two cells, whatever an engine calls its build."""
    lines = markdown({**report_of(one, 0.0), "detail": "a | b `c`"})
    assert lines[1] == "|---|---|"
    assert all(line.replace("\\|", "").count("|") == 3 and "\n" not in line for line in lines)
    assert len(lines) == 2 + len(sentences(report_of(one, 0.0)))


def test_the_command_finds_it(kvgate: Commands, server: str) -> None:
    keep(server, FULL, record("twice"), record("twice", status=499))
    status, out, err = kvgate("report", "r1")
    assert (status, err) == (0, "")
    assert "n_ctx_slot" in out
    found: Any = kvgate.json("report", "r1")["reports"]
    assert found[0]["engine"]["fingerprint"] == FULL.profile.fingerprint  # type: ignore[union-attr]
    assert kvgate("report", "r1", "--markdown")[1].startswith("| kvgate report | |\n|---|---|\n| request | r1")
    status, out, err = kvgate("report", "twice")
    assert (out.count("request  "), err) == (2, "2 requests came with this id, the last one first\n")


def test_an_unknown_id_is_a_clear_no(kvgate: Commands) -> None:
    """With what the id is and how long it is kept; a key that was pasted in its place is not repeated."""
    status, out, err = kvgate("report", "sk-kvg-abcdefghijklmnop")
    assert (status, out) == (1, "")
    assert err.startswith("kvgate report: nothing is kept of a request 'sk-...' in the store unix:")
    assert "x-request-id" in err
    assert "[report] keep_s" in err
