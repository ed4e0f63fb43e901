"""Measures a running llama-server: how fast it reads prompts, how long a step takes, how a prefill stalls others.

    python -m loadtests.simulate calibrate URL [--save FILE]

The engine must be idle, and nobody else may use it meanwhile; a few hundred tokens a slot are asked of it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvgate.engines.llamacpp import LlamaCpp, LlamaCppSettings
from kvgate.ports import Refused
from loadtests.simulate.engine import EngineModel
from loadtests.simulate.speed import Engine, Speed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgate.core.pool import KvPool
    from kvgate.core.profile import KvSettings

CALL_TIMEOUT_S: Final = 600.0
SHORT_TOKENS: Final = 8
STEPS: Final = 32
LONG_TOKENS_MAX: Final = 4096
NOISY_ROUNDS: Final = 5
"""So many times the rounds are taken at most, where something else uses the machine."""

BURST_ROUNDS: Final = 4
VOCABULARY: Final = (100, 30_000)
"""Token ids that every usual vocabulary has, as prompts that no cache has seen."""


class CalibrationError(Exception):
    """The engine cannot be measured; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Args:
        stall_s: the longest wait for a token of a running sequence while a prompt of `stall_tokens` was read beside
            it; None where the engine has one slot.
        stall_told_s: what a simulation makes of that.
        burst_s: how long `burst_requests` requests of many sizes took, as many at once as there are slots.
        burst_told_s: what a simulation makes of that.
    """

    engine: Engine
    build: str
    stall_tokens: int = 0
    stall_s: float | None = None
    stall_told_s: float | None = None
    burst_requests: int = 0
    burst_s: float = 0.0
    burst_told_s: float = 0.0


@dataclass(slots=True)
class Server:
    """The engine by its HTTP endpoints; every call blocks."""

    url: str
    asked: int = 0

    def get(self, path: str) -> Any:
        """The JSON of an endpoint.

        Raises:
            CalibrationError: it does not answer, or not with JSON.
        """
        try:
            with urllib.request.urlopen(self.url + path, timeout=CALL_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                flag = "; start it without --no-slots" if path == "/slots" else ""
                raise CalibrationError(f"{self.url}{path} answers {error.code}{flag}") from None
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"{self.url}{path} does not answer ({error}); is llama-server running there?"
            ) from None

    def body(self, prompt_tokens: int, output_tokens: int, *, stream: bool = False) -> bytes:
        """A request for exactly so many tokens, with a prompt that no other has a prefix of."""
        self.asked += 1
        low, high = VOCABULARY
        prompt = [low + (self.asked * 7919 + at * 31) % (high - low) for at in range(prompt_tokens)]
        fields = {"n_predict": output_tokens, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
        return json.dumps({"prompt": prompt, "stream": stream, **fields}).encode()

    def complete(self, body: bytes) -> dict[str, float]:
        """The `timings` of a request's answer.

        Raises:
            CalibrationError: there are none.
        """
        try:
            with urllib.request.urlopen(f"{self.url}/completion", data=body, timeout=CALL_TIMEOUT_S) as answer:
                timings: dict[str, float] = json.load(answer)["timings"]
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            raise CalibrationError(f"{self.url}/completion answers {error.code}: {said}") from None
        except (OSError, ValueError, KeyError) as error:
            raise CalibrationError(
                f"{self.url}/completion gives no timings ({error!r}); is it llama-server?"
            ) from None
        return timings

    def stream(self, body: bytes, first: Callable[[], object]) -> float:
        """The longest wait between two pieces of a streamed answer, in seconds; `first` is called at the first."""
        where = urllib.parse.urlsplit(self.url)
        line = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=CALL_TIMEOUT_S)
        try:
            line.request("POST", f"{where.path}/completion", body)
            answer, before, longest = line.getresponse(), 0.0, 0.0
            for piece in answer:
                now = time.perf_counter()
                if not piece.startswith(b"data:"):
                    continue
                if before:
                    longest = max(longest, now - before)
                else:
                    first()
                before = now
        finally:
            line.close()
        return longest


def calibrate(
    url: str,
    kv: KvSettings,
    *,
    batch_tokens: int = 2048,
    rounds: int = 3,
    say: Callable[[str], object] = lambda _: None,
) -> Calibration:
    """Measure the engine at this address.

    Raises:
        CalibrationError: it is not there, not idle, or not a llama-server.
    """
    server = Server(url.rstrip("/"))
    slots = server.get("/slots")
    busy = sum(bool(slot.get("is_processing")) for slot in slots)
    if busy:
        raise CalibrationError(f"{busy} of {len(slots)} slots are busy; measure an engine that nobody else uses")
    pool, build = asyncio.run(_discovered(server.url, kv))
    say(f"{build}: {pool.slots} slots of {pool.tokens_per_slot} tokens, {pool.tokens} cells")
    overhead_s, prefill = _prefill(server, pool, rounds)
    say(f"prefill: {prefill:.0f} tokens/s, and {overhead_s * 1e3:.1f} ms a batch")
    steps = []
    for at_once in _numbers(pool.slots):
        steps.append((at_once, _step_s(server, at_once, rounds)))
        say(f"a step of {at_once}: {steps[-1][1] * 1e3:.1f} ms")
    # A batch without sequences costs no more than one with; what the line says beyond that is noise.
    steps.insert(0, (0, min(overhead_s, steps[0][1])))
    engine = Engine(pool, Speed(prefill, tuple(steps), batch_tokens))
    found = Calibration(engine, build)
    say("now what was not measured: a stall, and a burst")
    return _with_burst(server, found if pool.slots == 1 else _with_stall(server, found))


async def _discovered(url: str, kv: KvSettings) -> tuple[KvPool, str]:
    engine = LlamaCpp(url, LlamaCppSettings(kv), time.monotonic)
    try:
        profile = await engine.discover()
    except Refused as refused:
        raise CalibrationError(refused.refusal.message) from None
    finally:
        await engine.close()
    return profile.pool(), profile.build or "unknown build"


def _longest(pool: KvPool) -> int:
    return min(pool.tokens_per_slot - SHORT_TOKENS, pool.grantable_tokens // 2, LONG_TOKENS_MAX)


def _prefill(server: Server, pool: KvPool, rounds: int) -> tuple[float, float]:
    """Seconds of a batch before anything is in it, and prompt tokens a second: a line through two lengths.

    Of several rounds the fastest: what else runs on the machine only ever makes it slower.
    """
    long = _longest(pool)
    short = max(long // 4, 1)
    seen_ms: dict[int, list[float]] = {short: [], long: []}
    for at in range(rounds * NOISY_ROUNDS):
        if at >= rounds and min(seen_ms[short]) < min(seen_ms[long]):
            break
        for tokens, found in seen_ms.items():
            found.append(server.complete(server.body(tokens, 1))["prompt_ms"])
    short_s, long_s = (min(found) / 1e3 for found in seen_ms.values())
    if long_s <= short_s:
        raise CalibrationError(
            f"{long} prompt tokens took no longer than {short} ({long_s:.4f} s, {short_s:.4f} s): something else "
            "uses the machine; measure again when it is quiet"
        )
    speed = (long - short) / (long_s - short_s)
    return max(short_s - short / speed, 0.0), speed


def _numbers(slots: int) -> list[int]:
    """1, 2, 4 and so on, and all of them."""
    return sorted({min(1 << at, slots) for at in range(slots.bit_length() + 1)})


def _step_s(server: Server, at_once: int, rounds: int) -> float:
    """Seconds between two tokens of each of so many sequences that run side by side."""
    found = []
    for _ in range(rounds):
        bodies = [server.body(SHORT_TOKENS, STEPS) for _ in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:
            found.append(
                statistics.median(t["predicted_ms"] / (STEPS - 1) for t in threads.map(server.complete, bodies))
            )
    return min(found) / 1e3


def _with_stall(server: Server, found: Calibration) -> Calibration:
    """How long a running answer stands still while a long prompt is read beside it, measured and simulated."""
    speed, long = found.engine.speed, _longest(found.engine.pool)
    with ThreadPoolExecutor(1) as threads:
        reading = []

        def read() -> None:
            reading.append(threads.submit(server.complete, server.body(long, 1)))

        stall_s = server.stream(server.body(SHORT_TOKENS, 4 * STEPS, stream=True), read)
        for each in reading:
            each.result()
    told_s = speed.iteration_s(1, min(long, speed.batch_tokens - 1))
    return replace(found, stall_tokens=long, stall_s=stall_s, stall_told_s=told_s)


def _with_burst(server: Server, found: Calibration) -> Calibration:
    """Requests of many sizes, as many at once as there are slots, one after the other in each."""
    slots = found.engine.pool.slots
    long = _longest(found.engine.pool) // slots
    sizes = [(long // (1 + at % 3) + 1, STEPS // (1 + at % 4)) for at in range(BURST_ROUNDS * slots)]
    bodies = [server.body(prompt, output) for prompt, output in sizes]
    begun = time.perf_counter()
    with ThreadPoolExecutor(slots) as threads:
        list(threads.map(server.complete, bodies))
    took_s = time.perf_counter() - begun
    return replace(found, burst_requests=len(sizes), burst_s=took_s, burst_told_s=makespan_s(found.engine, sizes))


def makespan_s(engine: Engine, sizes: Sequence[tuple[int, int]]) -> float:
    """How long requests of these sizes (prompt, output) take in a simulation, the next as soon as a slot is free."""
    model, now_s, waiting = EngineModel(engine), 0.0, deque(sizes)
    while waiting or model.running:
        while waiting and model.running < engine.pool.slots:
            prompt, output = waiting.popleft()
            model.start(str(len(waiting)), prompt, output, now_s, cells=0)
        now_s = model.change().at_s
    return now_s
