from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_serve.api.keys import Caller, KeyRing
from mars_serve.config.key_file import KeyEntry, parse_keys
from mars_serve.config.settings import KeySettings
from rest.api_keys import FakeClock, digest_of, key_entry

VARIABLE = "MARSRAY_API_KEYS"


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"keys": list(entries)}), encoding="utf-8")
    return path


# Reading


def test_every_field_reaches_the_caller():
    fields = {
        "tiers": ["default", "priority"],
        "min_confidence_threshold": 0.8,
        "max_concurrent": 3,
        "tokens_per_minute": 1000,
        "requests_per_minute": 60,
        "audit": False,
        "admin": True,
    }
    ring = KeyRing(KeySettings(entries=[KeyEntry(**key_entry("one", **fields))]))
    assert not ring.is_open
    assert ring.find(b"one") == Caller(
        name="one",
        tenant="key:one",
        tiers=frozenset({"default", "priority"}),
        min_threshold=0.8,
        may_be_audited=False,
        is_admin=True,
        max_concurrent=3,
        tokens_per_minute=1000,
        requests_per_minute=60,
    )


def test_keys_share_a_tenant_only_if_both_name_it():
    entries = [
        key_entry("a", tenant="x"),
        key_entry("b", tenant="x"),
        key_entry("c"),
        key_entry("d", name="x"),
    ]
    ring = KeyRing(KeySettings(entries=[KeyEntry(**each) for each in entries]))
    tenants = [ring.find(key).tenant for key in (b"a", b"b", b"c", b"d")]
    assert tenants[0] == tenants[1]
    assert len(set(tenants)) == 3
    assert "" not in tenants  # the empty tenant belongs to servers without keys


def test_only_the_key_itself_is_found():
    ring = KeyRing(
        KeySettings(entries=[KeyEntry(**key_entry("one")), KeyEntry(**key_entry("two"))])
    )
    assert ring.find(b"two").name == "two"
    for other in (b"", b"on", b"one ", b"ONE", digest_of("one").encode(), b"\xff\x00"):
        assert ring.find(other) is None


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return known == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = KeyRing(KeySettings(entries=[KeyEntry(**key_entry(key)) for key in "abc"]))
    for key in "az":
        compared.clear()
        ring.find(key.encode())
        assert compared == [(digest_of(each).encode(), digest_of(key).encode()) for each in "abc"]


def test_no_keys_leave_the_server_open():
    assert KeyRing(KeySettings()).is_open
    assert not KeyRing(KeySettings(entries=[])).is_open  # an empty list still closes the server


def test_the_environment_variable_may_hold_yaml_or_json(monkeypatch):
    content = {"keys": [key_entry("one")]}
    for text in (yaml.safe_dump(content), json.dumps(content)):
        monkeypatch.setenv(VARIABLE, text)
        assert KeyRing(KeySettings()).find(b"one")
    monkeypatch.setenv("OTHER", json.dumps({"keys": [key_entry("two")]}))
    assert KeyRing(KeySettings(environment="OTHER")).find(b"two")


def test_the_key_file_overrides_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"keys": [key_entry("variable")]}))
    ring = KeyRing(KeySettings(file=write(tmp_path / "keys.yaml", key_entry("file"))))
    assert ring.find(b"file")
    assert not ring.find(b"variable")


def test_another_process_uses_its_own_variable_or_else_the_captured_keys(monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"keys": [key_entry("driver", name="someone")]}))
    sent = pickle.loads(pickle.dumps(KeySettings().captured()))  # noqa: S301
    assert b"driver" not in pickle.dumps(sent)
    monkeypatch.delenv(VARIABLE)
    assert KeyRing(sent).find(b"driver")
    monkeypatch.setenv(VARIABLE, json.dumps({"keys": [key_entry("there")]}))
    assert KeyRing(sent).find(b"there")
    assert not KeyRing(sent).find(b"driver")


def test_an_empty_variable_is_refused_and_does_not_open_the_server(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(UserError, match=f"^{VARIABLE}: the top level"):
        KeyRing(KeySettings())


def test_a_relative_key_file_is_resolved_where_the_settings_were_made(tmp_path, monkeypatch):
    write(tmp_path / "keys.yaml", key_entry("one"))
    monkeypatch.chdir(tmp_path)
    settings = KeySettings(file=Path("keys.yaml"))
    monkeypatch.chdir("/")
    assert KeyRing(settings).find(b"one")


CANARY = "mars-canary-that-nobody-may-see"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"keys:\n- [{CANARY}: :", r"not valid YAML \(line 2\)"),
        (f"keys: !{CANARY} x", "not valid YAML"),
        (f"keys: *{CANARY}", "not valid YAML"),
        (CANARY, "the top level must be a mapping"),
        (f"- {CANARY}", "the top level must be a mapping"),
        (f"{CANARY}: 1", "keys: Field required; a field: Extra inputs"),
        (f"keys: [{{name: a, sha256: {CANARY}}}]", r"keys\.0\.sha256: .*pattern"),
        (f"keys: [{{name: a, sha256: {digest_of('a').upper()}}}]", r"keys\.0\.sha256: "),
        (f"keys: [{{name: a, sha256: {digest_of('a')}, {CANARY}: 1}}]", r"keys\.0\.a field: Extra"),
        (f"keys: [{{name: a, sha256: {digest_of('a')}, rate: 1}}]", r"keys\.0\.rate: Extra"),
        (f"keys: [{{name: a, sha256: {digest_of('a')}, tiers: [{CANARY}]}}]", r"tiers\.0: "),
        (f"keys: [{{name: a, sha256: {digest_of('a')}, tiers: []}}]", "tiers: "),
        (f"keys: [{{name: a, sha256: {digest_of('a')}, max_concurrent: 0}}]", "max_concurrent: "),
        (f"keys: [{{name: '', sha256: {digest_of('a')}}}]", "name: "),
        (f"keys: {CANARY}", "keys: Input should be a valid list"),
    ],
)
def test_mistakes_are_reported_without_the_written_values(text, expected):
    with pytest.raises(UserError, match=f"^source: .*{expected}") as refusal:
        parse_keys(text, "source")
    assert CANARY not in str(refusal.value)
    assert refusal.value.__cause__ is None  # a cause would be shown in the traceback


