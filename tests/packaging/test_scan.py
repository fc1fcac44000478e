"""The scan for known vulnerabilities, run on advisories that are written here by hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SCAN = ROOT / "k8s" / "image" / "scan.py"
TODAY = datetime.now(UTC).date()


def advisory(*events, name="some-package", ecosystem="PyPI", versions=(), kind="ECOSYSTEM", **more):
    """An advisory as OSV writes it, with one range."""
    affected = {
        "package": {"name": name, "ecosystem": ecosystem},
        "ranges": [{"type": kind, "events": [dict([event]) for event in events]}],
        "versions": list(versions),
    }
    return {"id": "GHSA-1", "summary": "It breaks", "affected": [affected], **more}


OTHER = advisory(("introduced", "0"), name="unrelated", id="GHSA-other")
BEGUN, FIXED = ("introduced", "1.0"), ("fixed", "2.0")


@pytest.fixture
def scan(tmp_path, command):
    """Scan a lock with advisories; return the exit status and the lines of the output."""

    def run(lock, *advisories, allowed="", as_zip=True):
        (tmp_path / "lock.txt").write_text(lock)
        (tmp_path / "allowed.toml").write_text(allowed)
        database = tmp_path / ("all.zip" if as_zip else "advisories")
        texts = {f"{at}.json": json.dumps(each) for at, each in enumerate([OTHER, *advisories])}
        if as_zip:
            with zipfile.ZipFile(database, "w") as archive:
                for name, text in texts.items():
                    archive.writestr(name, text)
        else:
            database.mkdir()
            for name, text in texts.items():
                (database / name).write_text(text)
        options = {"--allowed": tmp_path / "allowed.toml", "--lock": tmp_path / "lock.txt"}
        return command(database, *(each for pair in options.items() for each in pair))

    return run


@pytest.fixture
def command(script, capsys):
    """Run the script; return the exit status and the lines of the output."""

    def run(*arguments):
        status = script.main(list(map(str, arguments)), TODAY)
        written = capsys.readouterr()
        return status, (written.out + written.err).splitlines()

    return run


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("scan", SCAN)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scan"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scan"]


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "directory"])
def test_a_vulnerable_package_is_named_with_its_fix(scan, as_zip):
    lock = (
        "# comment\n--extra-index-url x\nsome_package==1.5 \\\n    --hash=sha256:00\n    # via x\n"
    )
    found = scan(lock, advisory(BEGUN, FIXED, aliases=["CVE-1"]), as_zip=as_zip)
    assert found == (
        1,
        [
            "VULNERABLE: some-package 1.5: CVE-1, GHSA-1; fixed in 2.0. It breaks",
            "1 packages, 1 vulnerabilities that are not allowed",
        ],
    )


UNENDED = (BEGUN, ("last_affected", "2.0"))
TWICE = (("introduced", "0"), ("fixed", "1.0"), ("introduced", "2.0"), ("fixed", "2.2"))


@pytest.mark.parametrize(
    ("version", "events", "is_affected"),
    [
        ("0.9", (BEGUN, FIXED), False),
        ("1.0", (BEGUN, FIXED), True),
        ("1.0rc1", (BEGUN, FIXED), False),
        ("1.10", (BEGUN, FIXED), True),  # not compared as text
        ("2.0", (BEGUN, FIXED), False),
        ("2.0rc1", (BEGUN, FIXED), True),
        ("1!1.5", (BEGUN, FIXED), False),
        ("1.5", (FIXED, BEGUN), True),  # the order of events does not count
        ("2.0", UNENDED, True),
        ("2.0.post1", UNENDED, False),
        ("2.0+cpu", UNENDED, True),
        ("1.0", (BEGUN, ("last_affected", "1.0")), True),
        ("1.1", (BEGUN, ("last_affected", "1.0")), False),
        ("0.1", (("introduced", "0"),), True),
        *((version, TWICE, True) for version in ("0.9", "2.0", "2.1")),
        *((version, TWICE, False) for version in ("1.0", "1.9", "2.2")),
        ("1.5", (BEGUN, ("limit", "9")), True),
        ("1.5", (("introduced", "no version"),), True),
    ],
)
def test_a_range_is_read_as_the_schema_says(scan, version, events, is_affected):
    status, _ = scan(f"some-package=={version}\n", advisory(*events))
    assert status == is_affected


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (advisory(versions=["1.5.0"]), 1),
        (advisory(versions=["1.4"]), 0),
        (advisory(BEGUN, withdrawn="2026-01-01T00:00:00Z"), 0),
        (advisory(BEGUN, name="other-package"), 0),
        (advisory(BEGUN, name="Some.Package"), 1),
        (advisory(BEGUN, ecosystem="npm"), 0),
        (advisory(BEGUN, ecosystem="PyPI:custom"), 1),
        (advisory(("introduced", "0"), kind="GIT"), 0),
        (advisory(BEGUN, kind="SEMVER"), 1),
        ({"id": "GHSA-1"}, 0),
        (advisory(BEGUN, id="MAL-1"), 1),
    ],
)
def test_only_advisories_that_hold_for_the_package_count(scan, entry, status):
    assert scan("some-package==1.5\n", entry)[0] == status


def test_an_advisory_of_two_databases_is_said_once(scan):
    first = advisory(BEGUN, FIXED, aliases=["CVE-1"])
    second = advisory(BEGUN, ("fixed", "1.9"), id="PYSEC-1", aliases=["CVE-1"], summary="")
    assert scan("some-package==1.5\n", first, second)[1] == [
        "VULNERABLE: some-package 1.5: CVE-1, GHSA-1, PYSEC-1; fixed in 1.9, 2.0. It breaks",
        "1 packages, 1 vulnerabilities that are not allowed",
    ]


def allowing(days, **more):
    entry = {"id": "CVE-1", "package": "some_package", "reason": "never called", **more}
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    return "\n".join(["[[allowed]]", *lines, f"until = {TODAY + timedelta(days=days)}"])


@pytest.mark.parametrize(
    ("allowed", "status", "word"),
    [
        (allowing(0), 0, "allowed: some-package 1.5"),
        (allowing(170), 0, "allowed: some-package 1.5"),
        (allowing(-2), 1, "allowed no longer: some-package 1.5"),
        (allowing(10, package="another"), 1, "VULNERABLE: some-package 1.5"),
        (allowing(10, id="CVE-2"), 1, "VULNERABLE: some-package 1.5"),
        (allowing(200), 2, "CVE-1: until may be 180 days ahead at most"),
        (allowing(10, reason=""), 2, "has to have id, package, reason, until"),
        ("[[allowed]]\nid = 'CVE-1'", 2, "has to have id, package, reason, until"),
        ("[[allowed", 2, "cannot be read"),
    ],
)
def test_an_exception_has_a_reason_and_an_end(scan, allowed, status, word):
    entry = advisory(BEGUN, FIXED, aliases=["CVE-1"])
    found, lines = scan("some-package==1.5\n", entry, allowed=allowed)
    assert found == status
    assert any(word in line for line in lines), lines


def test_an_exception_that_is_no_longer_needed_is_named(scan):
    status, lines = scan("some-package==2.0\n", advisory(BEGUN, FIXED), allowed=allowing(10))
    assert status == 0
    assert "not found any more, remove it: some-package: CVE-1" in lines


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", None])
def test_a_scan_of_nothing_is_no_clean_scan(tmp_path, command, content):
    file = tmp_path / "all.zip"
    if content is not None:
        file.write_bytes(content)
    assert command(file)[0] == 2
    (tmp_path / "empty").mkdir()
    assert command(tmp_path / "empty")[0] == 2


@pytest.mark.parametrize(
    "broken", [[], {"affected": []}, advisory(BEGUN) | {"affected": [{"package": {}}, 3]}]
)
def test_a_malformed_advisory_is_named(scan, broken):
    status, (line, *more) = scan("some-package==1.5\n", broken)
    assert status == 2
    assert line.startswith("scan: ")
    assert not more


@pytest.mark.parametrize("pin", ["some-package>=1.5", "some-package", "a==1.*", "a b", "a>=1,<2"])
def test_a_lock_that_pins_nothing_is_refused(scan, pin):
    status, (line,) = scan(f"{pin}\n", advisory(BEGUN))
    assert status == 2
    assert f"{pin} is no pinned version" in line


def test_all_constraints_are_scanned_by_default(tmp_path):
    """It runs as in the workflow, as a program."""
    (tmp_path / "a.json").write_text(json.dumps(advisory(("introduced", "0"), name="hatchling")))
    (tmp_path / "b.json").write_text(
        json.dumps(advisory(("introduced", "0"), name="triton", id="GHSA-2"))
    )
    (tmp_path / "c.json").write_text(
        json.dumps(advisory(("introduced", "0"), name="torch", id="GHSA-3"))
    )
    command = [sys.executable, SCAN, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    found = [line.split()[1] for line in done.stdout.splitlines()[:3]]
    assert found == ["hatchling", "torch", "triton"]


def test_the_scan_runs_weekly_for_each_change_of_the_lock_and_before_a_release():
    folder = ROOT / ".github" / "workflows"
    text = (folder / "supply-chain.yml").read_text()
    workflow = yaml.safe_load(text)
    triggers = workflow[True]  # YAML's reading of the key `on`
    assert triggers["schedule"][0]["cron"].endswith(" * * 1")
    for event in ("push", "pull_request"):
        assert {"k8s/image/*", "pyproject.toml"} <= set(triggers[event]["paths"])
    runs = [step.get("run") for step in workflow["jobs"]["scan"]["steps"]]
    assert runs[-1] == "python3 k8s/image/scan.py advisories.zip"
    assert "--fail" in runs[-2]
    jobs = yaml.safe_load((folder / "release.yml").read_text())["jobs"]
    assert jobs["scan"]["uses"] == "./.github/workflows/supply-chain.yml"
    assert "scan" in jobs["image"]["needs"]


@pytest.mark.parametrize(
    ("package", "last_bad"),
    [
        ("aiohttp", "3.14.0"),  # CVE-2026-54273
        ("filelock", "3.20.2"),  # CVE-2026-22701
        ("jinja2", "3.1.5"),  # CVE-2025-27516
        ("pyarrow", "23.0.0"),  # CVE-2026-25087
        ("ray", "2.51.0"),  # CVE-2025-62593
        ("starlette", "1.0.0"),  # CVE-2026-48710
        ("torch", "2.5.1"),  # CVE-2025-32434
    ],
)
def test_no_version_with_a_known_fault_may_be_installed(package, last_bad):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = (each for each in map(Requirement, wanted) if each.name == package)
    assert not requirement.specifier.contains(last_bad)
