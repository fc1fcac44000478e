"""Log-likelihoods of continuations by transformers alone; run by the interpreter that has torch.

    python reference_scores.py MODEL PAIRS.json

The file holds lists of (context, continuation); printed are lists of (score, whether greedy).
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
        # the harness counts white space that ends the context to the continuation
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
