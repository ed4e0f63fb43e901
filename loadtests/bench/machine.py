"""Where and with what it was measured, in one sentence: figures mean nothing without."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path


def told(lasted_s: float) -> str:
    """The sentence."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    client = "wrk" if shutil.which("wrk") else "the client of this repository"
    day = time.strftime("%Y-%m-%d", time.gmtime())
    software = f"Python {platform.python_version()}, aiohttp {metadata.version('aiohttp')}, {_nginx()}"
    return (
        f"Measured on {day} in {lasted_s:.0f} s: {os.cpu_count()} cores ({model}), {software}, whole answers asked "
        f"by {client}, load average at the end {load}, commit {_commit()}."
    )


def _nginx() -> str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        return "no nginx"
    done = subprocess.run([program, "-v"], capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition(": ")[2].replace("/", " ")


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
