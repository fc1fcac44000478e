"""Writes the image's constraints: each package with its version and the hashes of its files.

Run it with `make constraints` after a change of pyproject.toml or requirements.in. Where possible a
package gets the version of the current environment, with which the tests passed; the others get the
newest version that fits. uv resolves for the image's Python and platform and installs nothing.

    constraints-cpu.txt    torch without CUDA, which only PyTorch's CPU index has
    constraints-gpu.txt    torch with CUDA and its libraries, from PyPI like the other packages
    constraints-build.txt  the packages that build the wheel
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distributions, version
from pathlib import Path

_IMAGE = Path(__file__).resolve().parent
_ROOT = _IMAGE.parents[1]
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Ubuntu 22.04 has glibc 2.35; llguidance has no wheels for versions before 2.31.
_TARGET = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_35")
_HEADER = """\
# For Linux on x86_64 with Python 3.11. Each file that pip installs has to match a hash below; only
# ray itself is in the base image already, pinned there by the image's tag.
"""
_CPU_HEADER = f"""\
# torch comes from the index in the next line, all else from PyPI: a hash says which file is meant,
# so that neither index can stand in for the other.
--extra-index-url {_CPU_INDEX}
"""


def main() -> None:
    """Write the three constraints files beside this script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--torch-wheels",
        metavar="DIR",
        type=Path,
        help=f"a directory with torch's CPU wheel, for machines that cannot reach {_CPU_INDEX}",
    )
    directory = parser.parse_args().torch_wheels
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    torch = version("torch").partition("+")[0]
    source = ["--find-links", str(directory.resolve())] if directory else ["--torch-backend", "cpu"]
    inputs = ["--extra", "tracing", "pyproject.toml", "k8s/image/requirements.in"]
    _write("cpu", _HEADER + _CPU_HEADER, [f"torch=={torch}+cpu"], [*inputs, *source])
    _write("gpu", _HEADER, [f"torch=={torch}"], inputs)
    _write("build", "", project["build-system"]["requires"], [])


def _write(name: str, header: str, requirements: list[str], arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "constraints.txt")
        output.write_text(_installed())  # uv keeps versions of an existing output file if it can
        _compile(requirements, [*arguments, "--output-file", str(output)])
        target = _IMAGE / f"constraints-{name}.txt"
        target.write_text(header + output.read_text())
    sys.stdout.write(f"{target.relative_to(_ROOT)}\n")


def _installed() -> str:
    pins = {found.metadata["Name"]: found.version for found in distributions()}
    return "".join(
        f"{name}=={pin}\n" for name, pin in pins.items() if name not in ("marsray", "torch")
    )


def _compile(requirements: list[str], arguments: list[str]) -> None:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", *_TARGET]
    command += ["--generate-hashes", "--no-build"]
    command += ["--custom-compile-command", "make constraints", *arguments, "-"]
    text = "\n".join(requirements)
    done = subprocess.run(command, input=text, text=True, cwd=_ROOT, check=False)  # noqa: S603 - uv
    if done.returncode:
        sys.exit(f"error: uv could not resolve {', '.join(requirements)}; see its reasons above")


if __name__ == "__main__":
    main()
