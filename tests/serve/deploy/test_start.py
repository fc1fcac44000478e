"""``marsray serve`` loads little itself, and says how long each stage of its start took."""

import re
import subprocess
import sys

from mars_serve.deploy.stages import Stages


def test_the_command_starts_without_torch():
    code = (
        "import sys, mars_serve.deploy.run, mars_serve.deploy.start;"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_stages_add_up_to_the_whole_time():
    stages = Stages()
    for name in ("command", "Ray", "models"):
        stages.end(name)
    found = re.fullmatch(
        r"(\d+\.\d) s: command (\d+\.\d), Ray (\d+\.\d), models (\d+\.\d)", stages.summary()
    )
    assert found is not None
    whole, *parts = map(float, found.groups())
    assert abs(whole - sum(parts)) < 0.05 * (len(parts) + 1)
