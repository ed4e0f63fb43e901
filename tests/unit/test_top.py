"""kvgate top shows what the ledger holds, and says what to do where it cannot."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.cli import main
from kvgate.cli.top import frame

if TYPE_CHECKING:
    from collections.abc import Iterator

STATUS: dict[str, Any] = {
    "engine": {
        "kv_type": "q8_0",
        "profile": {
            "models": ["small", "s"],
            "n_ctx_slot": {"value": 1024, "source": "props"},
            "topology": {"value": "unified", "source": "log"},
            "build": "b1",
        },
    },
    "ledger": {
        "pool": {"tokens": 2048, "slots": 4},
        "held_tokens": 1025,
        "running": 2,
        "draining": 1,
        "waiting": 3,
        "running_by_tenant": [["ann", 1], ["bob", 1]],
        "waiting_by_tenant": [["cyd", 3]],
        "held_tokens_by_tenant": [["ann", 1000], ["bob", 25]],
        "drains_overdue": 0,
    },
    "problems": [],
    "warnings": ["look here"],
}


def test_a_frame_shows_slots_tokens_tenants_and_queue() -> None:
    lines = frame(STATUS, 200, 10).splitlines()
    assert lines[0] == "engine: small, n_ctx_slot 1024, KV q8_0, unified (log), build b1"
    assert lines[2].endswith("3 of 4, 1 of them draining")
    assert lines[3].endswith("1,025 of 2,048 tokens")
    assert lines[3].count("#") == 13  # more than half is more than half of the bar
    assert lines[4] == "queue    3 waiting"
    assert [line.split() for line in lines[7:10]] == [
        ["ann", "1", "1,000", "0"], ["bob", "1", "25", "0"], ["cyd", "0", "0", "3"],
    ]  # fmt: skip
    assert lines[-1] == "! look here"


def test_a_small_terminal_gets_what_fits() -> None:
    """The heaviest tenants first, the others as a number; no line is wider than the terminal."""
    text = frame(STATUS, 30, 1)
    assert "ann" in text
    assert "bob" not in text
    assert "and 2 more" in text
    assert max(len(line) for line in text.splitlines()) == 30


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"ledger": None}, "nothing was asked yet"), ({"engine": None}, "engine: not reached yet")],
)
def test_a_gate_at_its_start_has_little_to_show(changes: dict[str, Any], said: str) -> None:
    assert said in frame({**STATUS, **changes}, 80, 5)


def test_service_is_shown_against_weight_and_the_gap_against_its_bound() -> None:
    """While there are two to be fair between; a gate of another version tells nothing of it."""
    one = {"service_share": 0.25, "weight_share": 1 / 3}
    fairness = {
        "tenants": {"ann": one, "cyd": one},
        "gap": 40.0,
        "gap_max": 100.5,
        "gap_bound": 8192.0,
        "void": ["tiers"],
        "oldest_wait_s": 2.5,
    }
    text = frame({**STATUS, "fairness": fairness}, 200, 10)
    assert "gap 40, largest 100 of 8,192 tokens (not promised since: tiers); oldest waits 2.5 s" in text
    assert [line.split()[-3:] for line in text.splitlines() if line.startswith("ann")] == [["25%", "of", "33%"]]


def test_an_idle_gate_says_so() -> None:
    ledger = {**STATUS["ledger"], "running_by_tenant": [], "waiting_by_tenant": [], "held_tokens_by_tenant": []}
    assert "nobody holds anything" in frame({**STATUS, "ledger": ledger}, 80, 5)


@pytest.fixture
def admin() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(STATUS if self.path == "/status" else {"x": 1}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_one_look(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the output is no terminal, one is all; as JSON it is the status, and that it was had."""
    assert main(["top", "--admin", admin]) == 0
    assert "1,025 of 2,048 tokens" in capsys.readouterr().out
    assert main(["top", "--admin", admin, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, **STATUS}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:1", "Is a gate running"),
        ("127.0.0.1:8601", "must look like http://host:port"),
        ("{admin}/x?", "is no gate's"),
    ],
)
def test_what_cannot_be_looked_at_is_said(
    admin: str, capsys: pytest.CaptureFixture[str], address: str, said: str
) -> None:
    assert main(["top", "--admin", address.format(admin=admin)]) == 2
    assert said in capsys.readouterr().err
    assert main(["top", "--json", "--admin", address.format(admin=admin)]) == 2
    told = json.loads(capsys.readouterr().err)
    assert (told["ok"], said in told["problem"]) == (None, True)
