from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest

from mars_autoscale.policy.reports import Phase, ReplicaReport
from mars_platform import __version__
from mars_serve.engine.ipc.client import EngineDied
from mars_serve.http.endpoints.information import Readiness
from rest.api_keys import key_entry
from rest.rest_server import BrokenBackend, SingleEngineBackend, app_of, client_of, served


async def test_health_and_version_are_reported(client):
    for path in ("/health", "/ping"):
        assert (await client.get(path)).json() == {"status": "ok"}
    assert (await client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/v1/models"])
async def test_what_can_be_read_answers_head(client, path):
    assert (await client.head(path)).status_code == 200


async def test_ready_reports_every_replica(client):
    response = await client.get("/ready")
    body = response.json()
    assert (response.status_code, body["status"]) == (200, "ready")
    assert body["models"].keys() == {"mars", "plain"}
    (state,) = body["models"]["mars"]
    assert (state["replica"], state["status"]["num_pages"]) == ("only", 128)
    Readiness.model_validate_json(response.text)  # as its schema says


async def test_an_overdue_replica_is_named_while_another_answers(mars, loops):
    class Overdue(SingleEngineBackend):
        async def replicas(self) -> list[ReplicaReport]:
            (found,) = await super().replicas()
            return [found, replace(found, replica="silent", phase=Phase.OVERDUE)]

    async with client_of(app_of(served("mars", mars, Overdue(loops["mars"])))) as client:
        body = (await client.get("/ready")).json()
    assert body["status"] == "ready"
    states = {each["replica"]: each["overdue"] for each in body["models"]["mars"]}
    assert states == {"only": False, "silent": True}


async def test_replicas_are_asked_once_a_second_however_many_ask_without_a_key(mars, loops):
    class Counted(SingleEngineBackend):
        num_asked = 0

        async def replicas(self) -> list[ReplicaReport]:
            self.num_asked += 1
            return await super().replicas()

    backend = Counted(loops["mars"])
    app = app_of(served("mars", mars, backend), keys={"entries": [key_entry("one")]})
    async with client_of(app) as client:
        for response in await asyncio.gather(*(client.get("/ready") for _ in range(76))):
            assert response.status_code == 200
    assert 1 <= backend.num_asked < 10  # as many seconds as a busy machine may take


async def test_not_ready_while_a_model_has_no_replica(models, mars):
    down = served("down", mars, BrokenBackend(EngineDied("it has stopped")))
    async with client_of(app_of(*models, down)) as client:
        response = await client.get("/ready")
        assert (response.status_code, response.json()["status"]) == (503, "not_ready")
        assert response.json()["models"]["down"] == []
        assert response.json()["message"].startswith("no replica of a model has started: ")
        assert (await client.get("/health")).status_code == 200


async def test_the_openai_client_lists_the_models(official, mars_dir):
    entries = {model.id: model async for model in await official.models.list()}
    assert entries.keys() == {"mars", "plain"}
    mars, plain = ((entries[name].model_extra or {})["mars"] for name in ("mars", "plain"))
    assert mars == {"modes": ["threshold", "exact", "ar"], "block_size": 4, "adapter": None}
    assert plain == {"modes": ["ar"], "block_size": None, "adapter": None}
    assert (entries["mars"].model_extra or {})["root"] == "mars"  # not the server's path
    assert await official.models.retrieve("mars") == entries["mars"]


@pytest.mark.parametrize("name", ["nobody", "some/one"])
async def test_an_unknown_model_is_not_found(official, name):
    with pytest.raises(openai.NotFoundError, match=f"there is no '{name}' here") as caught:
        await official.models.retrieve(name)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_models_name_may_contain_slashes(models, mars):
    named = served("some/one", mars, models[0].backend)
    async with client_of(app_of(named)) as client:
        assert (await client.get("/v1/models/some/one")).json()["id"] == "some/one"
