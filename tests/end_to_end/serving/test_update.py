"""Rolls out new weights and settings by `serve deploy` while requests run.

No request fails, and each is answered by one version only.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml

from clusters.ray_heads import BIN, SHELL, new_token, ray_head
from clusters.traffic import NUM_CLIENTS, Ask, Traffic, running
from mars_platform.cluster.processes import free_port
from mars_serve.config.key_file import hash_key
from mars_serve.config.settings import ServeSettings
from mars_serve.deploy.proxies import proxy_environment
from rest.rest_requests import CHAT, COMPLETIONS, text_of
from waiting import wait_until

pytestmark = pytest.mark.full
NUM_PROMPTS, NUM_TOKENS, NUM_LONG = 4, 24, 500
NUM_EARLY = 12
"""Number of characters within which the versions' answers differ."""
OLD, NEW = 0, 1
"""Numbers of the versions."""
LONG = Ask(COMPLETIONS, "Totals 7", NUM_LONG, min_tokens=NUM_LONG)
THRESHOLD = 0.93
KEY = "mars-of-this-test"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
WITH_TOKEN = {**SHELL, **new_token()}
_WAIT_S = 240


class Service:
    """A Ray cluster's application, which configuration files deploy and update."""

    def __init__(self, dashboard: str, work: Path) -> None:
        self._dashboard, self._port = dashboard, free_port()
        self._file, self._keys = work / "serve.yaml", work / "keys.yaml"
        entry = {"name": "us", "sha256": hash_key(KEY.encode()), "admin": True}
        self._keys.write_text(yaml.safe_dump({"keys": [entry]}))
        self.address = f"http://127.0.0.1:{self._port}"
        self.running = set[int]()
        """All numbers of running replicas that a deployment was seen with."""

    def deploy(self, model: Path, *, num_replicas: int, num_ingresses: int, **limits: int) -> None:
        engine = {"adaptive_windows": False, "max_num_seqs": 8}
        sizes = {"num_replicas": num_replicas, "num_cpus": 0.5, "num_threads": 1}
        application = {
            "name": "marsray",
            "route_prefix": "/",
            "import_path": "mars_serve.app:application",
            "args": {
                "models": [{"name": "mine", "path": str(model), "engine": engine, **sizes}],
                "keys": {"file": str(self._keys)},
                "limits": limits,
                "proxy": {"num_replicas": num_ingresses},
            },
            "deployments": [{"name": "ingress", "ray_actor_options": {"num_cpus": 1}}],
        }
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": "127.0.0.1", "port": self._port},
            "logging_config": {"log_level": "WARNING", "enable_access_log": False},
            "applications": [application],
        }
        self._file.write_text(yaml.safe_dump(config))
        self.run("deploy", self._file)

    def run(self, *arguments):
        """Run a command of Ray Serve and return its output."""
        command = [BIN / "serve", *arguments, "--address", self._dashboard]
        streams = {"capture_output": True, "text": True}
        done = subprocess.run(command, env=WITH_TOKEN, timeout=_WAIT_S, check=False, **streams)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def application(self):
        """Return the state of the application, with more detail than `serve status` shows."""
        token = {"Authorization": f"Bearer {WITH_TOKEN['RAY_AUTH_TOKEN']}"}
        url = f"{self._dashboard}/api/serve/applications/"
        return httpx.get(url, headers=token, timeout=_WAIT_S).json()["applications"]["marsray"]

    def wait_until_running(self):
        """Wait until no replica starts, stops or drains any more."""
        self._wait_until(lambda shown: shown["status"] == "RUNNING")

    def wait_until_said(self, reason):
        self._wait_until(lambda shown: reason in str(shown))

    def _wait_until(self, holds):
        def is_so() -> bool:
            shown = self.application()
            for deployment in shown["deployments"].values():
                states = [replica["state"] for replica in deployment["replicas"]]
                self.running.add(states.count("RUNNING"))
            return holds(shown)

        wait_until(is_so, _WAIT_S, lambda: str(self.application()))

    def call(self, method, path, *, headers=WITH_KEY, **options):
        url = f"{self.address}{path}"
        return httpx.request(method, url, headers=headers, timeout=_WAIT_S, **options)

    def answer(self, ask):
        made = self.call("POST", ask.path, json=ask.body).raise_for_status()
        return text_of(made.json()["choices"][0])

    def threshold(self):
        """Return the live τ that was set last, and the replicas' live values."""
        state = self.call("GET", "/admin/threshold").raise_for_status().json()["models"]["mine"]
        replicas = [each["confidence_threshold"] for each in state["replicas"].values()]
        return state["confidence_threshold"], replicas


