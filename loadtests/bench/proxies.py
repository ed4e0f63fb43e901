"""Starts everything that is compared, each in front of the same upstream, and says what could not be started."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loadtests.bench.processes import ROOT, running, said_url, tree
from loadtests.fleet import GateProcess

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from loadtests.bench.processes import Started

KEY: Final = "sk-bench"
LITELLM: Final = "litellm[proxy]==1.108.7"
_INSTALL_S: Final = 180
_START_S: Final = 90.0


class NotHere(Exception):
    """A proxy that cannot be compared on this machine; the message is what the table shows."""


@dataclass(frozen=True)
class Proxy:
    """One of those that are compared.

    `pids` are its processes now, none for the bare upstream; `admin_url` is a gate's.
    """

    name: str
    url: str
    pids: Callable[[], list[int]]
    key: str | None = None
    admin_url: str = ""


def direct(upstream: str) -> Proxy:
    """Nothing in between."""
    return Proxy("direct", upstream, list)


def nginx(upstream: str, directory: Path, stack: contextlib.ExitStack) -> Proxy:
    """One worker, kept connections, no buffering: what a careful operator writes."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise NotHere("not installed (apt-get install nginx-light)")
    port = _free_port()
    (directory / "nginx.conf").write_text(
        f"""daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 16m; client_body_buffer_size 1m;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  keepalive_requests 1000000;
  upstream engine {{ server {upstream.removeprefix("http://")}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 300s;
    }}
  }}
}}
"""
    )
    command = [program, "-c", str(directory / "nginx.conf"), "-p", str(directory)]
    started = stack.enter_context(running(command, directory, name="nginx"))
    url = f"http://127.0.0.1:{port}"
    _until_answering(started, f"{url}/health")
    return Proxy("nginx", url, started.pids)


def aiohttp_passthrough(upstream: str, directory: Path, stack: contextlib.ExitStack) -> Proxy:
    """The library aiohttp on both sides, without any check."""
    command = [sys.executable, "-m", "loadtests.bench.passthrough", "--upstream", upstream]
    started = stack.enter_context(running(command, directory, name="passthrough", says_url=True))
    return Proxy("aiohttp", said_url(started), started.pids)


def kvgate(upstream: str, directory: Path, stack: contextlib.ExitStack, *, workers: int, config: str = "") -> Proxy:
    """A gate with its embedded store; all of it is charged to it."""
    home = directory / f"kvgate{workers}"
    home.mkdir()
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (home / "tenants.toml").write_text(f'[tenant.bench]\nkeys_sha256 = ["{digest}"]\nqueue_timeout_s = 120\n')
    (home / "kvgate.toml").write_text(config or '[engine]\nkv_topology = "divided"\n')
    arguments = ["--config", "kvgate.toml", "--tenants", "tenants.toml", "--upstream", upstream]
    gate = GateProcess(home, [*arguments, "--workers", str(workers)])
    stack.callback(gate.stop)
    gate.start()
    process = gate.process
    assert process is not None
    name = f"kvgate, {workers} worker{'s' if workers > 1 else ''}"
    return Proxy(name, gate.url, lambda: tree(process.pid), KEY, gate.admin_url)


def litellm(upstream: str, directory: Path, stack: contextlib.ExitStack) -> Proxy:
    """LiteLLM's proxy, one worker, no database; installed into an environment of its own."""
    program = _installed_litellm()
    port = _free_port()
    (directory / "litellm.yaml").write_text(
        "model_list:\n  - model_name: bench\n    litellm_params:\n      model: openai/bench\n"
        f"      api_base: {upstream}/v1\n      api_key: none\n"
        f"general_settings:\n  master_key: {KEY}\n"
    )
    command = [str(program), "--config", str(directory / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    started = stack.enter_context(running(command, directory, name="litellm"))
    url = f"http://127.0.0.1:{port}"
    _until_answering(started, f"{url}/health/liveliness")
    return Proxy("LiteLLM", url, started.pids, KEY)


def _installed_litellm() -> Path:
    home = Path(os.environ.get("KVGATE_CACHE", ROOT / ".cache")) / "litellm"
    program = home / "bin" / "litellm"
    if program.exists():
        return program
    print(f"installing {LITELLM} into {home} (at most {_INSTALL_S} s, this once) ...", file=sys.stderr, flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True, timeout=60)
        pip = [str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", LITELLM]
        subprocess.run(pip, check=True, capture_output=True, timeout=_INSTALL_S)
    except (subprocess.SubprocessError, OSError):
        shutil.rmtree(home, ignore_errors=True)
        raise NotHere(f"not installed: pip could not install {LITELLM} within {_INSTALL_S} s") from None
    return program


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _until_answering(started: Started, url: str) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and started.process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
    raise NotHere(f"did not start: {started.log.read_text()[-300:]}")


def until_counting_is_settled(proxy: Proxy, timeout_s: float = 60.0) -> None:
    """Wait until a gate has found out how to count at this engine (of several workers the first is asked)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{proxy.admin_url}/status", timeout=10) as answer:
            standings = json.load(answer)["counting"]
        if not any("not been probed" in standing["reason"] for standing in standings):
            return
        time.sleep(0.2)


def counted_by(proxy: Proxy) -> dict[str, int]:
    """How many of a gate's prompts each proof has counted so far."""
    with urllib.request.urlopen(f"{proxy.admin_url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'^kvgate_counts_total\{proof="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {proof: round(float(value)) for proof, value in found}
