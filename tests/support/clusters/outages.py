"""Runs a service on two hosts, cuts the power of one, and records what clients see."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from clusters.hosts import Cluster, Host
from clusters.ray_heads import BIN
from waiting import wait_until

NUM_STREAMS = 8
"""Number of streams through each proxy."""
PROMPTS = ["0 Tot", "1 Tot"]
READ_S = 35
"""Seconds of silence after which a client gives a request up."""
_NUM_TOKENS = 1500  # takes some seconds
_WAIT_S = 120


@dataclass
class Stream:
    """A stream that was running when the power was cut."""

    proxy: Host
    prompt: str
    id: str
    text: str = ""
    end: str = "none"
    """``whole``, ``error`` with its code, ``broken``, or ``silent`` if the client gave it up."""


@dataclass
class Outage:
    """Everything that clients saw until another host had taken the lost one's place."""

    alone: dict[str, str]
    """Output of each prompt while nothing else runs."""
    streams: list[Stream]
    kept: Host
    lost: Host
    ids_of_kept: set[str] = field(default_factory=set)
    """Ids of the requests that the surviving host's ingress handled."""
    asked: list[tuple[int, float]] = field(default_factory=list)
    """Status and seconds of requests to the surviving host's proxy meanwhile."""
    after: list[tuple[str, tuple[int, str]]] = field(default_factory=list)
    """Prompts with status and text through both proxies, once there were two hosts again."""

    def ends(self, proxy: Host, *, has_ingress: bool) -> list[str]:
        """Return the sorted ends of a proxy's streams.

        Args:
            proxy: Host of the proxy.
            has_ingress: Whether the surviving host's ingress handled the streams.
        """
        mine = [each for each in self.streams if each.proxy is proxy]
        return sorted(each.end for each in mine if (each.id in self.ids_of_kept) == has_ingress)


def outage_of(cluster: Cluster, model: Path, directory: Path) -> Outage:
    """Serve a model on the cluster's two workers and cut the power of the second one."""
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(_config_of(model)))
    command = [BIN / "serve", "deploy", "--address", cluster.dashboard, file]
    subprocess.run(command, env=cluster.shell, check=True, capture_output=True, timeout=60)
    _wait_until_spread(cluster, *cluster.workers)
    return asyncio.run(_observed(cluster))


async def _observed(cluster: Cluster) -> Outage:
    kept, lost = cluster.workers
    async with httpx.AsyncClient(timeout=httpx.Timeout(_WAIT_S, read=READ_S)) as client:
        alone = {}
        for prompt in PROMPTS:
            response = await client.post(_url_of(kept), json=_body_of(prompt, _NUM_TOKENS))
            alone[prompt] = response.json()["choices"][0]["text"]
        streams = [
            Stream(proxy, PROMPTS[index % len(PROMPTS)], f"{proxy.address}/{index}")
            for proxy in (kept, lost)
            for index in range(NUM_STREAMS)
        ]
        outage = Outage(alone, streams, kept, lost)
        reading = await _begin(client, streams)
        # These leave the proxy with idle connections to the host that will be lost.
        await asyncio.gather(*(_answer(client, kept, prompt) for prompt in 4 * PROMPTS))
        cluster.cut_power(lost)
        ended = asyncio.Event()
        asking = asyncio.create_task(_ask_on(client, outage, ended))
        new = await asyncio.to_thread(cluster.add_worker)
        await asyncio.to_thread(_wait_until_spread, cluster, kept, new)
        ended.set()
        await asyncio.gather(asking, *reading)
        proxies = [(proxy, prompt) for proxy in (kept, new) for prompt in PROMPTS]
        outage.after = [(prompt, await _answer(client, proxy, prompt)) for proxy, prompt in proxies]
    outage.ids_of_kept = _logged_on(kept)
    return outage


# --- the service ----------------------------------------------------------------------------------


def _config_of(model: Path) -> dict[str, Any]:
    """Return a configuration of Ray Serve with one ingress and one replica on each worker."""
    engine = {"adaptive_windows": False, "max_num_seqs": 16}
    sizes = {"num_replicas": 2, "num_cpus": 1, "num_threads": 1}
    one_a_host = {"max_replicas_per_node": 1}
    deployed = {
        "name": "marsray",
        "route_prefix": "/",
        "import_path": "mars_serve.app:application",
        "args": {
            "models": [{"name": "mine", "path": str(model), "engine": engine, **sizes}],
            "insecure": True,
            "proxy": {"num_replicas": 2},
            "drain_s": 30,
        },
        "deployments": [
            {"name": "ingress", "ray_actor_options": {"num_cpus": 1}, **one_a_host},
            {"name": "model-0-mine", **one_a_host},
        ],
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},  # noqa: S104
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [deployed],
    }


