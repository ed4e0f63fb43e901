"""What deploy/ ships runs: proxies in front pass streams on at once, and the image's steps make a gate."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.e2e.ask import chat, post
from tests.e2e.ports import free_port
from tests.fake_engine import CHAT, FakeEngine, stall_in_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import StartGate

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
USER = 10001


def installed(program: str) -> str:
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed (apt-get install {program}): nothing stood in front of the gate")
    return found


@contextlib.contextmanager
def nginx(gate_address: str, directory: Path) -> Iterator[str]:
    """The shipped file inside the least main configuration that there is; its URL."""
    program, port = installed("nginx"), free_port()
    text = (ROOT / "deploy/nginx/kvgate.conf").read_text()
    changed = text.replace("listen 8443;", f"listen 127.0.0.1:{port};").replace("127.0.0.1:8600", gate_address)
    temporary = "".join(
        f"{kind}_temp_path {directory}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        if f"{kind}_temp_path" not in changed
    )
    user = "user root;" if os.geteuid() == 0 else ""  # the test's directory is its own alone
    (directory / "nginx.conf").write_text(
        f"{user} daemon off; pid {directory}/pid; error_log stderr warn; events {{}}\n"
        f"http {{ access_log off; {temporary} {changed} }}\n"
    )
    command = [program, "-c", str(directory / "nginx.conf"), "-p", str(directory)]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    with _running(command, directory):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def caddy(gate_address: str, directory: Path) -> Iterator[str]:
    """The shipped file with the test's ports; its URL."""
    program, port = installed("caddy"), free_port()
    text = (ROOT / "deploy/caddy/Caddyfile").read_text()
    changed = text.replace(":8443 {", f"http://127.0.0.1:{port} {{").replace("127.0.0.1:8600", gate_address)
    (directory / "Caddyfile").write_text("{\n\tadmin off\n}\n" + changed)
    command = [program, "run", "--config", str(directory / "Caddyfile"), "--adapter", "caddyfile"]
    with _running(command, directory):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _running(command: list[str], directory: Path) -> Iterator[None]:
    environment = {**os.environ, "HOME": str(directory), "XDG_DATA_HOME": str(directory)}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env=environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def until_answering(url: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            await post(url, chat(), key="sk-nobody")
        except (aiohttp.ClientError, OSError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


@pytest.mark.parametrize("in_front", [nginx, caddy])
async def test_a_stream_passes_at_once_and_a_hang_up_is_seen(
    start_gate: StartGate, in_front: type[contextlib.AbstractContextManager[str]], tmp_path: Path
) -> None:
    """Nothing is held back: the first event comes while the engine is silent behind it, and who leaves is missed."""
    async with FakeEngine() as engine:
        gate = await asyncio.to_thread(start_gate, engine.url)
        with in_front(gate.url.removeprefix("http://"), tmp_path) as url:  # type: ignore[call-arg]  # a function
            await until_answering(url)
            whole = await post(url, chat(stream=True))
            assert whole.events[-1] == "[DONE]"
            assert "x-kvgate-verdict" in whole.headers
            engine.script(CHAT, stall_in_stream)
            headers = {"Authorization": "Bearer sk-demo"}
            async with (
                aiohttp.ClientSession() as session,
                session.post(url + CHAT, json=chat(stream=True), headers=headers) as answer,
            ):
                first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), WAIT_S)
                assert first.startswith(b"data: {")
            status = await asyncio.to_thread(gate.wait_until_empty, WAIT_S)
            assert status["in_flight"] == 0
            assert gate.metric("kvgate_hangups_total") == 1
        gate.stop()


@pytest.mark.parametrize("in_front", [nginx, caddy])
async def test_a_body_that_is_too_large_is_refused_by_the_gate(
    start_gate: StartGate, in_front: type[contextlib.AbstractContextManager[str]], tmp_path: Path
) -> None:
    """In the words of the API, not in the proxy's HTML."""
    async with FakeEngine() as engine:
        gate = await asyncio.to_thread(start_gate, engine.url)
        with in_front(gate.url.removeprefix("http://"), tmp_path) as url:  # type: ignore[call-arg]  # a function
            await until_answering(url)
            body = io.BytesIO(json.dumps(chat("x" * (8 * 1024 * 1024))).encode())
            headers = {"Authorization": "Bearer sk-demo", "Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession() as session,
                session.post(url + CHAT, data=body, headers=headers) as answer,
            ):
                assert answer.status == 413
                assert (await answer.json())["error"]["code"] == "request_too_large"
        gate.stop()


# -- the image


