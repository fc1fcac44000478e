import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import ray

from mars_platform.cluster.jobs import ADDRESS_VARIABLES, Jobs, Unreachable, find_address
from mars_platform.cluster.processes import free_port
from mars_platform.errors import UserError


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch):
    monkeypatch.setattr("mars_platform.cluster.jobs._POLL_S", 0.01)


@pytest.fixture(autouse=True)
def _no_address(monkeypatch):
    for name in ADDRESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def serving(answer):
    """Yield the address of a server; ``answer(path)`` returns the status and text of a GET."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# --- the address ----------------------------------------------------------------------------------


def test_without_an_address_the_error_names_option_and_variables():
    with pytest.raises(UserError, match=r"--address: .* RAY_API_SERVER_ADDRESS or RAY_ADDRESS"):
        find_address(None)


def test_a_given_address_has_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://c:1")
    assert find_address(None) == "http://c:1"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://b:1")
    assert find_address(None) == "http://b:1"
    assert find_address("http://a:1/") == "http://a:1"
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Unreachable, match=f"{address} does not answer"):
        Jobs(address)
    assert os.environ["RAY_ADDRESS"] == "http://c:1"


def test_an_address_that_is_no_url_is_refused():
    with pytest.raises(UserError, match="head:8265 is no URL; write http://head:8265"):
        find_address("head:8265")


def test_a_server_that_is_not_ray_is_refused():
    with (
        serving(lambda path: (404, "")) as address,
        pytest.raises(UserError, match=f"{address} is not the dashboard of a Ray head"),
    ):
        Jobs(address)


# --- following ------------------------------------------------------------------------------------

JOB = "mine-20260102-120000"
PROXYS = "<html>\n<head><title>no</title></head>\n</html>\n"
LOG = (200, json.dumps({"logs": "all of it\n"}))
RAYS = "Traceback (most recent call last):\n  ...\nRuntimeError: the GCS is gone"


def job_list(status):
    job = {
        "type": "SUBMISSION",
        "submission_id": JOB,
        "entrypoint": "marsray train recipe.yaml",
        "status": status,
        "metadata": {"marsray_run": "mine", "marsray_output": "/shared/mine"},
    }
    return 200, json.dumps([job])


def dashboard(lists, logs):
    """Answers of a head's dashboard: those of each list in turn, the last one repeatedly."""
    left = {"/api/jobs/": list(lists), f"/api/jobs/{JOB}/logs": list(logs)}

    def answer(path):
        if path == "/api/version":
            return 200, json.dumps({"ray_version": ray.__version__})
        answers = left.get(path, [(404, "no connections that stay open")])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    return answer


def followed(lists, logs=(LOG,)):
    """Follow the job; its last status, and the text that was passed on."""
    written = []
    with serving(dashboard(lists, logs)) as address:
        job = Jobs(address).follow(JOB, written.append)
    return job.status, "".join(written)


@pytest.mark.parametrize(("status", "text"), [(502, PROXYS), (503, "no upstream"), (500, RAYS)])
def test_passing_server_errors_do_not_end_following(status, text):
    lists = [(status, text), job_list("RUNNING"), (status, text), job_list("SUCCEEDED")]
    assert followed(lists, [(status, text), LOG]) == ("SUCCEEDED", "all of it\n")


def test_lasting_server_errors_end_following(monkeypatch):
    monkeypatch.setattr("mars_platform.cluster.jobs._LOST_S", 1.0)
    with pytest.raises(Unreachable, match=r"has not answered for 1 s; the job goes on: .*--follow"):
        followed([job_list("RUNNING"), (502, PROXYS)])


def test_following_ends_although_the_log_is_lost():
    assert followed([job_list("FAILED")], [(500, RAYS)]) == ("FAILED", "")


@pytest.mark.parametrize("status", [400, 404])
def test_an_error_of_the_client_ends_following(status):
    with pytest.raises(RuntimeError, match=f"status code {status}: what is that"):
        followed([job_list("RUNNING"), (status, "what is that"), job_list("SUCCEEDED")])
