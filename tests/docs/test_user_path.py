"""The pages and examples that train and serve a model, from the data to an answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from marsray_docs.blocks import blocks, program_with_server, script
from shell import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the quickstart and the page on an own model have been run."""
    directory = tmp_path_factory.mktemp("own-model")
    shutil.copytree(EXAMPLES / "fine_tune", directory, dirs_exist_ok=True)
    quickstart, own = (
        script(blocks(ROOT / "docs" / "start" / f"{name}.md"))
        for name in ("quickstart", "your-model")
    )
    (directory / "quickstart.txt").write_text(run_script(quickstart, directory))
    own = f"MODEL=my-model/stages/ar\n{own}"
    (directory / "your-model.txt").write_text(run_script(own, directory))
    return directory


def test_the_quickstart_ends_with_answers_in_three_modes(work: Path) -> None:
    printed = (work / "quickstart.txt").read_text()
    passes = [int(line.split()[-3]) for line in printed.splitlines() if " took " in line]
    assert len(passes) == 3
    assert max(passes[1:]) < passes[0], "several tokens a pass are fewer passes"
    assert "Answer: billing" in printed


def test_own_data_become_a_served_model(work: Path) -> None:
    printed = (work / "your-model.txt").read_text()
    assert '"ready"' in printed
    assert "Answer: billing" in printed
    for name in ("calibration.json", "frontier.json"):
        assert (work / "own" / "model" / name).exists()


def test_the_example_of_serving_moves_the_threshold(work: Path) -> None:
    program = EXAMPLES / "serve_and_call" / "serve_and_call.py"
    printed = run_script(f"python {program} my-model/model", work)
    lines = printed.splitlines()
    plain, exact, given, live = (
        next(line.removeprefix(f"{settings}: ") for line in lines if line.startswith(settings))
        for settings in (
            "{'mode': 'ar'}",
            "{'mode': 'exact'}",
            "{'confidence_threshold': 0.9}",
            "{'mode': 'threshold'}",
        )
    )
    assert exact.replace("|", "") == plain.replace("|", "")
    assert exact.count("|") < plain.count("|")
    assert given.count("|") < plain.count("|")
    assert live.count("|") < plain.count("|")


def test_the_example_of_calibrating_chooses_a_setting(work: Path) -> None:
    program = EXAMPLES / "calibrate" / "choose_threshold.py"
    printed = run_script(f"python {program} my-model/model held-out.jsonl --quick", work)
    assert "mode ar: 1.00 tokens a forward pass" in printed
    assert printed.splitlines()[-1].startswith("choose ")


def test_programs_in_pages_get_answers_of_a_server(work: Path) -> None:
    served = "marsray serve --model mine=my-model/model --port 8000 >&2 &"
    ready = "curl --silent --retry 120 --retry-delay 1 --retry-all-errors --fail $SERVER/ready"
    parts = [f"SERVER=http://127.0.0.1:8000\nset -eu\n{served}\n{ready}\n"]
    for page in (ROOT / "README.md", ROOT / "docs" / "guides" / "clients.md"):
        program = program_with_server(blocks(page))
        assert program
        parts.append(f"python - <<'END OF PROGRAM'\n{program}END OF PROGRAM\n")
    printed = run_script("".join([*parts, "kill %1 && wait"]), work)
    assert printed.count("'forward_passes': ") == 4
