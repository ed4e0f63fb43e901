"""`kvgate probe` on real engines in health and in each failing state, and on fake ones for the rest."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.e2e.commands import Done, kvgate
from tests.fake_engine import FakeEngine
from tests.fake_engine.families import OVERFLOWN, data

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvgate.lab.engine_process import EngineProcess
    from tests.e2e.conftest import StartEngine, StartGate
    from tests.fake_engine.wire import Exchange, Reply

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def divided(start_engine: StartEngine) -> EngineProcess:
    return start_engine("-c", "512", "-np", "2", "--no-kv-unified")


@pytest.fixture(scope="module")
def unified(start_engine: StartEngine) -> EngineProcess:
    """Two slots that promise 256 tokens each out of 256."""
    return start_engine("-c", "256", "-np", "2", "--kv-unified")


def probe(*arguments: str) -> Done:
    return kvgate("probe", *arguments, "--json")


def verdicts(done: Done) -> list[tuple[str, int, str]]:
    return [(run["target"], run["at_once"], run["verdict"]) for run in done.json["runs"]]


# -- real engines


def test_a_healthy_engine_and_its_gate(divided: EngineProcess, start_gate: StartGate, tmp_path: Path) -> None:
    """The engine ends by context and says so, in every slot; the gate refuses in time and lets in what fits."""
    gate = start_gate(divided.url, flags=["--engine-log", str(divided.log_path)])
    key = tmp_path / "key"
    key.write_text("sk-demo\n")
    done = probe("--upstream", divided.url, "--gate", gate.url, "--key-file", str(key))
    assert done.returncode == 0, done.stdout
    assert verdicts(done) == [
        ("engine", 1, "ends-by-context"),
        ("engine", 2, "ends-by-context"),
        ("gate", 1, "refused-in-time"),
        ("gate", 1, "completes"),
        ("gate", 2, "refused-in-time"),
        ("gate", 2, "completes"),
    ]
    assert {(run["prompt_tokens"], run["n_ctx_slot"]) for run in done.json["runs"]} == {(192, 256)}
    assert "== the engine: 1 of 2 slots" in done.stderr


def test_a_gate_that_clamps_says_so(
    divided: EngineProcess, start_gate: StartGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ["--engine-log", str(divided.log_path)]
    gate = start_gate(divided.url, tenants={"demo": 'on_overflow = "clamp"'}, flags=log)
    monkeypatch.setenv("PROBE_KEY", "sk-demo")
    done = probe("--gate", gate.url, "--key-env", "PROBE_KEY")
    assert (done.returncode, verdicts(done)) == (0, [("gate", 1, "clamped"), ("gate", 2, "clamped")])


def test_a_shared_pool_kills_all_at_once(unified: EngineProcess) -> None:
    """One slot alone is fine, both die together, and what to set is said with the engine's figures."""
    done = probe("--upstream", unified.url)
    assert done.returncode == 1
    assert verdicts(done) == [("engine", 1, "ends-by-context"), ("engine", 2, "killed-together")]
    assert "-c 512 -np 2" in done.json["runs"][1]["to_do"]
    assert done.json["runs"][1]["answers"][0]["problem"] == OVERFLOWN


