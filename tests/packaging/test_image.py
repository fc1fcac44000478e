"""Checks that the image's Dockerfile pins all packages and names existing files."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
IMAGE, WORKFLOWS = ROOT / "k8s" / "image", ROOT / ".github" / "workflows"
DOCKERFILE = (IMAGE / "Dockerfile").read_text().replace("\\\n", "")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "extra": ""}


def pins(name):
    """Version and file hashes of each package in a constraints file."""
    text = (IMAGE / f"constraints-{name}.txt").read_text().replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        if line.startswith(("#", "-", " ")) or not line.strip():
            continue
        requirement, *hashes = line.split(" --hash=")
        package, version = requirement.strip().split("==")
        found[canonicalize_name(package)] = (version, [each.strip() for each in hashes])
    return found


@pytest.mark.parametrize("name", ["cpu", "gpu", "build"])
def test_every_package_has_hashes(name):
    for package, (_, hashes) in pins(name).items():
        assert hashes, package
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), package


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cpu", PROJECT["project"]["dependencies"]),
        ("gpu", PROJECT["project"]["dependencies"]),
        ("cpu", PROJECT["project"]["optional-dependencies"]["tracing"]),
        ("gpu", (IMAGE / "requirements.in").read_text().splitlines()[1:]),
        ("build", PROJECT["build-system"]["requires"]),
    ],
)
def test_every_requirement_is_pinned_to_a_version_that_it_allows(name, wanted):
    found = pins(name)
    for requirement in map(Requirement, wanted):
        assert requirement.marker is None or requirement.marker.evaluate(LINUX)
        version, _ = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_the_variants_differ_only_in_torch_and_its_libraries():
    cpu, gpu = ({key: found[0] for key, found in pins(name).items()} for name in ("cpu", "gpu"))
    assert cpu.pop("torch") == gpu.pop("torch") + "+cpu"
    assert cpu.items() <= gpu.items()
    assert all(re.match("nvidia-|cuda-|triton$", key) for key in gpu.keys() - cpu.keys())
    assert "nvidia-cuda-runtime" in gpu


def test_torch_has_the_version_that_the_tests_use():
    (tested,) = re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert pins("gpu")["torch"][0] == tested


def test_the_base_image_has_the_ray_of_the_constraints():
    found = re.findall(r"(FROM |io/)rayproject/ray:([\d.]+)-py311-(cpu|gpu)", DOCKERFILE)
    assert len(found) == 4, "each variant's base and its label"
    versions = {version for _, version, _ in found}
    assert versions == {pins(name)["ray"][0] for name in ("cpu", "gpu")}


def test_the_image_runs_as_a_numbered_user_and_installs_only_pinned_packages():
    users = re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    installs = re.findall(r"pip install (.+)$", DOCKERFILE, re.MULTILINE)
    assert len(installs) == 3
    assert all("--no-deps" in each for each in installs)
    assert all("--require-hashes" in each or each.endswith(" /dist/*.whl") for each in installs)
    assert ":latest" not in DOCKERFILE


def test_the_build_context_holds_only_the_copied_files():
    copied = {
        source
        for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    copied.remove("k8s/image/constraints-build.txt")
    copied.add("k8s/image/constraints-*.txt")  # the variants' files are mounted
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all(list(ROOT.glob(source)) for source in copied)


def test_every_base_image_has_a_digest_or_a_release_is_refused():
    bases = re.findall(r"^FROM ([^$\s]+:\S+)", DOCKERFILE, re.MULTILINE)
    unpinned = {base for base in bases if not re.search("@sha256:[0-9a-f]{64}$", base)}
    assert all(base.startswith("rayproject/ray:") for base in unpinned)
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
    (check,) = (
        step["run"] for step in jobs["check"]["steps"] if "Dockerfile" in step.get("run", "")
    )
    done = subprocess.run(["/bin/bash", "-c", check], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == bool(unpinned)
    assert "check" in jobs["image"]["needs"]


def test_other_images_can_take_the_place_of_the_base_images():
    default = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    stages = re.findall(r"^FROM .+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    built_on = re.findall(r"^FROM \$\{(\w+)\}", DOCKERFILE, re.MULTILINE)
    assert [default[name].replace("${VARIANT}", "gpu") for name in built_on] == [
        "python",
        "ray-gpu",
    ]
    assert {"python", "ray-gpu", "ray-cpu"} <= set(stages)


def test_constraints_are_scanned_weekly_for_each_change_and_before_a_release():
    workflow = yaml.safe_load((WORKFLOWS / "supply-chain.yml").read_text())
    triggers = workflow[True]  # YAML's reading of the key `on`
    assert triggers["schedule"][0]["cron"].endswith(" * * 1")
    for event in ("push", "pull_request"):
        assert {"k8s/image/*", "pyproject.toml"} <= set(triggers[event]["paths"])
    command = workflow["jobs"]["scan"]["steps"][-1]["run"]
    scanned = set(re.findall(r"--lockfile requirements.txt:(\S+)", command))
    assert scanned == {str(file.relative_to(ROOT)) for file in IMAGE.glob("constraints-*.txt")}
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]
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
    wanted = PROJECT["project"]["dependencies"]
    (requirement,) = (each for each in map(Requirement, wanted) if each.name == package)
    assert not requirement.specifier.contains(last_bad)
