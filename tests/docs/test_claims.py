"""The pages that promise something name tests, which exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mars_autoscale.audit import drift
from mars_serve.api import protocol
from mars_serve.config.settings import LimitSettings, ProxySettings, TierSettings
from mars_serve.deploy import queue
from mars_serve.engine.adaptive import audit_room, position_budget
from mars_serve.engine.ipc import client, connections, listener
from mars_serve.engine.sampling import grammar_trial
from mars_serve.engine.settings import EngineSettings
from mars_serve.http.batches import lines, records
from mars_serve.http.middleware import bodies
from mars_serve.replica import watchdog

ROOT = Path(__file__).resolve().parents[2]
LIMITS, PROXY, TIERS = LimitSettings(), ProxySettings(), TierSettings()
GRAMMARS, KIB = grammar_trial.GrammarLimits(), 2**10
SECURITY, FAILURES = "docs/operations/security.md", "docs/operations/failures.md"
SERVE = "docs/guides/serve.md"
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
    SERVE: [
        f"floor: {TIERS.default_min_threshold} for `default`, and {TIERS.flex_min_threshold} for",
        f"`objective_ttft_s`, or {queue._OBJECTIVE_S:.0f} s",
        f"{lines.MOST_LINES:,} lines",
        f"{records._MOST_UNFINISHED} unfinished batches",
    ],
}
"""Phrases of the pages, each with the numbers that the code has for it."""
NAMED = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(\w+))?`")


def section(page: str, title: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", [SECURITY, FAILURES, SERVE])
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


def test_every_claim_of_a_list_names_its_tests():
    claims = section(SECURITY, "What the server does by default").strip().split("\n- ")
    assert len(claims) > 10
    assert [each for each in claims if not NAMED.search(each)] == []


def test_every_section_on_serving_names_its_tests():
    sections = (ROOT / SERVE).read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) > 8
    assert [each for each in sections if not NAMED.search(each)] == []


def test_every_line_of_the_promises_names_its_tests():
    text = section(FAILURES, "Promises and tests")
    rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)[2:]
    assert len(rows) > 25
    assert [row for row in rows if not NAMED.search(row)] == []


@pytest.mark.parametrize("page", NUMBERS)
def test_the_numbers_of_a_page_are_those_of_the_code(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [each for each in NUMBERS[page] if each not in text] == []
