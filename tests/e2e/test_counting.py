"""Every proof counts as the engine does, on real engines under three templates; one that would not is noticed."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvgate.core.counting import Proof
from kvgate.core.profile import KvSettings, Topology
from kvgate.dialects.openai_chat import OpenAiChat
from kvgate.engines.llamacpp import CountingSettings, LlamaCpp, LlamaCppSettings
from kvgate.engines.llamacpp.vocabulary import tokenizer_json_of
from kvgate.ports import Refused
from tests.e2e.ask import chat, post
from tests.e2e.conversations import conversations
from tests.e2e.middleman import Middleman

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kvgate.lab.engine_process import EngineProcess
    from kvgate.ports import Counted
    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

COUNTER = "/v1/chat/completions/input_tokens"
TEMPLATES = Path(__file__).parent / "templates"
FLAGS = (
    "-c",
    "8192",
    "-np",
    "2",
    "--no-kv-unified",
    "--no-cache-prompt",
    "--cache-ram",
    "0",
    "--no-cache-idle-slots",
    "--alias",
    "smollm2-135m",
)
REQUESTS = 2000
ANSWERED = 150
CONFIG = '[engine]\nkv_topology = "divided"\n'
TENANTS = {"demo": "", "cells": "kv_tokens_max = 16384"}
"""A tenant that pays in cells is never admitted by a bound."""


@dataclass
class Templated:
    """An engine that was started on one of the templates."""

    name: str
    process: EngineProcess

    @property
    def proofs(self) -> set[str]:
        """What must hold on it: strict roles and re-rendered turns leave the bound unproved."""
        return {"bound", "sum", "tokenizer", "engine"} - (set() if self.name == "own" else {"bound"})

    def truth(self, line: http.client.HTTPConnection, body: bytes) -> int | None:
        """The engine's own count, None where it refuses the body."""
        line.request("POST", COUNTER, body, {"Content-Type": "application/json"})
        answer: dict[str, int] = json.loads(line.getresponse().read())
        return answer.get("input_tokens")


@pytest.fixture(scope="module", params=["own", "strict", "tools"])
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> Iterator[Templated]:
    name = request.param
    flags = (
        FLAGS
        if name == "own"
        else (*FLAGS, "--jinja", "--chat-template-file", str(TEMPLATES / f"counting_{name}.jinja"))
    )
    process = start_engine(*flags)
    yield Templated(name, process)
    process.stop()


@dataclass
class Counting:
    """kvgate's own side of one engine, in this process."""

    engine: LlamaCpp
    dialect: OpenAiChat

    async def count(self, body: bytes) -> Counted | None:
        """The count, None where the body is refused."""
        try:
            return await self.engine.count("openai_chat", self.dialect.read(body), body)
        except Refused:
            return None

    async def bound(self, body: bytes) -> Counted | None:
        return await self.engine.bound("openai_chat", self.dialect.read(body), body)

    def in_force(self) -> set[str]:
        return {standing.proof.value for standing in self.engine.proofs() if standing.in_force}

    def why_not(self, proof: Proof) -> str:
        return next(standing.reason for standing in self.engine.proofs() if standing.proof is proof)


async def counting(url: str, vocabulary: Path | None = None) -> Counting:
    settings = LlamaCppSettings(KvSettings(Topology.DIVIDED), counting=CountingSettings(vocabulary=vocabulary))
    found = Counting(LlamaCpp(url, settings, time.monotonic), OpenAiChat())
    await found.engine.discover()
    await found.engine.proofs_settled()
    return found


@pytest.fixture
async def here(engine: Templated) -> AsyncIterator[Counting]:
    found = await counting(engine.process.url)
    yield found
    await found.engine.close()


