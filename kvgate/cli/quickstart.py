"""What `make run` starts: a gate for a newcomer, with a real engine behind it where none is named."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import secrets
import socket
import sys
import time
from pathlib import Path

from kvgate.app import App, CannotStart
from kvgate.cli.check import ask_engine, problem_of
from kvgate.lab.engine_process import EngineFailed, EngineProcess
from kvgate.lab.fetch import FetchFailed, fetch_model
from kvgate.log import start_logging
from kvgate.ports import Refused
from kvgate.settings import BadSettings, load

ENGINE_FLAGS = ("-c", "4096", "-np", "2", "--no-kv-unified")
"""Two slots of 2048 tokens."""

REUSE_OFF_FLAGS = ("--no-cache-prompt", "--cache-ram", "0", "--no-cache-idle-slots")
"""Prefix reuse and the RAM prompt cache off at the engine itself: what the documentation tells everybody to use."""

_BODY = '{"messages":[{"role":"user","content":"Say hello in one sentence."}],"max_tokens":40}'


def main() -> int:
    """Run until stopped; the exit status."""
    parser = argparse.ArgumentParser(prog="make run", description=__doc__)
    parser.add_argument("--upstream", metavar="URL", help="an engine that runs already")
    parser.add_argument("--listen", default="127.0.0.1:8600", metavar="HOST:PORT")
    parser.add_argument("--admin-listen", default="127.0.0.1:8601", metavar="HOST:PORT")
    parser.add_argument("--data-dir", type=Path, default=Path(".kvgate"), metavar="DIR")
    options = parser.parse_args()
    try:
        for address in (options.listen, options.admin_listen):
            _check_free(address)
        if options.upstream:
            asyncio.run(ask_engine(options.upstream))
        with contextlib.ExitStack() as stack:
            upstream = options.upstream or stack.enter_context(engine(options.data_dir)).url
            return asyncio.run(_serve(options, upstream))
    except Refused as refused:
        print(f"kvgate: {problem_of(refused)}", file=sys.stderr)
        return 2
    except (EngineFailed, FetchFailed, BadSettings, CannotStart, ValueError) as problem:
        print(f"kvgate: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _check_free(address: str) -> None:
    """Find out before an engine is started for nothing."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {address}: {error.strerror}. Is another one running? make run takes "
                "LISTEN=HOST:PORT and ADMIN_LISTEN=HOST:PORT"
            ) from None


def engine(data_dir: Path, *flags: str) -> EngineProcess:
    """The development engine, not yet started; its model is fetched first where need be.

    Raises:
        FetchFailed: there is no model.
    """
    model = fetch_model()
    data_dir.mkdir(parents=True, exist_ok=True)
    say(f"starting llama.cpp with {model.name}; its log is {data_dir / 'engine.log'}")
    arguments = ("-m", str(model), *(flags or ENGINE_FLAGS), *REUSE_OFF_FLAGS, "--alias", "smollm2-135m", "-lv", "4")
    return EngineProcess(arguments, log_path=data_dir / "engine.log")


def say(progress: str) -> None:
    """One line of progress, on standard error."""
    print(f"== {progress}", file=sys.stderr, flush=True)


async def _serve(options: argparse.Namespace, upstream: str) -> int:
    key = _demo_key(options.data_dir)
    tenants = options.data_dir / "tenants.toml"
    digest = hashlib.sha256(key.encode()).hexdigest()
    tenants.write_text(f'[tenant.demo]\nkeys_sha256 = ["{digest}"]\n', encoding="utf-8")
    log = None if options.upstream else options.data_dir / "engine.log"
    flags = {
        "listen": options.listen,
        "admin_listen": options.admin_listen,
        "tenants": tenants,
        "engine": {"url": upstream, **({"log": log} if log else {})},
        "store": {"data_dir": options.data_dir},
    }
    begun = time.monotonic()

    def announce(url: str, admin_url: str) -> None:
        say(f"the gate was up in {time.monotonic() - begun:.1f} s; Ctrl-C ends it")
        print(
            f"\nkvgate listens on {url} in front of {upstream}\n"
            f"  demo key    {key}\n"
            f"  health      {admin_url}/readyz   metrics {admin_url}/metrics   state {admin_url}/status\n\n"
            f"Try it:\n\n"
            f"  curl -i {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -d '{_BODY}'\n\n"
            f"and ask for more than fits:\n\n"
            f"  curl -i {url}/v1/chat/completions -H 'Authorization: Bearer {key}' "
            f"-d '{_BODY.replace('40', '5000')}'\n",
            flush=True,
        )

    start_logging()
    return await App(load(None, flags), announce=announce).run()


def _demo_key(data_dir: Path) -> str:
    """The same key at every start, minted once, readable by this user alone."""
    path = data_dir / "demo.key"
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(f"sk-kvgate-{secrets.token_hex(12)}\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


if __name__ == "__main__":
    raise SystemExit(main())
