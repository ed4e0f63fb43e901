"""Rules and dashboards name metrics that there are, leave none out, and are what their descriptions say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deploy.alert_examples import EXAMPLES
from deploy.alerts import ALERTS, RECORDINGS, rules
from deploy.dashboards import DASHBOARDS
from deploy.generate import generated
from kvgate.cli.reference import reference

ROOT = Path(__file__).parents[2]

NOT_SHOWN: dict[str, str] = {}
"""Metrics that no rule and no panel uses, each with the reason why it is there all the same."""


def defined() -> dict[str, str]:
    """Every metric of the reference, which is made from the code, with its type."""
    section = reference().split("## Metrics")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(kvgate_\w+)` \| (\w+) \|", section, re.MULTILINE))


def samples() -> set[str]:
    """The names under which they are scraped."""
    found = set()
    for name, kind in defined().items():
        found |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return found


def expressions() -> dict[str, str]:
    """Every query that is shipped, by where it stands."""
    found = {f"rule {rule.name}": rule.expr for rule in (*RECORDINGS, *ALERTS)}
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard.panels:
            found |= {f"{name}: {panel.title}, {at}": query for at, (query, _) in enumerate(panel.queries)}
        found |= {f"{name}: ${label}": metric for label, metric in dashboard.variables.items()}
    return found


def named_in(expression: str) -> set[str]:
    """The metrics that a query names; what a recording rule keeps has a colon."""
    without_labels = re.sub(r"\{[^}]*\}", "", expression)
    return set(re.findall(r"\bkvgate_\w+(?![\w:])", without_labels))


def test_every_metric_that_a_rule_or_a_panel_names_is_there() -> None:
    """A metric that was renamed takes its rule along, or this fails."""
    unknown = {where: names for where, text in expressions().items() if (names := named_in(text) - samples())}
    assert unknown == {}


def test_every_recorded_name_that_is_used_is_recorded() -> None:
    recorded = {rule.name for rule in RECORDINGS}
    used = {name for text in expressions().values() for name in re.findall(r"\bkvgate:[\w:]+", text)}
    assert used <= recorded
    assert recorded <= used | {"kvgate:requests:rate5m"}


def test_every_metric_is_looked_at() -> None:
    """One that no rule and no panel uses is in a list, with the reason."""
    used = {name for text in expressions().values() for name in named_in(text)}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in defined() else name for name in used}
    assert set(defined()) - bare - set(NOT_SHOWN) == set()
    assert set(NOT_SHOWN) <= set(defined()) - bare


def test_what_is_checked_in_is_what_the_descriptions_say() -> None:
    """`python -m deploy.generate` was run since they changed."""
    for path, text in generated().items():
        assert path.read_text() == text, path


def test_every_alert_is_told_apart_and_tried() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert set(EXAMPLES) == set(names)
    for alert in ALERTS:
        assert alert.name.startswith("Kvgate")
        assert alert.summary.endswith(".")


def promtool(*arguments: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (apt-get install prometheus): the rules were not tried")
    directory = ROOT / "deploy/prometheus"
    done = subprocess.run([program, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_reads_the_rules() -> None:
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in promtool("check", "rules", "kvgate.rules.yml")


def test_every_alert_fires_when_it_must_and_not_before() -> None:
    """Prometheus' own unit tests: for each alert a story in which it fires and one in which it stays quiet."""
    assert "SUCCESS" in promtool("test", "rules", "kvgate.test.yml")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_whole(name: str) -> None:
    """Every panel has a place of its own, a title of its own and at least one query; variables are used."""
    document: dict[str, Any] = json.loads((ROOT / f"deploy/grafana/{name}.json").read_text())
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert not [title for title, count in Counter(panel["title"] for panel in panels).items() if count > 1]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        its = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & its, panel["title"]
        cells |= its
        assert all(target["expr"] for target in panel["targets"])
    text = json.dumps(panels)
    for variable in document["templating"]["list"]:
        assert f"${variable['name']}" in text or f"${{{variable['name']}}}" in text


def test_rules_are_a_group_each_of_recordings_and_alerts() -> None:
    recordings, alerts = rules()["groups"]
    assert [rule["record"] for rule in recordings["rules"]] == [rule.name for rule in RECORDINGS]
    assert [rule["alert"] for rule in alerts["rules"]] == [alert.name for alert in ALERTS]
