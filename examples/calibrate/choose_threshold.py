"""Calibrates a checkpoint, and prints the fastest way to decode that loses no more than allowed."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint directory with mars.json")
    parser.add_argument("data", type=Path, help="held-out conversations")
    parser.add_argument("--max-loss", type=float, default=2.0, help="points, at the upper end")
    parser.add_argument("--quick", action="store_true", help="measure less precisely")
    arguments = parser.parse_args()
    command = ["marsray", "calibrate", arguments.model, "--data", arguments.data]
    subprocess.run([*command, *(["--quick"] if arguments.quick else [])], check=True)
    frontier = json.loads((arguments.model / "frontier.json").read_text(encoding="utf-8"))
    allowed = {name(point): speed(point) for point in frontier["points"]
               if highest_loss(point) <= arguments.max_loss}  # fmt: skip
    for setting, tokens in sorted(allowed.items(), key=lambda item: -item[1]):
        print(f"{setting}: {tokens:.2f} tokens a forward pass")
    print(f"choose {max(allowed, key=allowed.__getitem__)}")


def name(point: dict[str, Any]) -> str:
    """Return how a request asks for a point of the frontier."""
    is_threshold = point["mode"] == "threshold"
    return (
        f"confidence_threshold {point['threshold']:g}" if is_threshold else f"mode {point['mode']}"
    )


def speed(point: dict[str, Any]) -> float:
    """Return the most tokens a pass among the numbers of masks that were measured."""
    return max(float(window["tokens_per_forward"]) for window in point["windows"])


def highest_loss(point: dict[str, Any]) -> float:
    """Return the upper end of the loss; mode ar and mode exact lose nothing by design."""
    return float(point["loss"]["high"]) if point["mode"] == "threshold" else 0.0


if __name__ == "__main__":
    main()