def steps(text: str) -> tuple[list[list[str]], list[str], dict[str, str], list[str]]:
    """Of the Dockerfile: what the build stage copies and runs, what ENV sets, and the health check's command."""
    joined = text.replace("\\\n", " ")
    build = joined.split("\nFROM ")[1]
    copies = [line.split()[1:] for line in re.findall(r"^COPY .*$", build, re.MULTILINE)]
    runs = [line.removeprefix("RUN ") for line in re.findall(r"^RUN .*$", build, re.MULTILINE)]
    env = re.search(r"^ENV (.*)$", joined, re.MULTILINE)
    health = re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", joined, re.MULTILINE)
    assert env is not None
    assert health is not None
    command: list[str] = json.loads(health[1])
    return copies, runs, dict(re.findall(r"(\w+)=(\S+)", env[1])), command


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that the image's user may enter; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="kvgate-image-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.timeout(400)
async def test_the_images_steps_make_a_gate_that_writes_to_its_data_alone(open_path: Path) -> None:
    """The Dockerfile's own lines, run outside a container: build, start as another user, be found healthy, stop."""
    copies, runs, variables, health = steps((ROOT / "Dockerfile").read_text())
    source, home, data = open_path / "src", open_path / "opt", open_path / "data"
    for *names, target in copies:
        for name in names:
            into = source / target / (name if target.endswith("/") else "")
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            into.parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, into)
    for command in runs:
        await asyncio.to_thread(_run, command.replace("/opt/kvgate", str(home)), source)
    data.mkdir()
    before = written(source, home)
    if user_can_run(home):
        os.chown(data, USER, USER)
    (open_path / "tenants.toml").write_text("[tenant.demo]\n")
    admin = f"127.0.0.1:{free_port()}"
    environment = {
        **variables,
        "PATH": f"{home}/bin:/usr/bin:/bin",
        "HOME": str(data),
        "KVGATE_LISTEN": f"127.0.0.1:{free_port()}",
        "KVGATE_ADMIN_LISTEN": admin,
        "KVGATE_TENANTS": str(open_path / "tenants.toml"),
        "KVGATE_STORE__DATA_DIR": str(data / ".kvgate"),
    }
    async with FakeEngine() as engine:
        environment["KVGATE_ENGINE__URL"] = engine.url
        process = await asyncio.to_thread(_started, f"{home}/bin/kvgate", data, environment, open_path / "log")
        try:
            await asyncio.to_thread(_until_healthy, health, environment, open_path / "log")
            assert await asyncio.to_thread(_get, f"http://{admin}/readyz") == 200
        finally:
            process.terminate()
            status = await asyncio.to_thread(process.wait, 60)
    assert status == 0, (open_path / "log").read_text()
    assert (data / ".kvgate").is_dir()
    assert written(source, home) == before
    assert await asyncio.to_thread(_health, health, environment) != 0, "a gate that is gone was found healthy"


def _run(command: str, directory: Path) -> None:
    """One RUN line, with the Python of the tests in the place of the image's."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": ""}
    done = subprocess.run(
        ["sh", "-euc", command], cwd=directory, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def user_can_run(home: Path) -> bool:
    """Whether the tests may become the image's user, and that one reaches this machine's Python."""
    if os.geteuid() != 0:
        return False
    told = [f"{home}/bin/python", "-c", "import sys; print(sys.version)"]
    try:
        found = subprocess.run(told, user=USER, check=False, capture_output=True, text=True)
    except PermissionError:
        return False
    return found.returncode == 0 and found.stdout.strip() == sys.version


def written(*directories: Path) -> dict[str, float]:
    """Every file below, and when it was last written to."""
    paths = [path for directory in directories for path in directory.rglob("*")]
    return {str(path): path.lstat().st_mtime for path in paths}


def _started(program: str, directory: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """`kvgate serve` as the image's user, where the tests may become another one."""
    user = USER if user_can_run(Path(program).parents[1]) else None
    groups: list[int] | None = None if user is None else []
    with log.open("wb") as file:
        return subprocess.Popen(
            [program, "serve"],
            cwd=directory,
            env=environment,
            stdout=file,
            stderr=file,
            user=user,
            group=user,
            extra_groups=groups,
        )


def _until_healthy(command: list[str], environment: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while _health(command, environment) != 0:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def _health(command: list[str], environment: dict[str, str]) -> int:
    shown = shlex.join(command)
    return subprocess.run(["sh", "-c", shown], env=environment, capture_output=True, check=False).returncode


def _get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=20) as answer:
        status: int = answer.status
        return status