def test_two_keys_may_not_share_a_name_or_a_hash():
    same_name = [key_entry("a"), key_entry("b", name="a")]
    with pytest.raises(UserError, match=r"^s: keys: two keys have the name 'a'"):
        parse_keys(json.dumps({"keys": same_name}), "s")
    same_hash = [key_entry("a"), key_entry("a", name="b")]
    with pytest.raises(UserError, match=r"^s: keys: 'a' and 'b' have the same hash"):
        parse_keys(json.dumps({"keys": same_hash}), "s")
    with pytest.raises(ValueError, match="the same hash"):
        KeySettings(entries=same_hash)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_key_file_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "keys.yaml"
    if content:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"^keys\.file: .*keys\.yaml"):
        KeyRing(KeySettings(file=path))


# Reading again


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.yaml", key_entry("one"))


@pytest.fixture
def ring(path: Path, clock: FakeClock) -> KeyRing:
    return KeyRing(KeySettings(file=path, reload_s=2), clock=clock)


async def look_again(ring: KeyRing, clock: FakeClock) -> None:
    clock.now_s += 2
    await ring.refresh()


async def test_a_changed_file_is_read_after_reload_s(ring, path, clock):
    write(path, key_entry("one"), key_entry("two"))
    clock.now_s += 1.9
    await ring.refresh()
    assert not ring.find(b"two")
    clock.now_s += 0.1
    await ring.refresh()
    assert ring.find(b"one")
    assert ring.find(b"two")
    write(path)  # all keys are revoked
    await look_again(ring, clock)
    assert [ring.find(b"one"), ring.find(b"two"), ring.is_open] == [None, None, False]


async def test_a_replaced_file_of_the_same_size_and_time_is_read(ring, path, clock):
    other = write(path.with_name("new.yaml"), key_entry("two"))
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert other.stat().st_size == stat.st_size
    other.replace(path)
    await look_again(ring, clock)
    assert ring.find(b"two")


@pytest.mark.parametrize("content", [f"keys: {CANARY}", "keys: [", None])
async def test_a_broken_file_keeps_the_keys_and_is_reported_once(
    ring, path, clock, caplog, content
):
    if content is None:
        path.unlink()
    else:
        path.write_text(content, encoding="utf-8")
    for _ in range(3):
        await look_again(ring, clock)
        assert ring.find(b"one")
    (problem,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "keys stay as they were: keys.file: " in problem.getMessage()
    assert CANARY not in caplog.text
    write(path, key_entry("two"))
    await look_again(ring, clock)
    assert ring.find(b"two")
    assert not ring.find(b"one")


async def test_a_revoked_key_does_not_come_back_by_a_read_that_began_earlier(ring, path, clock):
    path.unlink()
    os.mkfifo(path)
    clock.now_s += 2
    slow = asyncio.create_task(ring.refresh())
    await asyncio.sleep(0)
    pipe = await asyncio.to_thread(path.open, "w")  # returns when the slow reader has opened it
    path.unlink()
    write(path, key_entry("two"))  # "one" is revoked
    await look_again(ring, clock)
    with pipe:
        pipe.write(yaml.safe_dump({"keys": [key_entry("one")]}))
    await slow
    await look_again(ring, clock)
    assert [bool(ring.find(key)) for key in (b"one", b"two")] == [False, True]


async def test_a_change_is_read_though_the_request_that_began_to_read_it_is_cancelled(
    ring, path, clock
):
    write(path, key_entry("two"))
    clock.now_s += 2
    reading = asyncio.create_task(ring.refresh())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await look_again(ring, clock)
    assert [bool(ring.find(key)) for key in (b"one", b"two")] == [False, True]


# Making


def test_a_new_key_gets_the_permissions_of_its_printed_entry(tmp_path, capsys):
    options = ["--tier", "priority", "--tokens-per-minute", "9", "--tenant", "t", "--admin"]
    options.append("--no-audit")
    assert run(["key", "alice", *options]) == 0
    secret, _, text = capsys.readouterr().out.partition("\n")
    assert secret.startswith("mars-")
    assert len(secret) >= 48
    written = text[text.index("\n- ") :]
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n{written}", encoding="utf-8")
    caller = KeyRing(KeySettings(file=path)).find(secret.encode())
    assert caller == Caller(
        "alice",
        "tenant:t",
        frozenset({"priority"}),
        may_be_audited=False,
        is_admin=True,
        tokens_per_minute=9,
    )
    assert secret not in text


def test_key_prints_a_new_key_and_its_entry_as_json(capsys):
    secrets = set()
    for _ in range(2):
        assert run(["key", "bob", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["entry"] == {"name": "bob", "sha256": digest_of(printed["key"])}
        secrets.add(printed["key"])
    assert len(secrets) == 2


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (["--tier", "gold"], "--tier"),
        (["--max-concurrent", "0"], "--max-concurrent"),
        (["--min-confidence-threshold", "1.5"], "--min-confidence-threshold"),
    ],
)
def test_key_refuses_options_that_no_key_file_may_contain(capsys, options, option):
    assert run(["key", "alice", *options]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: Invalid value for '{option}': ")
    assert not output.out
