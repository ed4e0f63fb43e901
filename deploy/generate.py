"""Writes the Prometheus rules with their tests and the Grafana dashboards from their descriptions.

    python -m deploy.generate

A test fails where a written file differs from its description.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.alert_examples import tests
from deploy.alerts import rules
from deploy.dashboards import DASHBOARDS

HERE: Final = Path(__file__).parent


def generated() -> dict[Path, str]:
    """Every generated file's text, by its path."""
    prometheus = HERE / "prometheus"
    found = {
        prometheus / "kvgate.rules.yml": _yaml("deploy/alerts.py", rules()),
        prometheus / "kvgate.test.yml": _yaml("deploy/alert_examples.py", tests()),
    }
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvgate", "labels": {"app.kubernetes.io/name": "kvgate"}},
        "spec": rules(),
    }
    found[HERE / "kubernetes" / "prometheusrule.yml"] = _yaml("deploy/alerts.py", resource)
    for name, dashboard in DASHBOARDS.items():
        found[HERE / "grafana" / f"{name}.json"] = json.dumps(dashboard.json(), indent=1) + "\n"
    return found


def _yaml(source: str, document: Any) -> str:
    text = yaml.dump(document, Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)
    return f"# Made by `python -m deploy.generate` from {source}.\n{text}"


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """YAML without references between its parts."""

    def ignore_aliases(self, data: Any) -> bool:
        """None."""
        del data
        return True


def main() -> int:
    """Write them."""
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
