"""Conversations as lines of JSONL files."""

import json


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"messages": messages}


GOOD = json.dumps(chat("Count a box of 12 apples", "There are 12 apples in the box."))
LONG = json.dumps(chat("Count", "a long answer " * 20))


def write_lines(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file
