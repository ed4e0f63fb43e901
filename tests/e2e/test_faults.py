"""The fault matrix: each fault x streamed and whole x each dialect; the client's view and the ledger after.

`tests/e2e/faults/table.py` says what must be seen. All cells run side by side, each on a gate and an engine that
serve one cell at a time; what was seen is printed at the end of the suite.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from kvgate.store.embedded import EmbeddedValkey
from tests.e2e.conftest import TABLES, sha256
from tests.e2e.faults.acts import LEFT, Done
from tests.e2e.faults.asking import REASONS, Ask
from tests.e2e.faults.lane import BOUND_S, Lane, open_lane
from tests.e2e.faults.render import document, printed
from tests.e2e.faults.sdks import read_by_sdk
from tests.e2e.faults.table import CELLS, DRAINED, FREE, KEPT, Cell, Row, Seen

LANES: Final = 16

Results = dict[Cell, tuple[Seen, Done] | Exception]


async def _run(cell: Cell, lane: Lane) -> tuple[Seen, Done]:
    """One cell: what was seen, once the lane is as it was before."""
    admitted = lane.admitted
    lane.engine.slots_stick = True
    done = await cell.row.act(lane, cell.ask)
    ledger = await lane.quiet()
    # Where a client left and nothing drains, only others were admitted: those in the slots while it waited.
    held = FREE if lane.admitted > admitted and done.view != LEFT else KEPT
    state = DRAINED if ledger.draining else held
    await lane.heal()
    return Seen(done.view, state), done


async def _mended(lane: Lane) -> bool:
    try:
        await lane.heal()
    except AssertionError:
        return False
    return True


async def _matrix(cells: list[Cell], directory: Path) -> Results:
    tenants = directory / "tenants.toml"
    tenants.write_text(f'[tenant.demo]\nkeys_sha256 = ["{sha256("sk-demo")}"]\n')
    store = EmbeddedValkey(directory / "store")
    await store.start()
    found: Results = {}
    # Those that take longest begin first.
    waiting = sorted(cells, key=lambda cell: "hang" not in cell.row.name and "silen" not in cell.row.name)
    waiting.reverse()

    async def work(at: int) -> None:
        own = directory / f"lane{at}"
        own.mkdir()
        async with open_lane(own, store.url, tenants) as lane:
            if at == 0:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            while waiting:
                cell = waiting.pop()
                try:
                    found[cell] = await _run(cell, lane)
                except Exception as error:  # noqa: BLE001 - a cell's failure is its own
                    found[cell] = error
                    if not await _mended(lane):
                        return  # the other lanes do the rest
            await lane.until(lambda: lane.engine.open_connections <= 2, "without connections left over")
            assert lane.ledger.drains_overdue == 0

    try:
        tasks = len(asyncio.all_tasks())
        await asyncio.gather(*(work(at) for at in range(min(LANES, len(cells)))))
        deadline = time.monotonic() + BOUND_S
        while len(asyncio.all_tasks()) > tasks:
            assert time.monotonic() < deadline, asyncio.all_tasks()
            await asyncio.sleep(0.01)
    finally:
        await store.stop()
    return found


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    chosen = [item.callspec.params.get("cell") for item in request.session.items if hasattr(item, "callspec")]
    cells = [cell for cell in dict.fromkeys(chosen) if isinstance(cell, Cell)]
    found = asyncio.run(_matrix(cells or CELLS, tmp_path_factory.mktemp("faults")))
    request.config.stash.setdefault(TABLES, {})["fault matrix, as seen"] = printed(
        lambda row, ask: _seen(found, row, ask)
    )
    return found


def _seen(found: Results, row: Row, ask: Ask) -> Seen | None:
    outcome = found.get(Cell(row, ask))
    return Seen(f"failed: {outcome!r}"[:60], "?") if isinstance(outcome, Exception) else outcome and outcome[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", [pytest.param(cell, id=repr(cell)) for cell in CELLS])
def test_a_fault_has_its_error_and_leaves_nothing(cell: Cell, results: Results) -> None:
    """The client is told in its dialect, in time; the KV is free at once or when the engine's slot shows it."""
    seen = results[cell]
    if isinstance(seen, Exception):
        raise seen
    assert seen[0] == cell.row.expected(cell.ask)


def test_the_document_says_what_the_suite_expects() -> None:
    """docs/faults.md is made by `make docs`, and was made since the last change."""
    assert (Path(__file__).parents[2] / "docs/faults.md").read_text() == document()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("dialect", ["openai_chat", "openai_completions", "openai_responses", "anthropic_messages"])
def test_the_apis_own_sdk_reads_every_error(dialect: str, results: Results, *, stream: bool) -> None:
    """Not only the shape as kvgate knows it: OpenAI's and Anthropic's clients raise, and tell the reason's code."""
    told = {
        outcome[0].client: outcome[1]
        for cell, outcome in results.items()
        if cell.ask == Ask(dialect, stream) and not isinstance(outcome, Exception)
    }
    errors = {seen: done for seen, done in told.items() if seen not in {"200", "left", "cut"}}
    assert errors
    for seen, done in errors.items():
        status, code = read_by_sdk(Ask(dialect, stream), done)
        reason = REASONS[seen.split()[-1]]
        assert code == (reason.label if dialect == "anthropic_messages" else reason.value.code), seen
        assert status in {reason.status, None}, seen