def _wait_until_spread(cluster: Cluster, *hosts: Host) -> None:
    """Wait until each host, and no other, has a replica of each deployment and a ready proxy."""

    def is_spread() -> bool:
        expected = sorted(host.address for host in hosts)
        places = list(_places_of(cluster).values())
        return places == [expected, expected] and all(_is_ready(host) for host in hosts)

    wait_until(is_spread, _WAIT_S, lambda: str(_application_of(cluster)))


def _application_of(cluster: Cluster) -> dict[str, Any]:
    url = f"{cluster.dashboard}/api/serve/applications/"
    answer = httpx.get(url, headers=cluster.headers, timeout=30)
    found: dict[str, Any] = answer.json()["applications"].get("marsray", {"deployments": {}})
    return found


def _places_of(cluster: Cluster) -> dict[str, list[str]]:
    """Return the addresses of the hosts with running replicas, by deployment."""
    return {
        name: sorted(each["node_ip"] for each in found["replicas"] if each["state"] == "RUNNING")
        for name, found in _application_of(cluster)["deployments"].items()
    }


def _is_ready(proxy: Host) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(_url_of(proxy, "/-/healthz"), timeout=5).status_code == httpx.codes.OK
    return False


def _logged_on(host: Host) -> set[str]:
    """Return the ids of the requests in the log of the host's ingress."""
    lines = (
        line
        for file in host.files.glob("session_2*/logs/worker-*.err")
        for line in file.read_text(errors="replace").splitlines()
    )
    return {json.loads(line)["request_id"] for line in lines if line.startswith('{"time"')}


# --- its clients ----------------------------------------------------------------------------------


def _body_of(prompt: str, num_tokens: int, **options: Any) -> dict[str, Any]:
    sizes = {"max_tokens": num_tokens, "min_tokens": num_tokens}
    return {"model": "mine", "mode": "ar", "temperature": 0, "prompt": prompt, **sizes, **options}


def _url_of(proxy: Host, path: str = "/v1/completions") -> str:
    return f"http://{proxy.address}:8000{path}"


async def _answer(client: httpx.AsyncClient, proxy: Host, prompt: str) -> tuple[int, str]:
    """Send a short request; returns its status and text."""
    response = await client.post(_url_of(proxy), json=_body_of(prompt, 8))
    is_served = response.status_code == httpx.codes.OK
    text = response.json()["choices"][0]["text"] if is_served else response.text
    return response.status_code, text


async def _ask_on(client: httpx.AsyncClient, outage: Outage, ended: asyncio.Event) -> None:
    """Send a request every half second without waiting for earlier answers."""

    async def ask(prompt: str) -> None:
        began_s = time.monotonic()
        status, _ = await _answer(client, outage.kept, prompt)
        outage.asked.append((status, time.monotonic() - began_s))

    async with asyncio.TaskGroup() as asking:
        while not ended.is_set():
            asking.create_task(ask(PROMPTS[len(outage.asked) % len(PROMPTS)]))
            await asyncio.sleep(0.5)


async def _begin(client: httpx.AsyncClient, streams: list[Stream]) -> list[asyncio.Task[None]]:
    """Begin the streams one after another, which spreads them evenly."""
    reading = []
    for stream in streams:
        begun = asyncio.Event()
        reading.append(asyncio.create_task(_read(client, stream, begun)))
        await begun.wait()
    return reading


async def _read(client: httpx.AsyncClient, stream: Stream, begun: asyncio.Event) -> None:
    body = _body_of(stream.prompt, _NUM_TOKENS, stream=True)
    request = client.stream(
        "POST", _url_of(stream.proxy), json=body, headers={"X-Request-Id": stream.id}
    )
    try:
        async with request as response:
            async for line in response.aiter_lines():
                _take(stream, line)
                begun.set()
    except httpx.ReadTimeout:
        stream.end = "silent"
    except httpx.TransportError:
        stream.end = "broken"
    finally:
        begun.set()


def _take(stream: Stream, line: str) -> None:
    if line == "data: [DONE]":
        assert stream.end == "length"
        stream.end = "whole"
    elif line:
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            stream.end = f"error {event['error']['code']}"
        else:
            (choice,) = event["choices"]
            stream.text += choice["text"]
            stream.end = choice["finish_reason"] or stream.end
