"""Dashboard, alert rules and autoscaler ask only for series that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from everything import everything, sample_labels

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "warmroute.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
KEDA = DEPLOY / "keda" / "scaledobject.yaml"
TARGET_LABELS = {"instance", "job"}
"""Labels that Prometheus itself gives every series."""


def dashboard():
    return json.loads(DASHBOARD.read_text())


def rules():
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def keda_queries():
    (document,) = yaml.safe_load_all(KEDA.read_text())
    return [trigger["metadata"]["query"] for trigger in document["spec"]["triggers"]]


def dashboard_queries():
    whole = dashboard()
    for panel in whole["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for annotation in whole["annotations"]["list"]:
        yield annotation["expr"]


def all_queries():
    queries = [*dashboard_queries(), *(rule["expr"] for rule in rules()), *keda_queries()]
    return sorted({query.replace("$__rate_interval", "5m") for query in queries})


def children(node):
    for name in ("lhs", "rhs", "expr", "param", "args", "vector_selector"):
        child = getattr(node, name, None)
        if isinstance(child, list):
            yield from child
        elif child is not None:
            yield child


def problems(node, known):
    """What `node` asks for that is not there; and the labels that its result may have."""
    if isinstance(node, promql.VectorSelector):
        labels = known.get(node.name)
        if labels is None:
            return [f"no metric {node.name}"], set()
        asked = {matcher.name for matcher in node.matchers.matchers}
        wrong = [f"{node.name} has no label {name}" for name in sorted(asked - labels - TARGET_LABELS)]
        return wrong, labels | TARGET_LABELS
    found, labels = [], set()
    for child in children(node):
        more, theirs = problems(child, known)
        found += more
        labels |= theirs
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        wanted = set(node.modifier.labels)
        found += [f"nothing below has the label {name}" for name in sorted(wanted - labels)]
        labels = wanted if node.modifier.type == promql.AggModifierType.By else labels - wanted
    return found, labels


@pytest.fixture(scope="module")
def known():
    return sample_labels(everything())


@pytest.mark.parametrize("query", all_queries())
def test_a_query_asks_for_series_and_labels_that_there_are(query, known):
    assert problems(promql.parse(query), known)[0] == []


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(warmroute_request_total[5m])", "no metric warmroute_request_total"),
        ('warmroute_fleet_slots{worker="w1"}', "warmroute_fleet_slots has no label worker"),
        ("sum by (tenant) (warmroute_fleet_slots)", "nothing below has the label tenant"),
        ("max(a) / sum by (model) (warmroute_fleet_slots)", "no metric a"),
    ],
)
def test_the_check_would_see_it(query, problem, known):
    assert problem in problems(promql.parse(query), known)[0]


def test_values_of_labels_that_queries_name_exist():
    """`{outcome="faild"}` would be a series that there is, and always empty."""
    text = "\n".join(all_queries())
    from gateway.fleet.worker import WorkerState
    from gateway.prefix.feed_status import STATUSES
    from gateway.prompt.parity_status import Standing
    from gateway.telemetry.metrics import Outcome

    for label, values in (
        ("outcome", set(Outcome)),
        ("state", {one.value for one in WorkerState}),
        ("status", set(STATUSES)),
        ("standing", {one.value for one in Standing}),
        ("result", {"ok", "failed"}),
    ):
        named = {value for found in re.findall(rf'\b{label}=~?"([^"$]*)"', text) for value in found.split("|") if value}
        assert named, f"no query names a value of {label}"
        assert named <= values


def test_every_alert_says_what_it_means_and_what_to_do():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"].strip().endswith((".", "?"))


def test_labels_in_an_alerts_words_are_left_by_its_expression(known):
    for rule in rules():
        labels = problems(promql.parse(rule["expr"]), known)[1]
        assert labels >= set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))), rule["alert"]


def test_the_dashboard_can_be_imported_and_read():
    whole = dashboard()
    variables = {one["name"] for one in whole["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(whole["panels"]))) - {"__rate_interval"} <= variables
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    assert [panel["title"] for panel in whole["panels"] if panel["type"] == "row"] == [
        "Overview",
        "Latency",
        "Routing quality",
        "Workers",
        "Gateway",
    ]
    taken = set()
    for panel in whole["panels"]:
        assert panel["type"] == "row" or panel["description"]
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_legends_name_labels_that_their_query_leaves(known):
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            labels = problems(promql.parse(target["expr"].replace("$__rate_interval", "5m")), known)[1]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target["expr"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_itself_accepts_the_rules():
    done = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("hyperpod", [None, {"cluster_name": "c"}])
def test_prometheus_itself_has_nothing_against_the_metrics(hyperpod):
    text, _ = everything(hyperpod).render(None)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    complaints = [line for line in done.stdout.decode().splitlines() + done.stderr.decode().splitlines() if line]
    allowed = ("non-histogram and non-summary metrics should not have", "abbreviated", "model_")
    assert [line for line in complaints if not any(word in line for word in allowed)] == []
