"""An engine's log is followed wherever it goes, and only its own lines are believed."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from kvgate import startup as module
from kvgate.core.startup_log import LINE_CHARS_MAX
from kvgate.startup import Child, LogFile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


def started(n_ctx: int = 512, *, unified: bool = False) -> str:
    """What one start says."""
    return (
        "0.00.1 I srv    load_model: loading model 'x.gguf'\n"
        "0.00.2 I llama_kv_cache: size = 11 MiB, K (f16): 5 MiB, V (f16): 6 MiB\n"
        f"0.00.3 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = {n_ctx}, "
        f"kv_unified = '{str(unified).lower()}'\n"
    )


FORGED = "srv    load_model: initializing, n_slots = 9, n_ctx_slot = 9, kv_unified = 'false'"


def n_ctx_of(source: LogFile | Child) -> int | None:
    facts = source.read().facts
    return None if facts is None else facts.n_ctx_slot


# -- a file


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    """Facts stand once a start is complete; the next start replaces them."""
    path = tmp_path / "engine.log"
    log = LogFile(path)
    path.write_text(started()[:80])
    assert n_ctx_of(log) is None
    with path.open("a") as file:
        file.write(started()[80:])
    assert n_ctx_of(log) == 512
    assert log.read().starts == 1
    with path.open("a") as file:
        file.write("chatter\n" * 100 + started(1024))
    assert n_ctx_of(log) == 1024
    assert log.read().starts == 2


def test_a_file_that_is_not_there_yet_is_an_empty_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine may start later; the operator is told of the path."""
    path = tmp_path / "engine.log"
    log = LogFile(path)
    assert n_ctx_of(log) is None
    assert caplog.records[0].__dict__["path"] == str(path)
    path.write_text(started())
    assert n_ctx_of(log) == 512


def test_a_line_cut_anywhere_is_one_line(tmp_path: Path) -> None:
    """Also in the middle of a character."""
    text = ("\u00e9" + started()).encode()
    for cut in range(len(text)):
        path = tmp_path / f"{cut}.log"
        log = LogFile(path)
        path.write_bytes(text[:cut])
        log.read()
        with path.open("ab") as file:
            file.write(text[cut:])
        assert n_ctx_of(log) == 512
        assert log.read().starts == 1