@pytest.fixture(scope="module")
def versions(trained) -> SimpleNamespace:
    """Two checkpoints, and their answers to prompts on which they soon differ."""
    old, new = trained.model, trained.ar_model
    texts = {}
    for number, path in itertools.product(range(10, 99), (COMPLETIONS, CHAT)):
        ask = Ask(path, f"Start at {number}. Steps: -4 +5 +{number % 7} +1", NUM_TOKENS)
        found = ask.of(old), ask.of(new)
        if found[0][:NUM_EARLY] != found[1][:NUM_EARLY]:
            texts[ask] = found
        if len(texts) == NUM_PROMPTS:
            break
    assert {ask.path for ask in texts} == {COMPLETIONS, CHAT}
    return SimpleNamespace(old=old, new=new, texts=texts)


@contextmanager
def serving(kind: str, model: Path, work: Path, **sizes: int) -> Iterator[Service]:
    """Run the service behind one of Ray Serve's proxies, with a live τ that was set by hand."""
    described = {"models": [{"name": "mine", "path": str(model)}], "proxy": {"kind": kind}}
    with (
        proxy_environment(ServeSettings.model_validate(described)) as environment,
        ray_head({**WITH_TOKEN, **environment}, num_cpus=8) as dashboard,
    ):
        service = Service(dashboard, work)
        service.deploy(model, **sizes)
        service.wait_until_running()
        service.running.clear()
        body = {"confidence_threshold": THRESHOLD}
        service.call("PUT", "/admin/threshold", json=body).raise_for_status()
        yield service


class Story:
    """Changes of a service, with the requests before, during and after each change."""

    def __init__(self, service: Service, versions: SimpleNamespace) -> None:
        self._service = service
        self._texts = {**versions.texts, LONG: [service.answer(LONG)]}
        self.phases = dict[str, SimpleNamespace]()

    @contextmanager
    def phase(self, name: str, num_streams: int = 0) -> Iterator[None]:
        """Send requests before, during and after the change that the block makes."""
        asks = [ask for ask in self._texts if ask != LONG]
        traffic = Traffic(self._service.address, WITH_KEY, asks, [LONG] * num_streams)
        with running(traffic):
            wait_for_answers(traffic)
            begun_s = time.monotonic()
            yield
            settled_s = time.monotonic()
            wait_for_answers(traffic)
        self.phases[name] = SimpleNamespace(
            answers=traffic.answers,
            statuses=traffic.statuses,
            begun_s=begun_s,
            settled_s=settled_s,
        )

    def learn(self) -> None:
        """Record the new version's answer to the long prompt while nothing else runs."""
        self._texts[LONG].append(self._service.answer(LONG))

    def version_of(self, answer):
        """Return the version with this answer; None if neither has it."""
        texts = self._texts[answer.ask]
        return texts.index(answer.text) if answer.text in texts else None

    def versions(self, name):
        """Return the versions that answered in a phase, and those after the change."""
        phase = self.phases[name]
        late = (each for each in phase.answers if each.begun_s > phase.settled_s)
        return self._versions_of(phase.answers), self._versions_of(late)

    def _versions_of(self, answers):
        return {self.version_of(each) for each in answers}


def wait_for_answers(traffic):
    """Wait until nearly all clients have an answer to a request that they send from now on."""
    needed = len(traffic.answers) + 3 * NUM_CLIENTS
    wait_until(lambda: len(traffic.answers) >= needed, _WAIT_S, lambda: "no more answers")


