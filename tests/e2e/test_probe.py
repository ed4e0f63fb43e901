"""`kvgate probe` on real engines in health and in each failing state, and on fake ones for the rest."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.commands import Done, kvgate
from tests.e2e.middleman import Middleman
from tests.fake_engine import FakeEngine
from tests.fake_engine.families import OVERFLOWN, data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
    by_engine = [one for run in done.json["runs"][:2] for one in run["answers"]]
    assert {(one["prompt_tokens"], one["output_tokens"]) for one in by_engine} == {(192, 64)}
    assert "== the engine: 1 of 2 slots" in done.stderr


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
    """Who has to wait waits, and is clamped aloud."""
    config = '[engine]\nkv_topology = "unified"\n'
    gate = start_gate(unified.url, tenants={"demo": 'on_overflow = "clamp"'}, config=config)
    monkeypatch.setenv("PROBE_KEY", "sk-demo")
    done = probe("--gate", gate.url, "--key-env", "PROBE_KEY")
    assert (done.returncode, verdicts(done)) == (0, [("gate", 1, "clamped"), ("gate", 2, "clamped")])


def test_a_gate_that_lets_nobody_wait_turns_the_probe_away(
    start_gate: StartGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to set is said; of a key that is none nothing can be told at all."""
    reply = answers(WORDS[:64])
    with Planted(reply) as engine:
        engine.n_ctx = 256
        config = '[engine]\nkv_topology = "unified"\n'
        gate = start_gate(engine.url, tenants={"hasty": "queue_max = 0"}, config=config)
        engine.always["/completion"] = slowly(reply)
        monkeypatch.setenv("PROBE_KEY", "sk-hasty")
        done = probe("--gate", gate.url, "--key-env", "PROBE_KEY")
        monkeypatch.setenv("PROBE_KEY", "sk-nobody")
        stranger = probe("--gate", gate.url, "--key-env", "PROBE_KEY")
    assert (done.returncode, verdicts(done)[-1]) == (1, ("gate", 2, "turned-away")), done.stdout
    assert "queue_max" in done.json["runs"][-1]["to_do"]
    assert (stranger.returncode, stranger.stdout) == (2, "")


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
        (["--upstream", "http://127.0.0.1:1", "--topology", "--recall"], "two probes"),
        (["--upstream", "http://127.0.0.1:1", "--context-tokens", "512"], "is for --recall"),
        (["--upstream", "http://127.0.0.1:1", "--recall"], "does not answer"),
        (["--upstream", "http://127.0.0.1:1", "--soak", "1"], "does not answer"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_exit_2(arguments: list[str], says: str) -> None:
    done = probe(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in json.loads(done.stderr)["problem"]


# -- recall

RECALL = ("--recall", "--context-tokens", "72")


async def asked_through(engine: EngineProcess, change: Callable[[list[int]], list[int]]) -> Done:
    """`--recall` of an engine that sees another prompt than it is sent."""

    def forget(path: str, body: bytes) -> bytes:
        said = json.loads(body) if path == "/completion" else {}
        return json.dumps(said | {"prompt": change(said["prompt"])}).encode() if said else body

    async with Middleman(engine.url) as between:
        between.asked = forget
        return await asyncio.to_thread(probe, "--upstream", between.url, *RECALL)


async def test_a_needle_is_found_at_every_depth(divided: EngineProcess) -> None:
    """Also by a model of 135 million parameters: copying is what it can."""
    done = await asked_through(divided, lambda prompt: prompt)
    assert (done.returncode, done.json["verdict"]) == (0, "recalls"), done.stdout
    assert done.json["nats_near"] - done.json["nats_without"] > 1
    assert [found["depth"] for found in done.json["depths"]] == [0, 0.25, 0.5, 0.75, 0.9]


async def test_an_engine_that_loses_the_beginning_forgets(divided: EngineProcess) -> None:
    """The near needle is found, those at the beginning are not: exit 1, and which depths."""
    done = await asked_through(divided, lambda prompt: prompt[len(prompt) // 2 :])
    assert (done.returncode, done.json["verdict"]) == (1, "forgets"), done.stdout
    shares = {found["depth"]: found["recalled"] for found in done.json["depths"]}
    assert shares[0] < 0.5 < shares[0.9]


async def test_without_the_positive_control_there_is_no_verdict(divided: EngineProcess) -> None:
    """An engine that sees the question alone is blind: exit 2, whatever stands at the depths."""
    done = await asked_through(divided, lambda prompt: prompt[-6:])
    assert (done.returncode, done.json["verdict"], done.json["ok"]) == (2, "blind", None)


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


def slowly(reply: Reply) -> Reply:
    """The same, half a second later: two that are asked at once run at once."""

    async def later(exchange: Exchange) -> None:
        await asyncio.sleep(0.5)
        await reply(exchange)

    return later


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


# -- soak


def soaked(reply: Reply, *more: str, minutes: float = 0.05) -> Done:
    with Planted(reply) as engine:
        return probe("--upstream", engine.url, "--soak", str(minutes), *more)


HOARDER: Final = "import sys\nkept = []\nfor line in sys.stdin: kept.append(b'x' * int(line))"
"""A small process that keeps as many bytes as each line says: what the tests' own takes is nobody's to predict."""


def paced(round_s: float, hoarder: subprocess.Popen[str], hoarded_bytes: int) -> Reply:
    """Healthy answers, no faster than so; the hoarder keeps so much of each."""
    healthy = answers(WORDS)

    async def reply(exchange: Exchange) -> None:
        print(hoarded_bytes, file=hoarder.stdin, flush=True)
        await asyncio.sleep(round_s)
        await healthy(exchange)

    return reply


@pytest.mark.parametrize(("hoarded_mib", "drifts"), [(0, False), (12, True)])
def test_memory_that_grows_with_every_round_is_a_drift(hoarded_mib: int, *, drifts: bool) -> None:
    """And memory that does not is none. How fast a fake engine answers says nothing, so speed may do as it likes."""
    with subprocess.Popen([sys.executable, "-c", HOARDER], stdin=subprocess.PIPE, text=True) as hoarder:
        reply = paced(0.2, hoarder, hoarded_mib * 2**20)
        done = soaked(reply, "--pid", str(hoarder.pid), minutes=0.08)
    found = done.json
    assert len(found["rounds"]) >= 7
    assert ("memory" in {one["what"] for one in found["drifts"]}) == drifts, found["rounds"]
    assert done.returncode == (1 if found["drifts"] else 0)


def test_a_bad_verdict_fails_a_soak_however_short() -> None:
    assert soaked(answers(WORDS[:3], truncated=False), minutes=0.0001).returncode == 1


def dying(engine: FakeEngine, healthy_answers: int) -> Reply:
    """Healthy at first; then an answer breaks off, and nothing is answered any more."""
    left = [healthy_answers]

    async def reply(exchange: Exchange) -> None:
        left[0] -= 1
        engine.loading = left[0] < 0
        await answers(WORDS[:20], problem="out of memory")(exchange) if engine.loading else await healthy(exchange)

    healthy = answers(WORDS)
    return reply


def test_an_engine_that_dies_under_a_soak_fails_it() -> None:
    """The rounds before are told, and the one that it died of."""
    with Planted(answers(WORDS)) as engine:
        engine.always["/completion"] = dying(engine, 2)
        done = probe("--upstream", engine.url, "--soak", "5")
    assert (done.returncode, done.json["verdicts"]) == (1, ["ends-by-context"] * 2 + ["aborts"])
    assert "/slots" in done.json["stopped"]


def test_an_engine_that_dies_of_the_admission_test_fails_it() -> None:
    with Planted(answers(WORDS)) as engine:
        engine.always["/completion"] = dying(engine, 1)  # the short prompt before
        done = probe("--upstream", engine.url)
    assert (done.returncode, [one for *_, one in verdicts(done)]) == (1, ["aborts"])


def test_a_soak_of_a_real_engine_watches_its_process(divided: EngineProcess) -> None:
    """One round is too few to tell a drift: exit 2, and the rounds all the same."""
    done = probe("--upstream", divided.url, "--soak", "0.0001")
    assert (done.returncode, done.json["verdicts"]) == (2, ["ends-by-context"])
    assert done.json["rounds"][0]["memory_mib"] > 50
    assert done.json["rounds"][0]["tokens_per_second"] > 0
