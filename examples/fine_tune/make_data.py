"""Writes a small data set of your own as JSONL: questions to a support desk, and its answers."""

import itertools
import json
import random
from pathlib import Path

TEAMS = {
    "a refund": "billing", "an invoice": "billing", "a lost parcel": "shipping",
    "a late parcel": "shipping", "a broken screen": "repairs", "a dead battery": "repairs",
    "a new password": "accounts", "a changed address": "accounts",
}  # fmt: skip
OPENINGS = ["Hello,", "Good morning,", "Hi there,", "Please help,", "Dear team,"]
REQUESTS = ["I write about", "I have a question about", "who deals with", "I need help with"]
DAYS = ["today", "this week", "on Monday", "since May", "again", "as agreed"]


def row(opening: str, request: str, topic: str, day: str) -> dict[str, object]:
    """Return one conversation, with the answer that is checked."""
    team = TEAMS[topic]
    reply = f"Thank you for your message about {topic}. The {team} team will reply. Answer: {team}"
    question = {"role": "user", "content": f"{opening} {request} {topic} {day}."}
    return {"messages": [question, {"role": "assistant", "content": reply}], "answer": team}


rows = [row(*parts) for parts in itertools.product(OPENINGS, REQUESTS, TEAMS, DAYS)]
random.Random(0).shuffle(rows)
for name, part in {"held-out.jsonl": rows[:160], "my-data.jsonl": rows[160:]}.items():
    Path(name).write_text("".join(json.dumps(each) + "\n" for each in part), encoding="utf-8")
    print(f"{name}: {len(part)} conversations")
