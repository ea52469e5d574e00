"""The files for Docker, Kubernetes and systemd agree with the configuration and with each other."""

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from gateway.config.load import loads

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "deploy" / "warmroute.service").read_text()


@pytest.fixture
def manifests():
    return {
        document["kind"]: document for document in yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    }


@pytest.fixture
def config(manifests):
    return loads(
        manifests["ConfigMap"]["data"]["config.yaml"],
        environ={"WORKER_API_KEY": "k", "ADMIN_TOKEN": "of sixteen characters"},
    )


def test_the_config_map_loads_and_its_admin_listener_is_reached_by_probes(config, manifests):
    container = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", ports["http"])
    assert (config.admin.host, config.admin.port) == ("0.0.0.0", ports["admin"])
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {"admin"}
    assert probes["readinessProbe"]["path"] == "/readyz"
    assert probes["livenessProbe"]["path"] == probes["startupProbe"]["path"] == "/healthz"


def test_the_kill_comes_after_the_pre_stop_pause_and_the_grace(config, manifests):
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    pause = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + config.grace < pod["terminationGracePeriodSeconds"]
    assert config.grace < int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[1])


def test_every_selector_selects_the_pods(manifests):
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert manifests[kind]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels


def test_clients_are_not_let_to_the_admin_port(config, manifests):
    open_to_all = [rule for rule in manifests["NetworkPolicy"]["spec"]["ingress"] if "from" not in rule]
    assert [port["port"] for rule in open_to_all for port in rule["ports"]] == [config.listen.port]
    assert [port["targetPort"] for port in manifests["Service"]["spec"]["ports"]] == ["http"]


def test_the_docker_ignore_list_lets_through_what_the_dockerfile_copies():
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_the_health_check_of_the_image_follows_healthz(status, healthy):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_port
        thread = threading.Thread(target=server.serve_forever)
        if status is None:
            server.server_close()
        else:
            thread.start()
        command = json.loads(re.search(r"^HEALTHCHECK[^[]*(\[.*\])$", DOCKERFILE, re.MULTILINE)[1])
        assert command[:2] == ["python", "-c"]
        assert ":8081/" in command[2]
        script = command[2].replace(":8081/", f":{port}/")
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=20)
        if thread.is_alive():
            server.shutdown()
            thread.join()
    assert (done.returncode == 0) is healthy
    assert asked == ([] if status is None else ["/healthz"])
