from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from ladders import threshold_rung
from mars_autoscale.audit.counts import AuditCounts, AuditKey
from mars_autoscale.audit.drift import Drift
from mars_autoscale.model.capacity import AR, Capacity
from mars_autoscale.model.expectations import Expectation
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.policy.decision import AutoscalerDecision, Reason
from mars_autoscale.policy.lengths import counts_of
from mars_autoscale.policy.outer_loop import AutoscalingBasis, OuterLoop
from mars_autoscale.policy.reports import IngressReport, RequestCounts
from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier
from mars_serve.config.served import Explanation, PublishedThreshold
from mars_serve.http.endpoints.audit import AuditedOutputs, Audits
from mars_serve.http.endpoints.autoscaler import Autoscalers
from replica_reports import report_of
from rest.rest_server import SingleEngineBackend, app_of, client_of, served


@pytest.fixture
async def client(client: Any) -> Any:
    yield client
    await client.put("/admin/threshold", json={"confidence_threshold": 0.95})


async def test_the_threshold_of_all_models_is_changed(client):
    before = (await client.get("/admin/threshold")).json()["models"]
    after = (await client.put("/admin/threshold", json={"confidence_threshold": 0.7})).json()
    assert after == (await client.get("/admin/threshold")).json()
    for name in ("mars", "plain"):
        live = after["models"][name]
        assert live["confidence_threshold"] == 0.7
        assert live["version"] > before[name]["version"]
        state = {"confidence_threshold": 0.7, "version": live["version"]}
        assert live["replicas"] == {"only": state}


async def test_the_threshold_of_one_model_is_changed(client):
    body = {"model": "mars", "confidence_threshold": 0.6}
    changed = (await client.put("/admin/threshold", json=body)).json()["models"]
    assert changed.keys() == {"mars"}
    states = (await client.get("/admin/threshold")).json()["models"]
    assert states["mars"] == changed["mars"]
    assert states["plain"]["confidence_threshold"] == 0.95


