"""Every allowed version of torch has the unstable interfaces that this project uses.

`torch_versions/used.txt` names what is used and with which parameters, `signatures.json` holds the
parameters in each version, as `record.py` reads them from a wheel's sources.
"""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).with_name("torch_versions")
USED = {
    place: parameters
    for place, *parameters in map(str.split, (HERE / "used.txt").read_text().splitlines())
}
RECORDED = json.loads((HERE / "signatures.json").read_text())
_PRIVATE = re.compile(
    r"torch\.(?:_dynamo|_inductor|compiler|library|nn\.attention|distributed\.fsdp|cuda\.graphs)"
    r"[\w.]*\.(\w+)|from torch\.(?:_\w+|nn\.attention|distributed\.fsdp)[\w.]* import ([^#\n]+)"
)
_KNOWN = {"patch", "flex_attention", "AuxRequest", "BlockMask", "exc", "FSDPModule"}
"""Names of modules, of classes without parameters of their own, and of methods in the list."""


def recorder():
    spec = importlib.util.spec_from_file_location("record", HERE / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def minor(version):
    return ".".join(version.split(".")[:2])


@pytest.mark.parametrize("version", RECORDED)
def test_every_version_has_the_parameters_that_are_used(version):
    assert RECORDED[version].keys() == USED.keys()
    missing = {
        place: lacking
        for place, parameters in USED.items()
        if (lacking := set(parameters) - set(RECORDED[version][place].split()))
    }
    assert missing == {}


def test_the_oldest_version_that_is_allowed_is_recorded():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (allowed,) = (each for each in project["dependencies"] if each.startswith("torch>"))
    oldest = re.match(r"torch>=([\d.]+)", allowed)[1]
    assert min(RECORDED, key=lambda each: tuple(map(int, each.split(".")))) == minor(oldest)


def test_the_installed_version_is_what_was_recorded():
    found = recorder().signatures(Path(torch.__file__).parents[1], list(USED))
    assert found == RECORDED.get(minor(torch.__version__), found)
    lacking = {p: set(USED[p]) - set(found[p].split()) for p in USED}
    assert not any(lacking.values()), lacking


def test_all_that_is_used_of_private_and_prototype_modules_is_listed():
    listed = {part for place in USED for part in re.split(r"\W+", place.partition(":")[2])}
    found = set()
    for root in ("platform", "train", "serve", "autoscale"):
        for file in (ROOT / root).rglob("*.py"):
            for name, names in _PRIVATE.findall(file.read_text(encoding="utf-8")):
                found |= {name} if name else {each.strip() for each in names.split(",")}
    assert found - listed - _KNOWN == set()
    assert {"recompile_limit", "mark_dynamic", "fully_shard", "register_fake"} <= listed | found