def assert_none_failed(story):
    for name, phase in story.phases.items():
        assert not [each for each in phase.answers if each.failure], name
        assert {status for _, status in phase.statuses} == {200}, name
        assert len(phase.statuses) == 2


@pytest.fixture(scope="module")
def python(versions, tmp_path_factory) -> Story:
    """An update of weights and settings of one replica, behind Ray Serve's own proxy."""
    one = {"num_replicas": 1, "num_ingresses": 1}
    with serving("python", versions.old, tmp_path_factory.mktemp("python"), **one) as service:
        story = Story(service, versions)
        with story.phase("update", num_streams=2):
            service.deploy(versions.new, num_replicas=1, num_ingresses=2, output_tokens=NUM_LONG)
            service.wait_until_running()
        story.learn()
        body = {**LONG.body, "max_tokens": NUM_LONG + 1}
        story.refusal = service.call("POST", LONG.path, json=body).json()["error"]
        story.threshold = service.threshold()
        story.running = service.running
    return story


def test_weights_and_settings_change_together(python):
    assert_none_failed(python)
    assert python.versions("update") == ({OLD, NEW}, {NEW})
    assert python.refusal["param"] == "max_tokens"
    assert python.threshold == (THRESHOLD, [THRESHOLD])
    assert min(python.running) == 1


def test_streams_that_the_old_version_began_are_ended_by_it(python):
    """Streams continue when their replica, the only one, takes no more requests."""
    answers = python.phases["update"].answers
    old = [each for each in answers if python.version_of(each) == OLD]
    last_s = max(each.begun_s for each in old if each.ask != LONG)
    assert any(each.ended_s > last_s for each in old if each.ask == LONG)


@pytest.fixture(scope="module")
def haproxy(versions, tmp_path_factory) -> Story:
    """An update, three deployments that cannot be served, and a rollback, behind HAProxy."""
    work = tmp_path_factory.mktemp("haproxy")
    damaged = shutil.copytree(versions.new, work / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    two = {"num_replicas": 2, "num_ingresses": 2}
    with serving("haproxy", versions.old, work, **two) as service:
        story = Story(service, versions)
        with story.phase("update", num_streams=2):
            service.deploy(versions.new, **two)
            service.wait_until_running()
        story.learn()
        with story.phase("unknown"):
            service.deploy(versions.new, **two, outputs=1)
            service.wait_until_said("args: limits.outputs: unknown key")
        with story.phase("missing"):
            service.deploy(work / "missing", **two)
            service.wait_until_said(f"model: there is no directory {work / 'missing'}")
        with story.phase("damaged"):
            service.deploy(damaged, **two)
            service.wait_until_said(f"model: weights of {damaged} cannot be loaded")
        story.status = service.run("status")
        with story.phase("rollback"):
            service.deploy(versions.old, **two)
            service.wait_until_running()
        story.threshold = service.threshold()
        story.stranger = service.call("GET", "/v1/models", headers={}).status_code
        story.running = service.running
    return story


def test_no_request_fails(haproxy):
    assert_none_failed(haproxy)
    assert min(haproxy.running) == 2


def test_after_an_update_only_the_new_version_answers(haproxy):
    assert haproxy.versions("update") == ({OLD, NEW}, {NEW})


@pytest.mark.parametrize("name", ["unknown", "missing", "damaged"])
def test_a_deployment_that_cannot_be_served_changes_nothing(haproxy, name):
    assert haproxy.versions(name) == ({NEW}, {NEW})


def test_the_status_names_the_reason_of_a_failed_deployment(haproxy):
    assert re.search(r"UserError: model: weights of \S+/damaged cannot be loaded", haproxy.status)


def test_after_a_rollback_only_the_old_version_answers(haproxy):
    assert haproxy.versions("rollback") == ({OLD, NEW}, {OLD})


def test_the_live_threshold_and_the_keys_stay(haproxy):
    assert haproxy.threshold == (THRESHOLD, [THRESHOLD, THRESHOLD])
    assert haproxy.stranger == 401