def test_a_gate_before_the_shared_pool_makes_it_safe(
    unified: EngineProcess, start_gate: StartGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has to wait waits; where nothing may, the probe is turned away, and names the settings."""
    tenants = {"patient": "", "hasty": "queue_max = 0"}
    gate = start_gate(unified.url, tenants=tenants, config='[engine]\nkv_topology = "unified"\n')
    monkeypatch.setenv("PROBE_KEY", "sk-patient")
    patient = probe("--gate", gate.url, "--key-env", "PROBE_KEY")
    assert (patient.returncode, verdicts(patient)[-1]) == (0, ("gate", 2, "completes"))
    monkeypatch.setenv("PROBE_KEY", "sk-hasty")
    hasty = probe("--gate", gate.url, "--key-env", "PROBE_KEY")
    assert (hasty.returncode, verdicts(hasty)[-1]) == (1, ("gate", 2, "turned-away"))
    assert "queue_max" in hasty.json["runs"][-1]["to_do"]


def test_an_engine_that_shifts_its_context_forgets(start_engine: StartEngine) -> None:
    engine = start_engine("-c", "256", "-np", "1", "--context-shift")
    done = probe("--upstream", engine.url)
    assert (done.returncode, verdicts(done)) == (1, [("engine", 1, "forgets")])


@pytest.mark.parametrize("name", ["divided", "unified"])
def test_the_topology_of_an_idle_engine_is_found_out(name: str, request: pytest.FixtureRequest) -> None:
    """And the setting is one that the gate takes."""
    engine = request.getfixturevalue(name)
    done = probe("--upstream", engine.url, "--topology")
    assert done.returncode == 0, done.stderr
    assert (done.json["topology"], done.json["pool_tokens"]) == (name, 512 if name == "divided" else 256)
    assert done.json["setting"] == f'[engine]\nkv_topology = "{name}"'


def test_a_shared_pool_that_is_larger_than_a_slot_is_measured(start_engine: StartEngine) -> None:
    """Its size is found from below, never above what there is."""
    engine = start_engine("-c", "256", "-np", "2", "--kv-unified", "--kv-unified-per-slot", "200")
    done = probe("--upstream", engine.url, "--topology")
    assert (done.returncode, done.json["topology"]) == (0, "unified")
    assert 225 <= done.json["pool_tokens"] <= 256
    assert f"pool_tokens = {done.json['pool_tokens']}" in done.json["setting"]


@pytest.mark.parametrize("more", [(), ("--topology",)])
def test_a_busy_engine_is_left_alone(divided: EngineProcess, more: Sequence[str]) -> None:
    """Its users' answers would be stalled or killed: exit 2, and no request of the probe's own."""
    body = {"prompt": "Once", "n_predict": 200, "ignore_eos": True, "stream": True}
    asked = urllib.request.Request(f"{divided.url}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.readline()  # it runs
        done = probe("--upstream", divided.url, *more)
        assert done.returncode == 2
        assert "is busy (1 slots at work)" in json.loads(done.stderr.splitlines()[-1])["problem"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to ask"),
        (["--upstream", "http://127.0.0.1:1"], "does not answer"),
        (["--gate", "http://127.0.0.1:1", "--key-env", "NO_SUCH_VARIABLE"], "holds no key"),
        (["--gate", "http://127.0.0.1:1", "--topology"], "needs the engine itself"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_exit_2(arguments: list[str], says: str) -> None:
    done = probe(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in json.loads(done.stderr)["problem"]


# -- what a real engine will not do on demand


def answers(pieces: Sequence[str], *, truncated: bool = True, problem: str = "") -> Reply:
    """A completion of these pieces; to a short prompt, the control, always a healthy one."""

    async def reply(exchange: Exchange) -> None:
        body = json.loads(exchange.request.body)
        short = len(body["prompt"]) <= 64
        said = [f" word{at}" for at in range(body["n_predict"])] if short else list(pieces)
        await exchange.begin_stream()
        for piece in said:
            await exchange.chunk(data({"content": piece, "stop": False}))
        if problem and not short:
            await exchange.chunk(data({"error": {"code": 500, "message": problem, "type": "server_error"}}))
        else:
            end = {"content": "", "stop": True, "stop_type": "limit", "truncated": truncated}
            await exchange.chunk(
                data({**end, "tokens_predicted": len(said), "tokens_evaluated": len(body["prompt"])})
            )
        await exchange.end_stream()

    return reply


class Planted:
    """A fake engine of 512 tokens a slot in a thread of its own, that answers long prompts as it is told."""

    def __init__(self, reply: Reply) -> None:
        self.engine = FakeEngine(n_ctx=512, total_slots=2)
        self.engine.always["/completion"] = reply
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        async with self.engine:
            self._listening.set()
            await self._over.wait()

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        assert self._listening.wait(20)
        return self.engine

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()


WORDS = tuple(f" word{at}" for at in range(128))


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (answers([" and", " so", " on"] * 43), "loops"),
        (answers([]), "truncates-at-once"),
        (answers(["\n"] * 128), "truncates-at-once"),
        (answers(WORDS[:3], truncated=False), "truncates-at-once"),
        (answers(WORDS[:60], truncated=False), "ends-early"),
        (answers(WORDS, truncated=False), "ends-by-context-silently"),
        (answers(WORDS[:20], problem="out of memory"), "aborts"),
    ],
    ids=["loops", "silence", "nonsense", "cut", "early", "silent-end", "aborts"],
)
def test_a_planted_fault_is_caught(reply: Reply, verdict: str) -> None:
    """The planted looping engine among them: exit 1, and what to set."""
    with Planted(reply) as engine:
        done = probe("--upstream", engine.url)
    assert done.returncode == 1, done.stdout
    first = done.json["runs"][0]
    assert first["verdict"] == verdict
    assert first["to_do"] != "nothing"


def test_a_slow_engine_is_told() -> None:
    """Slow is what the operator calls slow."""
    with Planted(answers(WORDS)) as engine:
        assert probe("--upstream", engine.url).returncode == 0
        done = probe("--upstream", engine.url, "--tokens-per-second-min", "1e8")
    assert (done.returncode, {verdict for *_, verdict in verdicts(done)}) == (1, {"slow"})


def test_sentences_for_people() -> None:
    with Planted(answers(WORDS[:20], problem=OVERFLOWN)) as engine:
        done = kvgate("probe", "--upstream", engine.url)
    assert done.returncode == 1
    assert "engine, 2 at once, 384 + 256 tokens: killed-together: " in done.stdout
    assert f"  it said: {OVERFLOWN}" in done.stdout
    assert "  to do: start the engine with -c 1024 -np 2" in done.stdout
