"""One question, one call, however many ask it at once."""

from __future__ import annotations

import asyncio

import pytest

from kvgate.engines.llamacpp.flights import Flights


class Call:
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> int:
        self.begun += 1
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_identical_questions_are_one_call() -> None:
    flights: Flights[int] = Flights()
    call = Call()
    asking = [asyncio.create_task(flights.join(b"k", call)) for _ in range(5)]
    await some_turns()
    call.answer.set_result(7)
    assert await asyncio.gather(*asking) == [7] * 5
    assert (call.begun, len(flights)) == (1, 0)


async def test_different_questions_are_different_calls() -> None:
    flights: Flights[int] = Flights()
    one, other = Call(), Call()
    asking = [asyncio.create_task(flights.join(b"1", one)), asyncio.create_task(flights.join(b"2", other))]
    await some_turns()
    one.answer.set_result(1)
    other.answer.set_result(2)
    assert await asyncio.gather(*asking) == [1, 2]


async def test_who_leaves_takes_nothing_from_who_stays() -> None:
    """A client that hangs up does not cancel the count that others wait for."""
    flights: Flights[int] = Flights()
    call = Call()
    first, second = (asyncio.create_task(flights.join(b"k", call)) for _ in range(2))
    await some_turns()
    first.cancel()
    await some_turns()
    call.answer.set_result(7)
    assert await second == 7
    assert call.cancelled == 0


async def test_a_call_that_nobody_waits_for_ends_and_the_next_to_ask_gets_one_of_its_own() -> None:
    flights: Flights[int] = Flights()
    call, again = Call(), Call()
    asking = asyncio.create_task(flights.join(b"k", call))
    await some_turns()
    asking.cancel()
    await asyncio.sleep(0)
    later = asyncio.create_task(flights.join(b"k", again))
    await some_turns()
    again.answer.set_result(8)
    assert await later == 8
    assert (call.cancelled, len(flights)) == (1, 0)


async def test_a_failure_is_everybodys_and_is_not_kept() -> None:
    flights: Flights[int] = Flights()
    call, again = Call(), Call()
    asking = [asyncio.create_task(flights.join(b"k", call)) for _ in range(2)]
    await some_turns()
    call.answer.set_exception(ValueError("no"))
    assert [type(found) for found in await asyncio.gather(*asking, return_exceptions=True)] == [ValueError] * 2
    again.answer.set_result(8)
    assert await flights.join(b"k", again) == 8
    with pytest.raises(ValueError, match="no"):
        await flights.join(b"k", call)
