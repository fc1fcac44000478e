"""Checks that workflows call existing targets with minimal rights and that all versions agree."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def load(name):
    return yaml.safe_load(WORKFLOWS[name].read_text())


def steps(name):
    return [step for job in load(name)["jobs"].values() for step in job.get("steps", [])]


@pytest.fixture(scope="module")
def release_notes():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".github" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.release_notes


def test_the_workflows_call_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        target
        for name in WORKFLOWS
        for step in steps(name)
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))
    }
    assert called == {"docs", "lint", "test", "wheel"}
    assert called <= targets


def test_the_workflows_name_files_of_the_checkout():
    for name in WORKFLOWS:
        text = WORKFLOWS[name].read_text()
        for file in re.findall(r"(?:python3 |file: |uses: \./)(\S+)", text):
            assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_commit_with_their_version(name):
    uses = re.findall(r"uses: (.+)$", WORKFLOWS[name].read_text(), re.MULTILINE)
    assert uses
    for each in uses:
        assert each.startswith("./") or re.fullmatch(
            r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each
        ), each


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_expression_is_pasted_into_a_script(name):
    assert [step["run"] for step in steps(name) if "${{" in step.get("run", "")] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_failing_command_in_a_pipe_fails_its_step(name):
    """The runner's default shell lacks pipefail; an explicit bash has it."""
    for step in steps(name):
        if re.search(r"[^|]\|[^|]", step.get("run", "")):
            assert step.get("shell") == "bash", step


def test_each_job_has_only_the_rights_it_needs():
    for name in WORKFLOWS:
        workflow = load(name)
        assert workflow["permissions"] == {}
        assert all("permissions" in job for job in workflow["jobs"].values())
        assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())
    assert all(job["permissions"] == {"contents": "read"} for job in load("ci")["jobs"].values())
    assert "secrets." not in WORKFLOWS["ci"].read_text()
    assert "pull_request_target" not in WORKFLOWS["ci"].read_text()


def test_only_a_release_pushes_images_and_both_variants_have_provenance():
    (tried,) = [step["with"] for step in steps("ci") if "build-push" in step.get("uses", "")]
    assert tried["push"] is False
    jobs = load("release")["jobs"]
    assert jobs["image"]["strategy"]["matrix"]["variant"] == ["cpu", "gpu"]
    assert {"check", "ci"} <= set(jobs["image"]["needs"])
    assert "image" in jobs["release"]["needs"]
    (pushed,) = [step["with"] for step in steps("release") if "build-push" in step.get("uses", "")]
    assert (pushed["push"], pushed["sbom"], pushed["provenance"]) == (True, True, "mode=max")
    assert "provenance" not in tried


def test_the_changelog_has_a_section_for_the_version(release_notes):
    notes = release_notes(f"v{VERSION}")
    assert notes.strip()
    assert "\n## " not in notes
    newest = re.search(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == VERSION


@pytest.fixture
def project(tmp_path):
    """Writes a project of version 1.2.0 with a given changelog; returns its directory."""

    def write(changelog):
        (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        return tmp_path

    return write


def test_release_notes_are_the_versions_section_of_the_changelog(release_notes, project):
    text = (
        "# Changelog\n\n## [Unreleased]\n- later\n\n## [1.2.0] - 2026-01-02\n### Added\n- this\n\n"
        "## [1.1.0] - 2026-01-01\n- before\n\n[1.2.0]: https://example.org\n"
    )
    assert release_notes("v1.2.0", project(text)) == "### Added\n- this\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v1.3.0", "## [1.2.0] - 2026-01-02\n- this\n", "has version 1.2.0"),
        ("1.2.0", "## [1.2.0] - 2026-01-02\n- this\n", "tag v1.2.0"),
        ("v1.2.0", "## [1.1.0] - 2026-01-02\n- this\n", "no section"),
        ("v1.2.0", "## [1.2.0]\n- this\n", "no section"),
        ("v1.2.0", "## [1.2.0] - 2026-01-02\n\n## [1.1.0] - 2026-01-01\n- old\n", "with content"),
    ],
)
def test_a_tag_that_disagrees_with_version_or_changelog_is_refused(
    release_notes, project, tag, changelog, message
):
    with pytest.raises(ValueError, match=message):
        release_notes(tag, project(changelog))
