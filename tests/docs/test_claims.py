"""The pages that promise something name tests, which exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mars_autoscale.audit import drift
from mars_platform.data import prompt_encoding
from mars_serve.api import bounds, protocol
from mars_serve.config.settings import AuditSettings, LimitSettings, ProxySettings, TierSettings
from mars_serve.deploy import queue
from mars_serve.engine.adaptive import audit_room, position_budget
from mars_serve.engine.ipc import client, connections, listener
from mars_serve.engine.sampling import grammar_trial
from mars_serve.engine.settings import EngineSettings
from mars_serve.http.middleware import bodies, headers
from mars_serve.replica import watchdog

ROOT = Path(__file__).resolve().parents[2]
LIMITS, PROXY, TIERS = LimitSettings(), ProxySettings(), TierSettings()
GRAMMARS, KIB = grammar_trial.GrammarLimits(), 2**10
SECURITY, FAILURES = "docs/operations/security.md", "docs/operations/failures.md"
NUMBERS = {
    SECURITY: [
        f"bodies of {LIMITS.body_bytes // KIB**2} MiB, JSON of {bodies._MAX_DEPTH} levels",
        f"{LIMITS.choices} outputs a request, {LIMITS.stop_strings} stop strings",
        f"{LIMITS.stop_characters} characters, {protocol._MAX_ALLOWED:,} allowed tokens",
        f"{EngineSettings().max_requests:,} requests in an engine",
        f"A request waits at most {LIMITS.queue_wait_s:.0f} s",
        f"headers have {PROXY.request_wait_s:.0f} s to arrive",
        f"{8 * listener._TOKEN_SIZE} random bits within {listener._HANDSHAKE_S:.0f} s",
    ],
    FAILURES: [
        f"a sign every {connections._BEAT_S:.0f} s; {client._OVERDUE_S:.0f} s without make it",
        f"{client._SILENT_S:.0f} s lost",
        f"{watchdog._OVERDUE_S:.0f} s, or twice the expected",
        f"waiting requests move after {client._OVERDUE_S:.0f} s, those without output after",
        f"`engine.step_timeout_s` ({EngineSettings().step_timeout_s:.0f} s)",
        f"{client._QUEUE_GRACE_S:.0f} s after `limits.queue_wait_s`",
        f"doubles after {position_budget._FIRST_WAIT} steps",
        f"{GRAMMARS.compile_s:.0f} s of CPU time and {GRAMMARS.compile_bytes // KIB**3} GiB",
        f"a step: {GRAMMARS.step_s * 1000:.0f} ms",
        f"{audit_room._MAX_POSITIONS} positions when idle, else {audit_room._MAX_SLOWDOWN - 1:.0%}",
        f"after {drift._FEW} outputs of others",
    ],
    "docs/serving.md": [
        f"`default` follows the live τ down to {TIERS.default_min_threshold}",
        f"`flex` down to {TIERS.flex_min_threshold}",
        f"`X-Request-Id` has at most {headers._MAX_ID} characters",
        f"`limits.body_values` ({LIMITS.body_values:,})",
        f"more than {bounds.BYTES_PER_TOKEN} bytes for each token",
        f"more than {prompt_encoding._PIECE:,} characters",
        f"holds at most {bounds.MAX_REPORTED:,} log-probabilities",
        f"counts, or {queue._OBJECTIVE_S:.0f} s",
        f"share: {AuditSettings().share}",
        f"`proxy.request_wait_s` | {PROXY.request_wait_s:.0f} s |",
        f"`proxy.connections` | {PROXY.connections:,} |",
        f"`proxy.connections_per_address` | {PROXY.connections_per_address:,} |",
        f"`limits.body_wait_s` | {LIMITS.body_wait_s:.0f} s |",
    ],
}
"""Phrases of the pages, each with the numbers that the code has for it."""
NAMED = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(\w+))?`")


def section(page: str, title: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", [SECURITY, FAILURES, "docs/serving.md"])
def test_the_tests_that_a_page_names_exist(page):
    folder, found = "", 0
    for file, function in NAMED.findall((ROOT / page).read_text(encoding="utf-8")):
        if "/" in file:  # a bare name is a file of the folder that was named last
            folder = file.rpartition("/")[0]
        path = ROOT / folder / file.rpartition("/")[2]
        assert path.is_file(), f"{page} names {path.relative_to(ROOT)}"
        assert f"def {function}(" in path.read_text(encoding="utf-8") or not function
        found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("page", "title"),
    [(SECURITY, "What the server does by default"), ("docs/serving.md", "Behaviour")],
)
def test_every_claim_of_a_list_names_its_tests(page, title):
    claims = section(page, title).strip().split("\n- ")
    assert len(claims) > 10
    assert [each for each in claims if not NAMED.search(each)] == []


def test_every_line_of_the_promises_names_its_tests():
    text = section(FAILURES, "Promises and tests")
    rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)[2:]
    assert len(rows) > 25
    assert [row for row in rows if not NAMED.search(row)] == []


@pytest.mark.parametrize("page", NUMBERS)
def test_the_numbers_of_a_page_are_those_of_the_code(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [each for each in NUMBERS[page] if each not in text] == []
