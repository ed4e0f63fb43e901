"""How the suite asks through a ledger: last, and whatever it took is given back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvgate.core.canary import SUITE_TENANT
from kvgate.core.json_object import Edit
from kvgate.core.ledger import Denied
from kvgate.core.reason import Reason, refusal
from kvgate.core.reuse import Reuse
from kvgate.lab.reuse_suite import EngineAccess, Stopped, Unasked
from kvgate.lab.reuse_suite.access import PATIENCE_S
from kvgate.ports import Head
from tests.unit.doubles import LedgerDouble, LineDouble, ManualClock, broken, profile, refused

if TYPE_CHECKING:
    from kvgate.core.pool import KvPool
    from kvgate.core.profile import EngineProfile

ANSWER = {
    "completion_probabilities": [{"id": 7, "logprob": -1.5}],
    "timings": {"cache_n": 3, "prompt_n": 2, "prompt_ms": 40},
}


class Engine:
    """As much of a llama-server as the suite uses; `line` is what opens next, or the refusal."""

    def __init__(self, line: LineDouble | Exception) -> None:
        self.line = line

    def pool(self, found: EngineProfile) -> KvPool:
        return found.pool()

    def reuse_edit(self, reuse: Reuse) -> Edit:
        return Edit({"cache_prompt": reuse is Reuse.KEEP}, frozenset({"id_slot"}))

    async def open(self) -> LineDouble:
        if isinstance(self.line, Exception):
            raise self.line
        return self.line

    async def control(self, path: str, body: bytes) -> tuple[int, bytes]:
        return (200, b'{"tokens": [1, 2]}') if path == "/tokenize" else (400, b'{"error": {"message": "x"}}')


def answering(answer: Any = ANSWER, status: int = 200, **changes: Any) -> LineDouble:
    return LineDouble(profile(**changes), Head(status, ()), [json.dumps(answer).encode()])


def access(line: LineDouble | Exception, ledger: LedgerDouble, waiting: list[int] | None = None) -> EngineAccess:
    left = list(waiting or [])

    async def others() -> int:
        return left.pop(0) if left else 0

    engine: Any = Engine(line)
    return EngineAccess(engine, profile(), ledger, others, ManualClock())


@pytest.mark.parametrize(("reuse", "said"), [(Reuse.OFF, False), (Reuse.KEEP, True)])
async def test_each_request_is_leased_and_says_what_reuse_it_wants(reuse: Reuse, said: bool) -> None:
    ledger, line = LedgerDouble(), answering()
    found = await access(line, ledger).ask([1, 2, 3, 4, 5], [7], reuse)
    assert (found.logprobs, found.cached_tokens, found.computed_tokens) == ((-1.5,), 3, 2)
    (reservation,) = ledger.reservations
    assert (reservation.tenant, reservation.quota.concurrency_max) == (SUITE_TENANT, 2)
    assert (reservation.size.prompt_tokens, reservation.size.output_tokens) == (5, 1)
    assert [what for what, _ in ledger.told] == ["reserve", "hand_over", "answered", "settle ended"]
    assert json.loads(line.sent[0][3])["cache_prompt"] is said
    assert line.released == 1


async def test_while_others_wait_it_asks_nothing() -> None:
    ledger = LedgerDouble()
    asking = asyncio.create_task(access(answering(), ledger, [2, 1, 0]).ask([1], [7], Reuse.OFF))
    await asyncio.sleep(0)
    assert not ledger.told
    await asking
    assert len(ledger.reservations) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (LineDouble(profile(), broken(sent=True)), "the connection to the engine broke"),
        (answering(instance="<two>"), "another engine process"),
        (answering(build="b2"), "another engine process"),
        (refused(refusal(Reason.ENGINE_UNREACHABLE, retry_after_s=1)), "cannot be reached"),
    ],
)
async def test_an_engine_that_goes_ends_the_run_and_holds_nothing(line: LineDouble | Exception, words: str) -> None:
    ledger = LedgerDouble()
    with pytest.raises(Stopped, match=words):
        await access(line, ledger).ask([1], [7], Reuse.OFF)
    assert ledger.told[-1][0] == "settle"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (answering({"error": {"message": "secret words"}}, 400), "answered 400 at /completion"),
        (answering({"completion_probabilities": []}), "does not tell the log-probabilities"),
    ],
)
async def test_an_answer_that_is_no_use_is_told_without_its_words(line: LineDouble, words: str) -> None:
    ledger = LedgerDouble()
    with pytest.raises(Unasked, match=words) as told:
        await access(line, ledger).ask([1], [7], Reuse.OFF)
    assert "secret" not in str(told.value)
    assert ledger.told[-1][0] == "settle ended"


async def test_a_cancelled_run_gives_back_what_it_held() -> None:
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.get_running_loop().create_future()

    ledger = LedgerDouble()
    line = LineDouble(profile(), Head(200, ()), [hang])
    asking = asyncio.create_task(access(line, ledger).ask([1], [7], Reuse.OFF))
    await reached.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ledger.told[-1][0] == "settle"
    assert line.released == 1


@pytest.mark.parametrize(
    ("reason", "words"),
    [(Reason.ENGINE_CHANGED, "never has room"), (Reason.STORE_OUT, "store_out"), (Reason.GATE_DRAINING, "draining")],
)
async def test_a_ledger_that_lets_it_in_never_ends_the_run(reason: Reason, words: str) -> None:
    ledger = LedgerDouble(replies=[Denied("", reason, 0, 1.0)])
    with pytest.raises(Stopped, match=words):
        await access(answering(), ledger).ask([1], [7], Reuse.OFF)
    assert len(ledger.settled) == 1


async def test_a_full_queue_is_only_a_reason_to_come_again() -> None:
    ledger = LedgerDouble(replies=[Denied("", Reason.QUEUE_TIMEOUT, 3, 1.0), Denied("", Reason.QUEUE_FULL, 3, 1.0)])
    await access(answering(), ledger).ask([1], [7], Reuse.OFF)
    assert len(ledger.reservations) == len(set(ledger.settled)) == 3


async def test_it_waits_for_tenants_a_long_time_and_not_for_ever() -> None:
    clock = ManualClock()

    async def always() -> int:
        clock.advance(PATIENCE_S)
        return 1

    engine: Any = Engine(answering())
    ledger = LedgerDouble()
    with pytest.raises(Stopped, match="the suite comes last"):
        await EngineAccess(engine, profile(), ledger, always, clock).ask([1], [7], Reuse.OFF)
    assert not ledger.told


async def test_what_the_engine_cannot_render_is_not_asked() -> None:
    found = access(answering(), LedgerDouble())
    assert await found.tokens("x", special=True) == (1, 2)
    with pytest.raises(Unasked, match="/apply-template"):
        await found.rendered([], [])
