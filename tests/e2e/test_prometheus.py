"""A real Prometheus scrapes a gate with a real engine: every rule is evaluated, every dashboard query has data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from deploy.alerts import ALERTS, RECORDINGS
from deploy.dashboards import DASHBOARDS
from tests.e2e.ask import chat, post
from tests.e2e.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import RunningGate, StartEngine, StartGate

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
JOB = "kvgate"
WAIT_S = 150.0


@dataclass
class Prometheus:
    """One that scrapes and evaluates every second."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}{query}", timeout=20) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expression)["result"]
        return found

    def rules(self) -> dict[str, Any]:
        return {rule["name"]: rule for group in self.get("rules")["groups"] for rule in group["rules"]}


@pytest.fixture(scope="module")
def gate(start_engine: StartEngine, start_gate: StartGate) -> RunningGate:
    """A gate that warns of an engine below the minimum, with a tenant that queues and one that is trimmed."""
    engine = start_engine("-c", "4096", "-np", "4", "--no-kv-unified", "-lv", "4")
    tenants = {
        "ann": 'on_overflow = "trim"\ncontext_tokens_max = 160',
        "bob": "concurrency_max = 1",
        "cyd": "",
        "eve": "",
    }
    tenants["dan"] = 'on_overflow = "clamp"\ncontext_tokens_max = 80'
    config = f'[engine]\nlog = "{engine.log_path}"\ncontext_tokens_min = 4096\non_undersized = "warn"\n'
    return start_gate(engine.url, tenants=tenants, config=config)


@pytest.fixture(scope="module")
def prometheus(gate: RunningGate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with the rules as they are shipped, only sooner."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus): nothing scraped the gate")
    directory = tmp_path_factory.mktemp("prometheus")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/kvgate.rules.yml").read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    (directory / "kvgate.rules.yml").write_text(yaml.safe_dump(rules))
    scrape = {"job_name": JOB, "static_configs": [{"targets": [gate.admin_url.removeprefix("http://")]}]}
    settings = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    document = {"global": settings, "rule_files": ["kvgate.rules.yml"], "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(document))
    port = free_port()
    command = [program, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, cwd=directory
        )
    try:
        yield _up(Prometheus(f"http://127.0.0.1:{port}"), process, directory / "log")
    finally:
        process.terminate()
        process.wait(30)


def _up(found: Prometheus, process: subprocess.Popen[bytes], log: Path) -> Prometheus:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if found.query(f'up{{job="{JOB}"}} == 1'):
                return found
        time.sleep(0.2)
    raise AssertionError(f"Prometheus does not scrape the gate: {log.read_text()[-2000:]}")


def dashboard_queries() -> dict[str, str]:
    """Every panel's query with every variable set to all."""
    found = {}
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard.panels:
            for at, (query, _) in enumerate(panel.queries):
                for label in dashboard.variables:
                    query = query.replace(f"${label}", ".*")  # noqa: PLW2901 - one variable after the other
                found[f"{name}: {panel.title}, {at}"] = query
    return found


async def _once(gate: RunningGate, number: int) -> None:
    """What traffic has in it: served, trimmed, refused, cut short by the context."""
    turns = [
        {"role": role, "content": f"{word} " * 40} for word in ("stone", "river") for role in ("user", "assistant")
    ]
    long = {"messages": [*turns, {"role": "user", "content": f"And {number}?"}], "max_tokens": 4}
    asked = (
        post(gate.url, chat(f"Say {number}.", max_tokens=2), key="sk-cyd"),
        post(gate.url, long, key="sk-ann"),
        post(gate.url, chat("word " * 900, max_tokens=400), key="sk-cyd"),
        post(gate.url, chat("Count.", max_tokens=400, ignore_eos=True), key="sk-dan"),
    )
    statuses = [answer.status for answer in await asyncio.gather(*asked)]
    assert statuses == [200, 200, 400, 200]


async def _forever(gate: RunningGate) -> None:
    """Somebody who waits all the time, since its tenant may run one; one that always hangs up; once, a loop."""

    async def again() -> None:
        while True:
            await post(gate.url, chat("Count.", max_tokens=120, ignore_eos=True), key="sk-bob")

    async def leave() -> None:
        while True:
            body = chat("Count.", max_tokens=400, ignore_eos=True, stream=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(post(gate.url, body, key="sk-cyd"), 1)

    over_and_over = chat("Say it.", logit_bias=[[" responsibilities", 100]], max_tokens=200, stream=True)
    await asyncio.gather(again(), again(), leave(), post(gate.url, over_and_over, key="sk-eve"))


@pytest.mark.timeout(360)
async def test_every_dashboard_query_has_data_and_every_rule_is_evaluated(
    gate: RunningGate, prometheus: Prometheus
) -> None:
    """Under traffic that is served, trimmed, refused and waits, nothing on a dashboard stays empty.

    An overflow that was refused fires its alert, and an engine below the minimum begins to fire its own.
    """
    background = asyncio.create_task(_forever(gate))
    empty, number, deadline = dashboard_queries(), 0, time.monotonic() + WAIT_S
    recordings = {rule.name: rule.name for rule in RECORDINGS}
    empty |= recordings
    try:
        while empty and time.monotonic() < deadline:
            await _once(gate, number)
            number += 1
            for where, query in list(empty.items()):
                if await asyncio.to_thread(prometheus.query, query):
                    del empty[where]
    finally:
        background.cancel()
        await asyncio.wait([background])
    assert empty == {}
    rules = prometheus.rules()
    assert set(rules) == {alert.name for alert in ALERTS} | set(recordings)
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}
    firing = {name: rule.get("state") for name, rule in rules.items()}
    assert firing["KvgateOverflowsRejected"] == "firing"
    assert firing["KvgateContextBelowMinimum"] in {"pending", "firing"}
    quiet = {"KvgateDown", "KvgateEngineNotServed", "KvgateReuseViolation", "KvgateCountDrift", "KvgateStoreDown"}
    quiet |= {"KvgateTopologyUnknown", "KvgateForeignTraffic", "KvgateEngineOverflow", "KvgateInternalErrors"}
    assert {name: firing[name] for name in quiet} == dict.fromkeys(quiet, "inactive")