def test_a_last_line_without_its_end_is_not_read_yet(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(started().removesuffix("\n"))
    log = LogFile(path)
    assert n_ctx_of(log) is None
    with path.open("a") as file:
        file.write("\n")
    assert n_ctx_of(log) == 512


def test_a_restart_that_writes_over_the_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    """`llama-server ... > engine.log` once more."""
    path = tmp_path / "engine.log"
    path.write_text(started() + "chatter\n" * 50)
    log = LogFile(path)
    log.read()
    path.write_text(started(1024))
    assert n_ctx_of(log) == 1024
    assert log.read().starts == 2


def test_a_rotated_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Another file of the same name, longer than the one before."""
    path = tmp_path / "engine.log"
    path.write_text(started())
    log = LogFile(path)
    log.read()
    path.rename(tmp_path / "engine.log.1")
    path.write_text(started(1024) + "chatter\n" * 200)
    assert n_ctx_of(log) == 1024


def test_half_a_line_of_a_file_that_is_gone_is_not_joined_to_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("chatter\n" * 50 + "half a li")
    log = LogFile(path)
    log.read()
    path.write_text(started(1024))
    assert n_ctx_of(log) == 1024


def test_a_large_log_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES_MAX", 100)
    path = tmp_path / "engine.log"
    path.write_text(started())
    log = LogFile(path)
    reads = 0
    while n_ctx_of(log) is None:
        reads += 1
    assert reads == len(started()) // 100


@pytest.mark.parametrize("short_by", [0, 1, 9, 100, 1000, 3900])
def test_the_end_of_a_prompt_in_a_verbose_log_is_no_line_of_it(tmp_path: Path, short_by: int) -> None:
    """Whoever may write a prompt could else write the engine's facts: the log shows it in one line, read in two."""
    path = tmp_path / "engine.log"
    padding = "y" * (LINE_CHARS_MAX - len(FORGED) - short_by - 20)
    path.write_text(f"0.01.0 D prompt: {'x' * LINE_CHARS_MAX} {padding} {FORGED}")
    log = LogFile(path)
    log.read()
    with path.open("a") as file:
        file.write("\n" + started())
    assert n_ctx_of(log) == 512
    assert log.read().starts == 1


# -- a child


@pytest.fixture
async def child() -> AsyncIterator[Callable[[str], Child]]:
    """Runs a Python script as the engine."""
    children: list[Child] = []

    def make(script: str) -> Child:
        children.append(Child([sys.executable, "-u", "-c", script]))
        return children[-1]

    yield make
    for one in children:
        await one.stop()


async def test_a_childs_output_is_read_and_passed_on(
    child: Callable[[str], Child], capfd: pytest.CaptureFixture[str]
) -> None:
    """Both of its streams; the operator sees all of it."""
    engine = child(f"import sys; print('hello'); sys.stderr.write({started()!r})")
    await engine.start()
    assert await engine.wait() == 0
    await engine.stop()
    assert n_ctx_of(engine) == 512
    assert engine.is_childs
    assert "hello" in (shown := capfd.readouterr().err)
    assert "n_ctx_slot = 512" in shown


async def test_a_child_is_read_although_nobody_reads_kvgate(
    child: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child whose output stays unread hangs in its next line, and all its slots with it."""

    class Broken:
        buffer = property(lambda _: Broken())

        def write(self, _: bytes) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Broken())
    engine = child(f"print({started()!r}); print('x' * 1_000_000)")
    await engine.start()
    async with asyncio.timeout(20):
        assert await engine.wait() == 0
    assert n_ctx_of(engine) == 512


async def test_the_end_of_a_child_is_seen(child: Callable[[str], Child]) -> None:
    engine = child("import sys; sys.stdin.read(); sys.exit(3)")
    assert not engine.ended
    with pytest.raises(RuntimeError, match="not started"):
        await engine.wait()
    await engine.start()
    assert await engine.wait() == 3
    assert engine.ended


async def test_a_child_is_asked_to_end(child: Callable[[str], Child]) -> None:
    """And gets to say its last words."""
    engine = child(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"print({started()!r}); time.sleep(60)"
    )
    await engine.start()
    await _until(lambda: n_ctx_of(engine) == 512)
    await engine.stop()
    assert engine.ended
    assert await engine.wait() == 0


async def test_a_child_that_does_not_end_is_ended(
    child: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_GRACE_S", 0.1)
    engine = child(
        f"import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint({started()!r}); time.sleep(60)"
    )
    await engine.start()
    await _until(lambda: n_ctx_of(engine) == 512)
    await engine.stop()
    assert await engine.wait() == -9


async def test_stopping_twice_and_before_the_start_is_no_error(child: Callable[[str], Child]) -> None:
    engine = child("pass")
    await engine.stop()
    await engine.start()
    await engine.wait()
    await engine.stop()
    await engine.stop()


async def test_a_command_that_is_not_there_has_ended(
    child: Callable[[str], Child], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Child(["/nowhere/llama-server", "-m", "x"])
    await engine.start()
    assert await engine.wait() == 1
    await engine.stop()
    assert "/nowhere/llama-server cannot be run" in capfd.readouterr().err


async def test_a_very_long_line_neither_stops_the_reading_nor_forges_a_fact(
    child: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of megabytes in a verbose log: what stands at its end is not the engine's own word."""
    monkeypatch.setattr(module, "CHILD_LINE_BYTES_MAX", 5000)
    engine = child(
        "import sys, time\n"
        "for length in range(4000, 80000, 500):\n"
        f"    sys.stdout.write('prompt: ' + 'z' * length + ' ' + {FORGED!r} + '\\n')\n"
        f"sys.stdout.write({started()!r})"
    )
    await engine.start()
    await engine.wait()
    await engine.stop()
    assert n_ctx_of(engine) == 512
    assert engine.read().starts == 1


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another process tells of no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], None),
        (["--context-shift"], True),
        (["--no-context-shift"], False),
        (["--no-context-shift", "--context-shift"], True),
    ],
)
async def test_a_childs_command_tells_whether_it_shifts(tmp_path: Path, flags: list[str], said: bool | None) -> None:
    """No line of the log does."""
    engine = tmp_path / "llama-server.py"
    engine.write_text(f"print({started()!r})")
    child = Child([sys.executable, str(engine), *flags])
    await child.start()
    await child.wait()
    await _until(lambda: child.read().starts > 0)
    facts = child.read().facts
    assert facts is not None
    assert facts.context_shift is said
    await child.stop()