@pytest.fixture(scope="module")
def foreign(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabulary of another model: this one's, with its rarest tokens in another order."""
    document = json.loads(tokenizer_json_of(model))
    vocab = document["model"]["vocab"]
    rare = [token for token, at in vocab.items() if at >= 40_000]
    vocab.update(zip(rare, reversed([vocab[token] for token in rare]), strict=True))
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.timeout(600)
async def test_every_proof_counts_as_the_engine_does(engine: Templated, here: Counting) -> None:
    """2,000 generated requests of growing conversations, a third on each template: not one token beside the truth.

    A body that the engine's counter refuses is refused here too. The vocabulary alone, without the sum, must agree
    too, and a bound must hold.
    """
    assert here.in_force() == engine.proofs
    line = http.client.HTTPConnection("127.0.0.1", engine.process.port, timeout=60)
    wrong, by = [], Counter[str]()
    proofs = here.engine._counts._proofs
    assert proofs is not None
    for at, request in enumerate(
        conversations(REQUESTS // 3 + 1, seed=["own", "strict", "tools"].index(engine.name))
    ):
        body = json.dumps(request).encode()
        truth = engine.truth(line, body)
        found, bound = await here.count(body), await here.bound(body)
        if (None if found is None else found.prompts) != (None if truth is None else (truth,)):
            wrong.append((at, found and found.prompts, found and found.proof.value, truth))
        if found is not None:
            by[found.proof.value] += 1
        if bound is not None and truth is not None:
            by["bound"] += 1
            assert truth <= bound.prompts[0]
        chat_ = here.engine._counts._plain(OpenAiChat().read(body))
        if chat_ is not None and proofs.takes(chat_) and truth is not None:
            tokenized = await here.engine._counts._tokenized(proofs, chat_)
            assert tokenized is None or tokenized.prompts == (truth,)
    line.close()
    assert wrong == []
    assert by["sum"] > REQUESTS // 3 * 0.6
    assert (by["bound"] > REQUESTS // 3 * 0.6) == (engine.name == "own")


@pytest.fixture(scope="module")
def gate(engine: Templated, start_gate: StartGate) -> Iterator[RunningGate]:
    found = start_gate(engine.process.url, tenants=TENANTS, config=CONFIG)
    wait_for(found, engine.proofs)
    yield found
    found.stop()


def wait_for(gate: RunningGate, proofs: set[str]) -> None:
    """Return once these proofs are in force, and no others."""
    deadline = time.monotonic() + 60
    while (found := in_force(gate)) != proofs:
        if time.monotonic() > deadline:
            raise AssertionError(f"in force: {found}, not {proofs}: {gate.status()['counting']}")
        time.sleep(0.1)


def in_force(gate: RunningGate) -> set[str]:
    return {standing["proof"] for standing in gate.status()["counting"] if standing["in_force"]}


@pytest.mark.timeout(600)
async def test_usage_is_what_was_counted(engine: Templated, gate: RunningGate) -> None:
    """150 generated requests, run through the gate to their usage, a third on each template: no drift."""
    by = Counter[str]()
    asked = 0
    for request in conversations(400, seed=20):
        if len(json.dumps(request)) > 450 or asked == ANSWERED // 3:  # the engine has one thread to read them all
            continue
        answer = await post(gate.url, request | {"max_tokens": 1}, key=("sk-demo", "sk-cells")[asked % 2])
        if answer.status != 200:
            assert answer.headers.get("x-kvgate-reason") == "uncounted"
            continue
        asked += 1
        proof, usage = answer.headers["x-kvgate-count"], answer.json["usage"]["prompt_tokens"]
        by[proof] += 1
        if proof == "bound":
            assert usage <= int(answer.headers["x-kvgate-prompt-tokens-max"])
        else:
            assert usage == int(answer.headers["x-kvgate-prompt-tokens"])
    assert asked == ANSWERED // 3
    assert gate.metric("kvgate_count_drift_total") == 0
    assert in_force(gate) == engine.proofs
    assert set(by) >= ({"bound", "sum"} if engine.name == "own" else {"sum"})
    assert gate.metric("kvgate_counts_total", proof="sum") >= by["sum"]


async def test_explain_says_what_serving_says(engine: Templated, gate: RunningGate, tmp_path: Path) -> None:
    """The command asks the running gate: the same verdict and figures as the answer's; nothing run or logged."""
    secret = "what nobody may read in a log"
    for fields, code in (({"max_tokens": 1}, 0), ({"max_tokens": 100_000}, 1)):
        body = chat(secret, **fields)
        (tmp_path / "body.json").write_text(json.dumps(body))
        command = [
            sys.executable,
            "-m",
            "kvgate",
            "explain",
            str(tmp_path / "body.json"),
            "--tenant",
            "demo",
            "--json",
        ]
        served = gate.metric("kvgate_requests_total")
        done = await asyncio.to_thread(
            subprocess.run, [*command, "--admin", gate.admin_url], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert gate.metric("kvgate_requests_total") == served
        found, answer = json.loads(done.stdout), await post(gate.url, body)
        assert found["verdict"] == answer.headers["x-kvgate-verdict"]
        assert found["proof"] == answer.headers["x-kvgate-count"]
        figure = "x-kvgate-prompt-tokens" + ("-max" if found["proof"] == "bound" else "")
        assert found["prompt_tokens"] == int(answer.headers[figure])
        if code:
            assert found["output_tokens_max"] == answer.error["usable_generation"]
            assert found["message"] == answer.error["message"]
    assert secret not in gate.log_path.read_text()


# -- planted errors


async def test_a_planted_template_is_noticed_by_the_probe(engine: Templated) -> None:
    """`/props` shows another template than the engine applies: nothing that rests on it is believed."""

    def answered(path: str, body: bytes) -> bytes:
        if path != "/props":
            return body
        props = json.loads(body)
        props["chat_template"] = props["chat_template"].replace("<|im_end|>", "<|im_end|> ")
        return json.dumps(props).encode()

    async with Middleman(engine.process.url) as middle:
        middle.answered = answered
        here = await counting(middle.url)
        assert here.in_force() == {"tokenizer", "engine"}
        assert "as the engine renders it" in here.why_not(Proof.SUM)
        body = json.dumps(chat("hello")).encode()
        found = await here.count(body)
        assert found is not None
        assert found.proof is Proof.ENGINE
        await here.engine.close()


async def test_a_planted_vocabulary_is_noticed_by_the_probe(engine: Templated, foreign: Path) -> None:
    """The tokenizer is off, the sum goes on with the engine's own, and every count is right."""
    here = await counting(engine.process.url, foreign)
    assert here.in_force() == engine.proofs - {"tokenizer"}
    assert here.why_not(Proof.TOKENIZER) == "tokenizer.json does not tokenize as the engine does"
    line = http.client.HTTPConnection("127.0.0.1", engine.process.port, timeout=60)
    for request in conversations(60, seed=5):
        body = json.dumps(request).encode()
        found, truth = await here.count(body), engine.truth(line, body)
        assert (found and found.prompts[0]) == truth
    line.close()
    await here.engine.close()


async def test_an_engine_that_starts_to_render_otherwise_is_noticed_by_its_usage(
    engine: Templated, start_gate: StartGate
) -> None:
    """A change that no probe saw: each answer takes the proof that erred, until the one that is right counts."""
    changed = False

    def asked(path: str, body: bytes) -> bytes:
        if not changed or path not in {COUNTER, "/v1/chat/completions"}:
            return body
        document = json.loads(body)
        document["messages"][-1]["content"] += " And say please."
        return json.dumps(document).encode()

    async with Middleman(engine.process.url) as middle:
        middle.asked = asked
        gate = await asyncio.to_thread(start_gate, middle.url, tenants=TENANTS, config=CONFIG)
        await asyncio.to_thread(wait_for, gate, engine.proofs)
        changed = True
        seen = []
        for _ in range(4):
            answer = await post(gate.url, chat("Say hello.", max_tokens=1), key="sk-cells")
            assert answer.status == 200
            seen.append(answer.headers["x-kvgate-count"])
        assert seen == ["sum", "tokenizer", "engine", "engine"]
        found = await asyncio.to_thread(in_force, gate)
        assert found == engine.proofs - {"sum", "tokenizer"}
        for proof, errors in (("sum", 1), ("tokenizer", 1), ("engine", 0)):
            assert await asyncio.to_thread(gate.metric, "kvgate_count_drift_total", proof=proof) == errors
        logged = [
            line for line in gate.log_lines() if line["logger"] == "kvgate.counting" and line["level"] == "error"
        ]
        assert [line["proof"] for line in logged] == ["sum", "tokenizer"]
        assert "sum any more" in " ".join((await asyncio.to_thread(gate.ready))["warnings"])
        await asyncio.to_thread(gate.stop)
