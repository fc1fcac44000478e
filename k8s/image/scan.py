"""Scans the image's constraints for known vulnerabilities, from a file: no network is needed.

    python k8s/image/scan.py all.zip

The file is the export of advisories for PyPI that https://osv.dev publishes, all.zip of
https://osv-vulnerabilities.storage.googleapis.com/PyPI/, or a directory of such advisories as JSON.
pip-audit knows the same advisories but asks a server for each package.

Exits with status 1 if a package has a vulnerability that allowed-vulnerabilities.toml does not
allow, and with 2 if the file or the list cannot be used: a scan of nothing finds nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_IMAGE = Path(__file__).resolve().parent
_LOCKS = tuple(_IMAGE / f"constraints-{name}.txt" for name in ("build", "cpu", "gpu"))
_ALLOWED = _IMAGE / "allowed-vulnerabilities.toml"
_LONGEST = timedelta(days=180)

Advisory = Mapping[str, Any]
Pins = Mapping[str, set[Version]]


class Unusable(Exception):
    """The advisories, the constraints or the list of exceptions cannot be used."""


@dataclass(frozen=True)
class Finding:
    """An advisory that a pinned version is affected by."""

    package: str
    version: Version
    ids: frozenset[str]
    """The advisory's id and its aliases."""
    fixed: tuple[Version, ...]
    """Versions with a fix, above the pinned one, ascending; empty if there is none."""
    summary: str

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(map(str, self.fixed))}" if self.fixed else "no fix yet"
        ids = ", ".join(sorted(self.ids))
        return f"{self.package} {self.version}: {ids}; {fixed}. {self.summary}".rstrip(" .")


@dataclass(frozen=True)
class Allowance:
    """An advisory that is known and let pass until a day."""

    id: str
    package: str
    until: date

    def covers(self, finding: Finding) -> bool:
        """Whether it is meant by this exception, whatever the day."""
        return finding.package == self.package and self.id in finding.ids


def read_pins(files: tuple[Path, ...]) -> Pins:
    """Return the pinned versions of each package in some constraints files.

    Raises:
        Unusable: a file cannot be read, or a line is no pin.
    """
    pins: dict[str, set[Version]] = {}
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
        except OSError as error:
            raise Unusable(f"{file}: cannot be read ({error.strerror})") from error
        for line in lines:
            text = line.partition("#")[0].partition(" --hash")[0].strip()
            if text and not text.startswith("-"):
                name, version = _pin(file, text)
                pins.setdefault(name, set()).add(version)
    return pins


def _pin(file: Path, text: str) -> tuple[str, Version]:
    try:
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        # a local version such as 2.13.0+cpu has the faults of 2.13.0
        version = Version(Version(specifier.version).public)
    except ValueError as error:
        raise Unusable(f"{file}: {text} is no pinned version") from error
    if specifier.operator != "==":
        raise Unusable(f"{file}: {text} is no pinned version")
    return canonicalize_name(requirement.name), version


