"""What `make watch` runs: a Prometheus of one's own beside a gate on this machine, with kvgate's alert rules.

python -m deploy.watch [--admin HOST:PORT] [--listen HOST:PORT] [--data-dir DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

RULES: Final = Path(__file__).parent / "prometheus" / "kvgate.rules.yml"
START_TIMEOUT_S: Final = 30.0
EVERY: Final = "2s"
"""Between two looks, at the gate and at the rules; a fleet's Prometheus takes 15 s."""


def main() -> int:
    """Run until stopped; the exit status."""
    parser = argparse.ArgumentParser(prog="make watch", description="A Prometheus beside a gate on this machine.")
    parser.add_argument("--admin", default="127.0.0.1:8601", metavar="HOST:PORT", help="the gate's operator side")
    parser.add_argument("--listen", default="127.0.0.1:9090", metavar="HOST:PORT")
    parser.add_argument("--data-dir", type=Path, default=Path(".kvgate/prometheus"), metavar="DIR")
    options = parser.parse_args()
    binary = shutil.which("prometheus")
    if binary is None:
        return _problem("there is no prometheus here: apt install prometheus, or https://prometheus.io/download")
    if not _answers(f"http://{options.admin}/healthz"):
        return _problem(
            f"no gate answers at http://{options.admin}: start one with make run, or name its ADMIN_LISTEN"
        )
    if _answers(f"http://{options.listen}/-/healthy"):
        return _problem(f"a Prometheus listens on {options.listen} already; make watch takes WATCH_LISTEN=HOST:PORT")
    options.data_dir.mkdir(parents=True, exist_ok=True)
    config = options.data_dir / "prometheus.yml"
    config.write_text(json.dumps(configuration(options.admin), indent=2))  # which is YAML
    return _run([binary, *flags(config, options.data_dir / "data", options.listen)], options)


def configuration(admin: str) -> dict[str, object]:
    """Prometheus' own, for one gate."""
    return {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kvgate", "static_configs": [{"targets": [admin]}]}],
    }


def flags(config: Path, data: Path, listen: str) -> list[str]:
    """The command line, without the program."""
    return [
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=1d",
        f"--web.listen-address={listen}",
        "--log.level=warn",
    ]


def _run(command: list[str], options: argparse.Namespace) -> int:
    url = f"http://{options.listen}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (options.data_dir / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _answers(f"{url}/-/ready"):
                if process.poll() is not None or time.monotonic() > deadline:
                    return _problem(f"Prometheus did not start; {log.name} says why")
                time.sleep(0.1)
            print(
                f"\nPrometheus looks at the gate at http://{options.admin} every {EVERY}; Ctrl-C ends it.\n"
                f"  alerts      {url}/alerts\n"
                f"  one figure  {url}/graph?g0.expr=kvgate_requests_total&g0.tab=1\n\n"
                f"What fires now:\n\n"
                f"  curl -s {url}/api/v1/alerts\n\n"
                "What an alert means and what to do: docs/runbook.md",
                flush=True,
            )
            return process.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - http alone, as built here
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _problem(sentence: str) -> int:
    print(f"kvgate: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
