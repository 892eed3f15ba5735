"""The Grafana dashboard and the alert rules in deploy/: their metrics exist and return data."""

import json
import math
import re
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from benchmarks.requests.targets import free_port

from tests.kit.waiting import wait_until

DEPLOY = Path(__file__).parents[3] / "deploy"
METRIC = re.compile(r"\b(?:keepwarm|process)_\w+")
LIMIT = re.compile(r" (?:[<>]|==) [\d.]+")
VARIABLES = {"$instance": ".*", "$__rate_interval": "20s", "$__range": "20s"}
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - {{job_name: keepwarm, static_configs: [{{targets: ['{target}']}}]}}
"""


def panels():
    """Every query of the dashboard, with its panel's title."""
    found = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return [(panel["title"], each["expr"]) for panel in found for each in panel["targets"]]


def rules():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for rule in group["rules"]]


def test_every_metric_of_panels_and_alerts_exists(live):
    text = live.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    known = {f"{name}_bucket" if kind == "histogram" else name for name, kind in kinds.items()}
    for title, query in panels() + rules():
        named = set(METRIC.findall(query))
        assert named or query.startswith("up{"), title
        assert named <= known, title


def test_panels_do_not_overlap():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


# With Debian's prometheus.


@pytest.mark.soak
def test_rules_fire_when_they_should():
    done = subprocess.run(
        [program("promtool"), "test", "rules", "alerts-test.yml"],
        cwd=DEPLOY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((DEPLOY / "alerts-test.yml").read_text())["tests"]
    fired = {one["alertname"] for each in tested for one in each["alert_rule_test"]}
    assert fired == {name for name, _ in rules()}


@pytest.mark.soak
def test_every_query_returns_data_under_load(serving, tmp_path):
    with serving() as live, loaded(live), prometheus(live, tmp_path) as url:
        time.sleep(25)  # longer than the ranges of the queries
        for title, written in panels() + rules():
            query = runnable(written)
            answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
            assert answer["status"] == "success", (title, answer)
            values = [float(one["value"][1]) for one in answer["data"]["result"]]
            assert not all(map(math.isnan, values)), (title, query)  # also if there is none
        healthy = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in healthy} == {"ok"}


def runnable(query):
    """Over the last seconds, and without the limit of an alert."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return LIMIT.sub("", re.sub(r"\[\d+[mhd]\]", "[20s]", query))


def program(name):
    return shutil.which(name) or pytest.skip(f"needs `{name}`")


@contextmanager
def loaded(live):
    """While inside, conversations of two turns."""
    over = threading.Event()

    def run():
        number = 0
        while not over.is_set():
            said = [{"role": "user", "content": f"The quick brown fox number {number}. " * 40}]
            first = chat(live, said)
            chat(live, [*said, first["choices"][0]["message"], {"role": "user", "content": "And?"}])
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(300)


def chat(live, messages):
    body = {"messages": messages, "max_tokens": 8, "logit_bias": {"2": -100}}
    return live.post("/v1/chat/completions", body).raise_for_status().json()


@contextmanager
def prometheus(live, folder):
    """Scrapes the server; its address."""
    config, port = folder / "prometheus.yml", free_port()
    target = live.url.removeprefix("http://")
    config.write_text(CONFIG.format(rules=DEPLOY / "alerts.yml", target=target))
    command = [program("prometheus"), f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url))
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url):
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False