def read_advisories(path: Path) -> Iterator[Advisory]:
    """Yield the advisories of a directory or a .zip file.

    Raises:
        Unusable: the path is missing or damaged, or holds no advisory for PyPI.
    """
    num_for_pypi = 0
    try:
        for name, content in _contents(path):
            advisory = json.loads(content)
            if not isinstance(advisory, dict) or "id" not in advisory:
                raise Unusable(f"{path}: {name} is no advisory; download the file again")
            num_for_pypi += any(_is_of_pypi(each) for each in advisory.get("affected", ()))
            yield advisory
    except (AttributeError, OSError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise Unusable(f"{path}: cannot be read ({error}); download the file again") from error
    if not num_for_pypi:
        raise Unusable(f"{path}: holds no advisory for PyPI; download the file again")


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield file.name, file.read_bytes()
        return
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                yield name, archive.read(name)


def _is_of_pypi(affected: Advisory) -> bool:
    return str(affected.get("package", {}).get("ecosystem", "")).partition(":")[0] == "PyPI"


def findings(pins: Pins, advisories: Iterator[Advisory]) -> list[Finding]:
    """Return what the pinned versions are affected by, each advisory once, sorted.

    Raises:
        Unusable: an advisory does not follow OSV's schema.
    """
    found: list[Finding] = []
    for advisory in advisories:
        try:
            for finding in _findings_of(advisory, pins):
                _add(found, finding)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unusable(f"advisory {advisory['id']} is malformed ({error!r})") from error
    return sorted(found, key=lambda each: (each.package, each.version, sorted(each.ids)))


def _findings_of(advisory: Advisory, pins: Pins) -> Iterator[Finding]:
    if advisory.get("withdrawn"):
        return
    for affected in filter(_is_of_pypi, advisory.get("affected", ())):
        package = canonicalize_name(affected["package"]["name"])
        for version in sorted(pins.get(package, ())):
            if is_affected(version, affected):
                yield _finding(package, version, advisory, affected)


def _finding(package: str, version: Version, advisory: Advisory, affected: Advisory) -> Finding:
    events = [event for each in affected.get("ranges", ()) for event in each["events"]]
    fixes = {fix for event in events if "fixed" in event if (fix := _parsed(event["fixed"]))}
    return Finding(
        package=package,
        version=version,
        ids=frozenset([advisory["id"], *advisory.get("aliases", ())]),
        fixed=tuple(sorted(fix for fix in fixes if fix > version)),
        summary=" ".join(str(advisory.get("summary", "")).split()),
    )


def _add(found: list[Finding], new: Finding) -> None:
    """Add a finding, together with that of another database with a common id if there is one."""
    for at, old in enumerate(found):
        if (old.package, old.version) == (new.package, new.version) and old.ids & new.ids:
            fixed = tuple(sorted({*old.fixed, *new.fixed}))
            summary = old.summary or new.summary
            found[at] = Finding(old.package, old.version, old.ids | new.ids, fixed, summary)
            return
    found.append(new)


def is_affected(version: Version, affected: Advisory) -> bool:
    """Whether an advisory's entry lists a version, or has a range with it.

    Ranges are evaluated as OSV's schema says. Those of commits say nothing about versions; where an
    end of a range is no version of Python's, the range counts as affected up to there.
    """
    if version in {_parsed(each) for each in affected.get("versions", ())}:
        return True
    ranges = [each for each in affected.get("ranges", ()) if each.get("type") != "GIT"]
    return any(_is_within(version, each["events"]) for each in ranges)


def _is_within(version: Version, events: list[Mapping[str, str]]) -> bool:
    is_within = False
    for event in sorted(events, key=_position):
        ((kind, text),) = event.items()
        at = _parsed(text)
        if kind == "introduced":
            is_within |= text == "0" or at is None or version >= at
        elif at is not None and kind in ("fixed", "last_affected"):
            is_within &= version < at or (kind == "last_affected" and version == at)
    return is_within


def _position(event: Mapping[str, str]) -> tuple[Version, int]:
    """Sort key of an event: by version, and at one version a fix first and a last one last."""
    ((kind, text),) = event.items()
    return _parsed(text) or Version("0.dev0"), {"fixed": 0, "introduced": 1}.get(kind, 2)


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def read_exceptions(file: Path, today: date) -> list[Allowance]:
    """Read the list of allowed vulnerabilities; each has a reason and a day on which it ends.

    Raises:
        Unusable: an entry is incomplete, or ends too late.
    """
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8")).get("allowed", [])
        return [_exception(file, entry, today) for entry in entries]
    except (OSError, ValueError) as error:
        raise Unusable(f"{file}: cannot be read ({error})") from error


def _exception(file: Path, entry: Mapping[str, Any], today: date) -> Allowance:
    kinds = {"id": str, "package": str, "reason": str, "until": date}
    if set(entry) != set(kinds) or not all(
        type(entry[key]) is kind and entry[key] for key, kind in kinds.items()
    ):
        raise Unusable(f"{file}: each [[allowed]] has to have {', '.join(kinds)} and no more")
    if entry["until"] > today + _LONGEST:
        raise Unusable(f"{file}: {entry['id']}: until may be {_LONGEST.days} days ahead at most")
    return Allowance(entry["id"], canonicalize_name(entry["package"]), entry["until"])


def main(arguments: list[str], today: date) -> int:
    """Scan, print what was found and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("advisories", type=Path, help="all.zip of OSV for PyPI, or a directory")
    parser.add_argument("--allowed", type=Path, default=_ALLOWED, help="the list of exceptions")
    parser.add_argument(
        "--lock", type=Path, action="append", help="a constraints file to scan instead of these"
    )
    options = parser.parse_args(arguments)
    try:
        pins = read_pins(tuple(options.lock or _LOCKS))
        exceptions = read_exceptions(options.allowed, today)
        found = findings(pins, read_advisories(options.advisories))
    except Unusable as error:
        sys.stderr.write(f"scan: {error}\n")
        return 2
    return _report(found, exceptions, len(pins), today)


def _report(found: list[Finding], exceptions: list[Allowance], num_pins: int, today: date) -> int:
    refused = 0
    for finding in found:
        covering = [each for each in exceptions if each.covers(finding)]
        is_allowed = any(each.until >= today for each in covering)
        refused += not is_allowed
        kind = "allowed" if is_allowed else "allowed no longer" if covering else "VULNERABLE"
        sys.stdout.write(f"{kind}: {finding}\n")
    for each in exceptions:
        if not any(each.covers(finding) for finding in found):
            sys.stdout.write(f"not found any more, remove it: {each.package}: {each.id}\n")
    sys.stdout.write(f"{num_pins} packages, {refused} vulnerabilities that are not allowed\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], datetime.now(UTC).date()))
