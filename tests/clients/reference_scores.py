"""Computes log-likelihoods of continuations with transformers, in the project's environment.

    python reference_scores.py MODEL PAIRS.json

The file contains lists of (context, continuation). The script prints lists of the log-likelihood
and whether the continuation is the greedy one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])

    def score(context: str, continuation: str) -> tuple[float, bool]:
        # The harness treats white space at the end of the context as part of the continuation.
        stripped = context.rstrip()
        start = len(tokenizer(stripped, add_special_tokens=False)["input_ids"])
        ids = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        steps = range(start, len(ids))
        total = sum(logits[i - 1, ids[i]].item() for i in steps)
        return total, all(logits[i - 1].argmax().item() == ids[i] for i in steps)

    groups = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps([[score(*pair) for pair in group] for group in groups]))  # noqa: T201


if __name__ == "__main__":
    main()
