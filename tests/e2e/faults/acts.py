"""What is done to a request, beyond an engine that replies with a fault: engines that vanish, clients that leave."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.e2e.faults.asking import Ask, Client, view
from tests.e2e.faults.lane import WRITE_TIMEOUT_S
from tests.fake_engine import CHAT, FAMILIES
from tests.fake_engine import family_faults as fault
from tests.fake_engine.faults import flood, stall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.e2e.faults.lane import Lane
    from tests.fake_engine import FakeEngine
    from tests.fake_engine.wire import Exchange, Reply

    Act = Callable[[Lane, Ask], Awaitable["Done"]]

LEFT: Final = "left"
"""The view of a client that hung up by itself."""

BUFFERED_BYTES_MAX: Final = 1024 * 1024
"""What kvgate itself may hold of an answer whose client does not read; the kernel's own buffers come on top."""


@dataclass(frozen=True)
class Done:
    """The client's view; with what came, for a look by the API's own SDK."""

    view: str
    status: int = 0
    body: bytes = b""
    content_type: str = ""


async def asked(lane: Lane, ask: Ask, *, read_after_s: float = 0) -> Done:
    """One request, by a client that stays."""
    async with Client(lane.url) as client:
        await client.send(ask)
        await asyncio.sleep(read_after_s)
        answer = await client.receive()
    text = "".join(lane.engine.words)
    return Done(view(ask, answer, text), answer.status, answer.body, answer.headers.get("content-type", ""))


def replying(reply: Reply) -> Act:
    """The engine replies so to the request."""

    async def act(lane: Lane, ask: Ask) -> Done:
        lane.engine.script(ask.path, reply)
        return await asked(lane, ask)

    return act


def counting(reply: Reply) -> Act:
    """The engine replies so when the request is counted."""

    async def act(lane: Lane, ask: Ask) -> Done:
        lane.engine.script(FAMILIES[ask.path].counter, reply)
        return await asked(lane, ask)

    return act


def saying(*words: str) -> Act:
    """The engine is well, and says this."""

    async def act(lane: Lane, ask: Ask) -> Done:
        lane.engine.words = words
        return await asked(lane, ask)

    return act


async def engine_gone(lane: Lane, ask: Ask) -> Done:
    """Nobody listens at the engine's port."""
    await lane.engine.stop()
    return await asked(lane, ask)


async def engine_turns_away(lane: Lane, ask: Ask) -> Done:
    """Connections are accepted and closed at once."""
    lane.engine.turns_away = True
    await lane.engine.hang_up()
    return await asked(lane, ask)


async def idle_connections_gone(lane: Lane, ask: Ask) -> Done:
    """The engine has closed every connection that the gate kept."""
    await lane.engine.hang_up()
    return await asked(lane, ask)


async def engine_hangs(lane: Lane, ask: Ask) -> Done:
    """It accepts connections and says nothing, as a stopped process does."""
    lane.engine.frozen = True
    return await asked(lane, ask)


def hanging_health(reply: Reply) -> Act:
    """The engine replies so, and `/health` hangs too."""

    async def act(lane: Lane, ask: Ask) -> Done:
        lane.engine.always["/health"] = stall
        return await replying(reply)(lane, ask)

    return act


def becoming(n_ctx: int) -> Act:
    """Between count and send the engine becomes another one."""

    async def change(engine: FakeEngine, exchange: Exchange) -> None:
        await engine.become(n_ctx, spare=exchange.link)

    async def act(lane: Lane, ask: Ask) -> Done:
        done = await counting(fault.between_count_and_send(change))(lane, ask)
        assert done.status == 200 or json.loads(done.body)["error"]["n_ctx"] == n_ctx
        return done

    return act


async def _no_more(engine: FakeEngine, exchange: Exchange) -> None:
    engine.refuse_connections()
    for link in engine._links - {exchange.link}:
        link.transport.abort()


gone_after_the_count: Act = counting(fault.between_count_and_send(_no_more))


# -- clients


async def reads_late(lane: Lane, ask: Ask) -> Done:
    """A client that takes its time, and then reads all of a long answer."""
    lane.engine.words = tuple(f"{at:06}" * 10_000 for at in range(8))
    return await asked(lane, ask, read_after_s=0.5)


async def never_reads(lane: Lane, ask: Ask) -> Done:
    """A client that is connected and reads nothing of an endless answer."""
    family = FAMILIES[ask.path]
    lane.engine.words = ("x" * 65536,)
    event = next(iter(family.chunks(lane.engine.says(family, json.loads(ask.body)))))
    lane.engine.script(ask.path, flood(2000, event))
    async with Client(lane.url, receive_bytes=4096) as client:
        await client.send(ask)
        await lane.until(lambda: lane.buffered_bytes > 0, "behind")
        while lane.status["in_flight"]:
            assert lane.buffered_bytes < BUFFERED_BYTES_MAX
            await asyncio.sleep(0.01)
        answer = await client.receive()
    return Done(view(ask, answer, ""))


async def never_reads_the_whole(lane: Lane, ask: Ask) -> Done:
    """As `never_reads`, of an answer that the gate holds whole: it looks at it when it must long be cut."""
    lane.engine.words = ("x" * 4_000_000,) * 7
    async with Client(lane.url, receive_bytes=4096) as client:
        await client.send(ask)
        await lane.until(lambda: lane.engine.asked(ask.path), "asked")
        await lane.quiet()
        await asyncio.sleep(2 * WRITE_TIMEOUT_S)
        answer = await client.receive()
    return Done(view(ask, answer, "".join(lane.engine.words)))


def leaves_while(reply: Reply, *, counted: bool = False, after_bytes: bool = False) -> Act:
    """The client hangs up while the engine is at this, by its first bytes at the earliest where so said."""

    async def act(lane: Lane, ask: Ask) -> Done:
        path = FAMILIES[ask.path].counter if counted else ask.path
        before = len(lane.engine.asked(path))
        lane.engine.script(path, reply)
        async with Client(lane.url) as client:
            await client.send(ask)
            await lane.until(lambda: len(lane.engine.asked(path)) > before, "asked")
            if after_bytes:
                await client.read_head()
        return Done(LEFT)

    return act


async def leaves_the_queue(lane: Lane, ask: Ask) -> Done:
    """The client hangs up while it waits for a slot; those in the slots end well."""
    holders = Ask("openai_chat", stream=True)
    over = asyncio.Event()

    async def held(exchange: Exchange) -> None:
        await over.wait()
        await fault.all_at_once(exchange)

    lane.engine.script(CHAT, held, held)
    tasks = [asyncio.create_task(asked(lane, holders)) for _ in range(2)]
    await lane.until(lambda: lane.ledger.running == 2, "full")
    async with Client(lane.url) as client:
        await client.send(ask)
        await lane.until(lambda: lane.ledger.waiting == 1, "waiting")
    await lane.until(lambda: lane.ledger.waiting == 0, "out of the queue")
    assert lane.ledger.running == 2
    over.set()
    assert [(await task).view for task in tasks] == ["200", "200"]
    return Done(LEFT)