async def test_running_requests_follow_down_to_their_floor(client):
    body = {"model": "mars", "prompt": "What is 3", "max_tokens": 120, "logit_bias": {"2": -100}}
    body["service_tier"] = "flex"  # the floor of this tier is 0.7

    async def change() -> None:
        for threshold in cycle((1.0, 0.01)):
            await client.put("/admin/threshold", json={"confidence_threshold": threshold})
            await asyncio.sleep(0.005)

    changing = asyncio.create_task(change())
    for _ in range(50):  # on a busy machine a request may run between two changes
        mars = (await client.post("/v1/completions", json=body)).json()["mars"]
        assert mars["min_confidence_threshold"] >= 0.7
        if mars["min_confidence_threshold"] < mars["confidence_threshold"] < 1:
            break
    changing.cancel()
    assert mars["min_confidence_threshold"] == 0.7 < mars["confidence_threshold"] < 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"confidence_threshold": 0}, 400, "confidence_threshold"),
        ({"confidence_threshold": 1.01}, 400, "confidence_threshold"),
        ({"confidence_threshold": True}, 400, "confidence_threshold"),
        ({"confidence_threshold": None}, 400, "confidence_threshold"),
        ({}, 400, "confidence_threshold"),
        ({"confidence_threshold": 0.5, "model": "nobody"}, 404, "model"),
        ({"confidence_threshold": 0.5, "models": "mars"}, 400, "models"),
    ],
)
async def test_an_invalid_change_is_refused_and_has_no_effect(client, body, status, param):
    response = await client.put("/admin/threshold", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["message"].startswith(f"{param}: ")
    states = (await client.get("/admin/threshold")).json()["models"]
    assert {state["confidence_threshold"] for state in states.values()} == {0.95}


# Autoscaled models

LADDER = (AR, threshold_rung(0.95, 1.7, 1.5, 3), threshold_rung(0.9, 2.0, 3.0, 3))
CAPACITY = Capacity(linear_step_time(0.1, 1000), LADDER, 4, 1_000.0)
PLAN = AutoscalingBasis(CAPACITY, OuterSettings(max_replicas=3, cold_start_s=30))


def decided() -> Explanation:
    """Return the explanation of an outer loop that has watched a replica for ten seconds."""
    control = OuterLoop()
    for i in range(21):
        counts = RequestCounts(20 * i, 0, counts_of([40] * i, num_begun=2 * i))
        control.hear_ingress(1_000.0 + i / 2, IngressReport("i", 2 * i, 20 * i))
        report = report_of("r1", 4, 2, LiveDecoding(0.95, 0.9), counts, gain=1.6, loss=1.5)
        control.hear(1_000.0 + i / 2, report, PLAN)
        if i % 5 == 0:
            question = control.question(1_000.0 + i / 2)
            control.commit(question[0], *control.answer(*question))
    control.hold(control.question(1_011.0)[0], "ZeroDivisionError: no tokens")
    return Explanation(control.basis, list(control.records))


@pytest.fixture
async def governed(mars: Checkpoint, loops: dict[str, Any]) -> AsyncIterator[Any]:
    """Make a client of an autoscaled and a fixed model: ``governed(explanation)``."""

    class Governed(SingleEngineBackend):  # type: ignore[misc]
        explanation: Explanation | None = None

        async def set_live_threshold(self, threshold: float | None) -> PublishedThreshold:
            if threshold is not None:
                live = await super().set_live_threshold(threshold)
            else:
                live = self.live
            version, is_pinned = live.version + 1, threshold is not None
            self.live = PublishedThreshold(version, live.threshold, None, is_pinned)
            return self.live

        async def autoscaler(self) -> Explanation | None:
            return self.explanation

        async def trust_frontier(self) -> None:
            assert self.explanation is not None
            drift = Drift(self.explanation.drift.expectations)
            self.explanation = replace(self.explanation, drift=drift)

    backend = Governed(loops["mars"])
    autoscaled = served("mars", mars, backend, autoscaling={"max_replicas": 3})
    app = app_of(autoscaled, served("plain", mars, SingleEngineBackend(loops["mars"])))
    before = loops["mars"].live
    async with client_of(app) as client:

        def make(explanation: Explanation | None = None) -> Any:
            backend.explanation = explanation
            return client

        yield make
    loops["mars"].set_live(before)


async def autoscalers(client: Any) -> dict[str, Any]:
    response = await client.get("/admin/autoscaler")
    assert response.status_code == 200, response.text
    Autoscalers.model_validate(response.json())
    models: dict[str, Any] = response.json()["models"]
    return models


async def test_the_autoscalers_plan_is_reported(governed):
    models = await autoscalers(governed(decided()))
    assert models["plain"] is None
    plan = models["mars"]["plan"]
    ladder = plan.pop("ladder")
    assert plan == {
        "min_replicas": 1,
        "max_replicas": 3,
        "cold_start_s": 30.0,
        "num_slots": 4,
        "tokens_per_s": pytest.approx(4 / 0.1004),
        "prefill_tokens_per_s": 1_000.0,
        "frontier_refused": None,
        "frontier_mismatch": None,
    }
    assert [rung["confidence_threshold"] for rung in ladder] == [1.0, 0.95, 0.9]
    assert [rung["loss"] for rung in ladder] == [0.0, 1.5, 3.0]
    assert ladder[0]["gain"] == 1.0
    assert ladder[1]["gain"] == pytest.approx(CAPACITY.gain(LADDER[1]))
    assert ladder[1]["tokens_per_forward"] == 1.7
    assert ladder[1]["break_even_batch"] > 100


async def test_the_reported_ladder_is_the_one_that_replicas_use(governed):
    """Replicas leave out rungs with a gain below 5%."""
    ladder = (LADDER[0], threshold_rung(0.97, 1.03, 0.01, 0), *LADDER[1:])
    capacity = Capacity(linear_step_time(0.1, 1000), ladder, 4, 1_000.0)
    assert ladder[1] in capacity.ladder(1.0)
    explanation = Explanation(AutoscalingBasis(capacity, PLAN.settings), [])
    plan = (await autoscalers(governed(explanation)))["mars"]["plan"]
    walked = capacity.ladder(InnerSettings().min_gain)
    assert [rung["confidence_threshold"] for rung in plan["ladder"]] == [
        rung.threshold for rung in walked
    ]


async def test_the_autoscalers_decisions_are_reported(governed):
    explanation = decided()
    decisions = (await autoscalers(governed(explanation)))["mars"]["decisions"]
    assert len(decisions) == 6
    assert all(each.keys() == AutoscalerDecision.model_fields.keys() for each in decisions)
    assert [each["time_s"] for each in decisions] == [1_000, 1_002.5, 1_005, 1_007.5, 1_010, 1_011]
    first, *_, latest, held = decisions
    assert (first["requests_per_s"], first["reason"]) == (None, Reason.HELD)
    assert latest["requests_per_s"] == 4.0
    assert latest["prompt_tokens_per_s"] == 40.0
    assert latest["mean_output_tokens"] == pytest.approx(40.0, rel=0.1)
    decode_tokens_per_s = 4.0 * latest["mean_output_tokens"]
    assert latest["decode_tokens_per_s"] == pytest.approx(decode_tokens_per_s)
    assert (latest["num_running"], latest["num_waiting"]) == (4, 2)
    assert (latest["threshold"], latest["flex_threshold"]) == (0.95, 0.9)
    assert latest["reason"] in set(Reason)
    assert latest["num_replicas"] == explanation.records[-2].num_replicas
    assert (held["reason"], held["problem"]) == ("held", "ZeroDivisionError: no tokens")


@pytest.mark.parametrize("explanation", [None, Explanation(None, [])])
async def test_there_is_no_plan_before_a_replica_has_reported(governed, explanation):
    models = await autoscalers(governed(explanation))
    assert models == {"mars": {"plan": None, "decisions": []}, "plain": None}


async def test_the_reason_for_refusing_a_frontier_is_reported(governed):
    capacity = Capacity(linear_step_time(0.1, 1000), LADDER[:1], 4, 1_000.0)
    refused = AutoscalingBasis(capacity, PLAN.settings, refused="frontier.json: wrong checksum")
    plan = (await autoscalers(governed(Explanation(refused, []))))["mars"]["plan"]
    assert plan["frontier_refused"] == "frontier.json: wrong checksum"
    assert [rung["confidence_threshold"] for rung in plan["ladder"]] == [1.0]


async def test_a_threshold_is_pinned_and_returned_to_the_autoscaler(governed):
    client = governed()

    async def put(threshold: float | None) -> dict[str, Any]:
        body = {"model": "mars", "confidence_threshold": threshold}
        response = await client.put("/admin/threshold", json=body)
        assert response.status_code == 200, response.text
        state: dict[str, Any] = response.json()["models"]["mars"]
        return state

    before = (await client.get("/admin/threshold")).json()["models"]
    assert (before["mars"]["is_automatic"], before["plain"]["is_automatic"]) == (True, False)
    pinned = await put(0.8)
    assert (pinned["confidence_threshold"], pinned["is_automatic"]) == (0.8, False)
    given_back = await put(None)
    assert given_back["is_automatic"]
    assert given_back["version"] > pinned["version"] > before["mars"]["version"]


@pytest.mark.parametrize("model", [{}, {"model": "plain"}])
async def test_the_threshold_of_a_model_without_autoscaler_cannot_be_returned(governed, model):
    client = governed()
    before = (await client.get("/admin/threshold")).json()
    response = await client.put("/admin/threshold", json={"confidence_threshold": None, **model})
    message = client.error_of(response, 400, "confidence_threshold")
    assert "model 'plain' has no autoscaler to give it back to; give a number" in message
    assert (await client.get("/admin/threshold")).json() == before


# Audits

TALLY = {
    AuditKey(Tier.FLEX, 0.8, True): AuditCounts(400, 20_000, 100),
    AuditKey(Tier.DEFAULT, 0.9, False): AuditCounts(3, 60, 0),
    AuditKey(Tier.DEFAULT, 0.9, False, group=3): AuditCounts(1, 40, 0),
}


def audited() -> Explanation:
    drift = Drift((Expectation(0.8, 0.001),)).heard(TALLY, 1_700.0)
    return Explanation(None, [], drift)


async def audits_of(client: Any, response: Any = None) -> dict[str, Any]:
    response = response or await client.get("/admin/audit")
    assert response.status_code == 200, response.text
    Audits.model_validate(response.json())
    models: dict[str, Any] = response.json()["models"]
    return models


async def test_audits_are_reported_with_intervals_and_what_was_expected(governed):
    models = await audits_of(governed(audited()))
    assert models["plain"] is None
    mars = models["mars"]
    assert mars["share"] == 0.05
    assert (mars["is_refuted"], mars["refuted_s"]) == (True, 1_700.0)
    assert mars["evidence"] > 1
    assert mars["loss_factor"] == pytest.approx((100 + 10) / (20 + 10))
    other, plain = mars["audited"]
    assert all(each.keys() == AuditedOutputs.model_fields.keys() for each in mars["audited"])
    assert (plain["tier"], plain["confidence_threshold"]) == ("flex", 0.8)
    assert (plain["sampling"], other["sampling"]) == ("plain", "other")
    assert plain["divergence"]["value"] == pytest.approx(5.0)
    assert plain["divergence"]["low"] < 5.0 < plain["divergence"]["high"]
    assert plain["expected_divergence"] == 1.0
    assert other["divergence"]["value"] == 0.0
    assert (other["num_outputs"], other["num_tokens"]) == (4, 100)
    assert other["expected_divergence"] is None


async def test_what_audits_have_said_is_forgotten_on_request(governed):
    client = governed(audited())
    refused = await client.delete("/admin/audit", params={"model": "nobody"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
    models = await audits_of(client, await client.delete("/admin/audit", params={"model": "mars"}))
    assert models.keys() == {"mars"}
    assert not models["mars"]["is_refuted"]
    assert models["mars"]["audited"] == []
    assert (await audits_of(client))["mars"] == models["mars"]


async def test_there_is_no_audit_before_a_replica_has_reported(governed):
    mars = (await audits_of(governed(None)))["mars"]
    assert (mars["is_refuted"], mars["evidence"], mars["audited"]) == (False, 0.0, [])
