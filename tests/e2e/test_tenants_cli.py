"""Tenants and keys while gates run: what a command changes, every gate on the store follows within a second."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.ask import chat, post
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.conftest import RunningGate, StartGate

PROMISED_S = 1.0
SLACK_S = 9.0
"""On top of what is promised, for busy machines; the contract tests hold the store's side to a second."""


@dataclass
class Fleet:
    """Two gates in front of two engines, one store, one tenants file; and the commands at that store."""

    gates: list[RunningGate]
    directory: Path

    @property
    def tenants(self) -> Path:
        return self.directory / "tenants.toml"

    async def kvgate(self, *arguments: str, stdin: str = "", status: int = 0) -> dict[str, Any]:
        """A command's answer."""
        command = [sys.executable, "-m", "kvgate", *arguments, "--config", "kvgate.toml", "--json"]
        done = await asyncio.to_thread(
            lambda: subprocess.run(
                command, cwd=self.directory, input=stdin, capture_output=True, text=True, timeout=60, check=False
            )
        )
        assert done.returncode == status, done.stderr
        answer: dict[str, Any] = json.loads(done.stderr if status else done.stdout)
        return answer

    async def follow(self, key: str, status: int) -> None:
        """Ask every gate with this key until each answers so, as it must soon."""
        begun = time.monotonic()

        async def one(gate: RunningGate) -> None:
            while (answer := await post(gate.url, chat(max_tokens=1), key=key)).status != status:
                assert time.monotonic() - begun < PROMISED_S + SLACK_S, answer
                await asyncio.sleep(0.02)

        await asyncio.gather(*map(one, self.gates))


@asynccontextmanager
async def running(start_gate: StartGate, directory: Path, tenants: str) -> AsyncIterator[Fleet]:
    (directory / "tenants.toml").write_text(tenants)
    (directory / "kvgate.toml").write_text(f'tenants = "{directory / "tenants.toml"}"\n')
    flags = ["--config", str(directory / "kvgate.toml"), "--tenants", str(directory / "tenants.toml")]
    async with FakeEngine(n_ctx=512) as one, FakeEngine(n_ctx=512) as two:
        gates = [await asyncio.to_thread(start_gate, engine.url, flags=flags) for engine in (one, two)]
        yield Fleet(gates, directory)
        for gate in gates:
            await asyncio.to_thread(gate.stop)


async def test_a_key_works_and_is_refused_on_every_gate_within_a_second(
    start_gate: StartGate, tmp_path: Path
) -> None:
    """Made, then revoked by its ID; made again, then revoked as a leaked key by itself."""
    async with running(start_gate, tmp_path, "[tenant.acme]\n") as fleet:
        assert any("kvgate keys create" in warning for warning in fleet.gates[0].ready()["warnings"])
        for way in ("id", "itself"):
            made = await fleet.kvgate("keys", "create", "acme", "--label", way)
            await fleet.follow(made["key"], 200)
            if way == "id":
                await fleet.kvgate("keys", "revoke", made["id"])
            else:
                await fleet.kvgate("keys", "revoke", "-", stdin=made["key"])
            await fleet.follow(made["key"], 401)
            answer = await fleet.kvgate("keys", "revoke", made["id"], status=1)
            assert "revoked already" in answer["problem"]
            logs = "".join(gate.log_path.read_text() for gate in fleet.gates)
            assert made["key"] not in logs
        assert (await fleet.kvgate("keys", "list"))["keys"] == []


async def test_a_tenants_file_is_applied_by_a_command_or_a_gate_alike(start_gate: StartGate, tmp_path: Path) -> None:
    """Whoever is first: the same owner, the same tenants; minted keys outlive every application but a removal."""
    async with running(start_gate, tmp_path, "[tenant.acme]\n") as fleet:
        made = await fleet.kvgate("keys", "create", "acme")
        await fleet.follow(made["key"], 200)
        fleet.tenants.write_text("[tenant.acme]\ncontext_tokens_max = 8\n")
        await fleet.kvgate("tenants", "apply")
        await fleet.follow(made["key"], 400)
        fleet.tenants.write_text("[tenant.acme]\n")  # the gates see it by themselves
        await fleet.follow(made["key"], 200)
        assert (await fleet.kvgate("tenants", "apply"))["changed"] == {}
        fleet.tenants.write_text("[tenant.beta]\n")
        await fleet.follow(made["key"], 401)
        assert (await fleet.kvgate("keys", "list"))["keys"] == []


async def test_a_dry_run_knows_what_the_gates_have_seen(start_gate: StartGate, tmp_path: Path) -> None:
    """Requests to any gate, admitted or rejected, are replayed under the limits of the file; nothing is written."""
    async with running(start_gate, tmp_path, "[tenant.acme]\n[tenant.quiet]\n") as fleet:
        made = await fleet.kvgate("keys", "create", "acme")
        await fleet.follow(made["key"], 200)
        before = len(fleet.gates)  # each has let one in
        for gate in fleet.gates:
            for output in (10, 100, 200):
                answer = await post(gate.url, chat(max_tokens=output), key=made["key"])
                assert answer.status == 200
            assert (await post(gate.url, chat(max_tokens=5000), key=made["key"])).status == 400
            assert (await post(gate.url, b"{", key=made["key"])).status == 400
        deadline = time.monotonic() + 20
        while (shown := await fleet.kvgate("tenants", "show", "acme"))["recent_requests"] < before + 8:
            assert time.monotonic() < deadline, shown
        prompt = int(
            (await post(fleet.gates[0].url, chat(max_tokens=1), key=made["key"])).headers["x-kvgate-prompt-tokens"]
        )
        await asyncio.to_thread(fleet.gates[0].stop)  # what a gate has not yet written it writes at its end
        await asyncio.to_thread(fleet.gates[1].stop)
        limit = f"context_tokens_max = {prompt + 100}\n"
        fleet.tenants.write_text(f"[tenant.acme]\n{limit}[tenant.quiet]\n{limit}")
        tried = await fleet.kvgate("tenants", "apply", "--dry-run")
        replay = tried["replay"]["acme"]
        assert replay["requests"] == before + 9
        assert replay["now"] == {
            "would_reject": 2,
            "reasons": {"generation_overflow": 2},
            "would_clamp": 0,
            "would_trim": 0,
            "prompt_tokens_max": prompt,
        }
        assert replay["then"]["reasons"] == {"generation_overflow": 4}
        assert tried["replay"]["quiet"]["requests"] == 0
        assert (await fleet.kvgate("tenants", "show", "acme"))["settings"]["context_tokens_max"] is None
