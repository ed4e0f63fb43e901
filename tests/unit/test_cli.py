"""The commands tell their answer by exit status: 0 yes, 1 no, 2 it could not be asked."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvgate import __version__
from kvgate.cli import main
from kvgate.cli.serve import _child_url
from kvgate.settings import BadSettings
from tests.fake_engine import CHAT, FakeEngine, stall_in_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Explain = Callable[..., tuple[int, str, str]]

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of the developer's own, and logging as it was: `serve` sets it up for the whole process."""
    for name in [name for name in os.environ if name.startswith("KVGATE_")]:
        monkeypatch.delenv(name)
    loggers = [logging.getLogger(name) for name in (None, "kvgate", "aiohttp")]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """A fake engine in a thread of its own: a command brings its own event loop."""
    found, loop, listening = FakeEngine(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        async with found:
            listening.set()
            await over.wait()

    over = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert listening.wait(20)
    yield found
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that cannot be understood says."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


# -- check


def check(engine_url: str, least: int, *more: str) -> int:
    return main(["check", "--upstream", engine_url, "--context-tokens-min", str(least), *more])


@pytest.mark.parametrize(("least", "status"), [(1, 0), (511, 0), (512, 0), (513, 1), (100_000, 1)])
def test_check_answers_by_its_exit_status(engine: FakeEngine, least: int, status: int) -> None:
    assert check(engine.url, least) == status


def test_check_names_what_it_found(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """With its source, and with the flags that would do."""
    check(engine.url, 512)
    assert capsys.readouterr().out.startswith("ok: n_ctx_slot = 512 tokens (props), 2 slots")
    check(engine.url, 2048)
    said = capsys.readouterr().out
    assert said.startswith("error slot-context: n_ctx_slot = 512 tokens (props), 2 slots; at least 2048")
    assert "-c 4096 -np 2" in said


@pytest.mark.parametrize("least", [512, 513])
def test_check_as_json(engine: FakeEngine, capsys: pytest.CaptureFixture[str], least: int) -> None:
    """The same answer for programs, one object on standard output."""
    status = check(engine.url, least, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (
        found.items()
        >= {
            "ok": status == 0,
            "n_ctx_slot": 512,
            "context_tokens_min": least,
            "total_slots": 2,
            "source": "props",
        }.items()
    )


def test_check_of_the_least_that_the_engine_tells(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.slots_n_ctx = 256
    assert check(engine.url, 512) == 1
    assert "n_ctx_slot = 256 tokens (slots)" in capsys.readouterr().out


def test_check_of_an_engine_without_slots(engine: FakeEngine) -> None:
    """`--no-slots` is no reason to fail a deploy."""
    engine.slots_shown = False
    assert check(engine.url, 512) == 0


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_check_of_an_engine_that_cannot_be_asked(capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    """Neither large enough nor too small; and the reason is said."""
    assert check(NOBODY, 512, *more) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "cannot be reached" in said.err
    if more:
        assert json.loads(said.err)["ok"] is None


def test_check_of_an_engine_that_is_loading(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.loading = True
    assert check(engine.url, 512) == 2
    assert "loading its model" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["0", "none.toml"])
def test_check_of_an_engine_that_nobody_shares(said: str, engine: FakeEngine, tmp_path: Path, capsys: Any) -> None:
    """Neither the number nor the file can be meant."""
    (tmp_path / "none.toml").write_text("")
    assert check(engine.url, 512, "--tenants", said if said == "0" else str(tmp_path / said)) == 2
    assert "names nobody" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://x", "http://x:99999", ""])
def test_check_of_what_is_no_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(url, 512) == 2
    assert capsys.readouterr().err.startswith("kvgate check: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "--upstream", NOBODY],
        ["check", "--upstream", NOBODY, "--context-tokens-min", "0"],
        ["check", "--upstream", NOBODY, "--context-tokens-min", "-5"],
        ["check", "--upstream", NOBODY, "--context-tokens-min", "many"],
        ["check", "--upstream", NOBODY, "--context-tokens-min", "5", "--github", "--github", "more"],
        ["check", "--up", NOBODY, "--context-tokens-min", "5"],
        ["check", "--upstream", NOBODY, "--context-tokens-min", "5", "--acknowledge", "everything"],
        ["explain", "-", "--tenant", "x", "--", "llama-server"],
        ["nothing"],
        [],
    ],
)
def test_a_command_line_that_means_nothing_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: kvgate" in refused(arguments, capsys)


JSON_MISUSED = {
    "check": ["check", "--json"],
    "check --github": ["check", "--upstream", NOBODY, "--context-tokens-min", "5", "--json", "--github"],
    "probe": ["probe", "--json"],
    "measure run": ["measure", "run", "--json", "--rounds", "many"],
    "measure compare": ["measure", "compare", "--json"],
    "explain": ["explain", "--json"],
    "top": ["top", "--json", "--interval-s", "-1"],
    "tenants apply": ["tenants", "apply", "--json"],
    "tenants show": ["tenants", "show", "--json"],
    "tenants list": ["tenants", "list", "--json", "--what"],
    "tenants remove": ["tenants", "remove", "--json"],
    "keys create": ["keys", "create", "--json"],
    "keys list": ["keys", "list", "--json", "more"],
    "keys revoke": ["keys", "revoke", "--json"],
    "histogram": ["histogram", "--json", "--what"],
    "report": ["report", "--json"],
    "canary run": ["canary", "run", "--json"],
    "canary status": ["canary", "status", "--json", "more"],
    "canary widen": ["canary", "widen", "--json"],
    "canary": ["canary", "--json"],
    "none": ["nothing", "--json"],
}


@pytest.mark.parametrize("arguments", JSON_MISUSED.values(), ids=JSON_MISUSED)
def test_whatever_a_program_asked_wrongly_is_told_as_json(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One object with `ok` and `problem` on standard error, nothing else; exit status 2."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capsys.readouterr()
    told = json.loads(said.err)
    assert (status, said.out, told["ok"], bool(told["problem"])) == (2, "", None, True)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvgate {__version__}\n"


# -- serve


def serve(*arguments: str) -> int:
    return main(["serve", *arguments])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_serve_without_an_engine_says_how_to_name_one(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve() == 2
    assert (
        capsys.readouterr().err
        == "kvgate: no engine: give --upstream http://host:port, or engine.url in kvgate.toml\n"
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('lisen = "x:1"', "lisen is unknown; did you mean listen?"),
        ("[engine", "is not TOML"),
        ('[engine]\nurl = "localhost:1"', "engine.url must look like http://host:port"),
        ('listen = "127.0.0.1:70000"', "listen"),
        ('[engine]\nurl = "http://127.0.0.1:1"\n[store]\nurl = "redis://127.0.0.1:1"', "the store"),
        ('[engine]\nurl = "http://127.0.0.1:1"\n[store]\nurl = "nonsense://x"', "the store is not to be had"),
    ],
)
def test_serve_with_settings_that_cannot_be_used(
    file: Any, capsys: pytest.CaptureFixture[str], config: str, said: str
) -> None:
    """One sentence for the operator, and no traceback."""
    assert serve("--config", file("kvgate.toml", config)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_serve_with_a_file_that_is_not_there(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--config", "none.toml", "--upstream", NOBODY) == 2
    assert "none.toml cannot be read" in capsys.readouterr().err


def test_serve_reads_a_childs_log_by_itself(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--engine-log", "x.log", "--", "llama-server") == 2
    assert "a child's log is read by itself" in capsys.readouterr().err


def test_serve_with_a_child_on_a_unix_socket(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--", "llama-server", "--host", "/run/llama.sock") == 2
    assert "unix socket (/run/llama.sock)" in capsys.readouterr().err


def test_serve_with_an_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--upstraem" in refused(["serve", "--upstraem", NOBODY], capsys)
    assert "usage: kvgate" in refused(["serve", "--up", NOBODY], capsys)


def embedded(file: Any, **settings: str) -> list[str]:
    """Flags for a gate with a store of its own on free ports."""
    lines = "".join(f'{name} = "{value}"\n' for name, value in settings.items())
    config = file("kvgate.toml", lines)
    addresses = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    return ["--config", config, "--upstream", NOBODY, *addresses]


@pytest.mark.parametrize(
    ("tenants", "said"),
    [("[tenant.a]\nqueue_mx = 1", "did you mean queue_max?"), ("[tenant", "is not TOML")],
)
def test_serve_with_a_tenants_file_that_cannot_be_used(
    file: Any, capsys: pytest.CaptureFixture[str], tenants: str, said: str
) -> None:
    assert serve(*embedded(file), "--tenants", file("tenants.toml", tenants)) == 2
    assert said in capsys.readouterr().err


def test_serve_for_an_anonymous_tenant_that_nobody_declares(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(*embedded(file, anonymous_tenant="guest")) == 2
    assert "anonymous_tenant = 'guest', but no tenant of that name" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--listen", "--admin-listen"])
def test_serve_on_a_port_that_is_taken(file: Any, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert serve(*embedded(file), flag, address) == 2
    assert f"cannot listen on {address}" in capsys.readouterr().err


def test_serve_with_a_child_that_cannot_run(file: Any, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [argument for argument in embedded(file) if argument not in {"--upstream", NOBODY}]
    assert serve(*arguments, "--", "/nowhere/llama-server", "--port", "1") == 2
    err = capfd.readouterr().err
    assert "/nowhere/llama-server" in err
    assert "kvgate: " in err


def test_serve_ends_within_its_grace_period(engine: FakeEngine, file: Any) -> None:
    """On SIGTERM what runs may finish for `stop_grace_s`; then it is cut, and the engine learns that it was."""
    engine.script(CHAT, stall_in_stream)
    arguments = ["--config", file("kvgate.toml", 'anonymous_tenant = "a"\n[http]\nstop_grace_s = 0.5\n')]
    arguments += ["--tenants", file("tenants.toml", "[tenant.a]"), "--upstream", engine.url]
    arguments += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "kvgate", "serve", *arguments]
    gate = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert gate.stderr is not None
        listening = next(line for line in map(json.loads, gate.stderr) if line["event"] == "listening")
        client = http.client.HTTPConnection(listening["url"].removeprefix("http://"), timeout=30)
        with contextlib.closing(client):
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            client.request("POST", CHAT, json.dumps(body))
            answer = client.getresponse()
            assert answer.status == 200
            assert answer.readline().startswith(b"data: ")
            gate.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert gate.wait(60) == 0
            assert time.monotonic() - began < 15
    finally:
        gate.kill()
        gate.communicate()
    (request,) = engine.asked(CHAT)
    assert request.hung_up.is_set()


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("", None),
        ("llama-server", "http://127.0.0.1:8080"),
        ("llama-server -m x.gguf --port 9000", "http://127.0.0.1:9000"),
        ("llama-server --host 0.0.0.0 --port 9000 -c 5", "http://127.0.0.1:9000"),
        ("llama-server --host :: --port 9000", "http://127.0.0.1:9000"),
        ("llama-server --host ::1", "http://[::1]:8080"),
        ("llama-server --host gpu.example", "http://gpu.example:8080"),
    ],
)
def test_where_a_child_listens_is_read_from_its_own_flags(command: str, url: str | None) -> None:
    assert _child_url(command.split()) == url


def test_a_child_on_a_unix_socket_cannot_be_asked() -> None:
    with pytest.raises(BadSettings, match="unix socket"):
        _child_url(["llama-server", "--host", "/run/x.sock"])


# -- explain

TENANTS = """
[tenant.acme]
context_tokens_max = 100
[tenant.calm]
on_overflow = "clamp"
"""


@pytest.fixture
def explain(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    """Runs `kvgate explain` on a body, straight against the engine; its exit status and what it printed."""
    (tmp_path / "tenants.toml").write_text(TENANTS)

    def run(body: object, *flags: str, tenant: str = "acme", upstream: str = engine.url) -> tuple[int, str, str]:
        (tmp_path / "body.json").write_text(body if isinstance(body, str) else json.dumps(body))
        arguments = ["explain", str(tmp_path / "body.json"), "--tenant", tenant, "--upstream", upstream]
        status = main([*arguments, "--tenants", str(tmp_path / "tenants.toml"), *flags])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


BODY = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 50}


def test_explain_says_yes_with_the_arithmetic(engine: FakeEngine, explain: Explain) -> None:
    """And runs nothing: the engine is asked to count, never to generate."""
    status, out, _ = explain(BODY)
    assert status == 0
    assert "verdict       admit" in out
    assert "33 tokens, by engine" in out
    assert "context_tokens_max: 100 - 33 prompt - 0 margin = 67  <- binds" in out
    assert engine.asked(CHAT) == []


def test_explain_says_no_with_what_would_fit(explain: Explain) -> None:
    status, out, _ = explain(BODY | {"max_tokens": 80})
    assert status == 1
    assert "an output limit of at most 67" in out
    assert "a prompt shorter by 13 tokens" in out


def test_explain_says_what_is_clamped_as_json_too(explain: Explain) -> None:
    status, out, _ = explain(BODY | {"max_tokens": 5000}, "--json", tenant="calm")
    found = json.loads(out)
    assert (status, found["ok"], found["verdict"], found["asked_output_tokens"]) == (0, True, "clamp", 5000)
    assert found["output_limit"] == found["output_tokens_max"] == 512 - 33


def test_explain_says_what_is_malformed(explain: Explain) -> None:
    status, out, _ = explain("{")
    assert (status, "reject (malformed)" in out) == (1, True)
    status, out, _ = explain("{", "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["reason"]) == (1, False, "malformed")


def test_explain_that_cannot_ask_exits_2_and_says_what_to_do(
    explain: Explain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine, no gate, no such tenant, path or file, half of the flags: never taken for a no."""
    for found, words in (
        (explain(BODY, upstream=NOBODY), "cannot be reached"),
        (explain(BODY, tenant="nobody"), "there is no tenant 'nobody'"),
        (explain(BODY, "--path", "/v1/models"), "nothing is counted at"),
    ):
        assert found[0] == 2
        assert words in found[2]
    body = tmp_path / "body.json"
    for arguments, words in (
        ([str(body), "--admin", NOBODY], "no gate answers at"),
        ([str(body), "--admin", "ftp://x"], "no http:// URL"),
        ([str(tmp_path / "none.json"), "--admin", NOBODY], "cannot be read"),
        ([str(body), "--upstream", NOBODY], "go together"),
    ):
        assert main(["explain", *arguments, "--tenant", "acme"]) == 2
        assert words in capsys.readouterr().err
    assert main(["explain", str(body), "--admin", NOBODY, "--tenant", "acme", "--json"]) == 2
    assert list(json.loads(capsys.readouterr().err)) == ["ok", "problem"]
