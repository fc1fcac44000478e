from __future__ import annotations

from typing import Any

import pytest

from mars_platform.checkpoint import Checkpoint
from mars_serve.engine.loop import EngineLoop

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "What is 3 plus 4?"
MESSAGES = [{"role": "user", "content": PROMPT}]
COMPLETION = {"model": "mars", "prompt": PROMPT, "max_tokens": 24}
CONVERSATION = {"model": "mars", "messages": MESSAGES, "max_tokens": 24}
BODIES = {COMPLETIONS: COMPLETION, CHAT: CONVERSATION}


@pytest.mark.parametrize(
    ("fields", "mode", "threshold"),
    [
        ({}, "threshold", 0.95),
        ({"confidence_threshold": 0.9}, "threshold", 0.9),
        ({"confidence_threshold": 0.1, "min_confidence_threshold": 0.6}, "threshold", 0.6),
        ({"confidence_threshold": 0.9, "min_confidence_threshold": 0.6}, "threshold", 0.9),
        ({"min_confidence_threshold": 0.99}, "threshold", 0.99),
        ({"confidence_threshold": 1}, "threshold", 1.0),
        ({"mode": "threshold"}, "threshold", 0.95),
        ({"mode": "ar"}, "ar", 1.0),
        ({"mode": "ar", "confidence_threshold": 0.2}, "ar", 1.0),
        ({"model": "plain"}, "ar", 1.0),
        ({"model": "plain", "mode": "ar"}, "ar", 1.0),
        ({"model": "plain", "confidence_threshold": 1}, "ar", 1.0),
    ],
)
async def test_effective_mode_and_threshold(
    client: Any, fields: dict[str, Any], mode: str, threshold: float
) -> None:
    summary = (await client.answer(COMPLETIONS, {**COMPLETION, **fields}))["mars"]
    assert (summary["mode"], summary["confidence_threshold"]) == (mode, threshold)
    if threshold == 1:
        assert summary["forward_passes"] == 24


async def test_settings_of_the_model_are_the_defaults(
    loops: dict[str, EngineLoop],
    mars: Checkpoint,
    served: Any,
    app_of: Any,
    client_of: Any,
    loop_backend: Any,
) -> None:
    backend = loop_backend(loops["mars"])
    tiers = {"default_min_threshold": 0.99}
    models = [served("low", mars, backend, tiers=tiers), served("ar", mars, backend, mode="ar")]
    async with client_of(app_of(*models)) as client:
        low = await client.answer(COMPLETIONS, {**COMPLETION, "model": "low"})
        ar = await client.answer(COMPLETIONS, {**COMPLETION, "model": "ar"})
        asked = await client.answer(COMPLETIONS, {**COMPLETION, "model": "ar", "mode": "threshold"})
    assert low["mars"]["confidence_threshold"] == 0.99
    assert (ar["mars"]["mode"], ar["mars"]["confidence_threshold"]) == ("ar", 1.0)
    assert (asked["mars"]["mode"], asked["mars"]["confidence_threshold"]) == ("threshold", 0.95)


async def test_calibration_that_the_model_does_not_have(client: Any) -> None:
    response = await client.post(COMPLETIONS, json={**COMPLETION, "calibrated": True})
    client.error_of(response, 400, "calibrated")
