"""The diagrams of the pages, and the chart of gains, which is drawn from the log of experiments."""

from __future__ import annotations

import json

from marsray_docs.drawing import Drawing
from marsray_docs.repository import ROOT
from marsray_docs.results import results

DATA = ROOT / "docs" / "site" / "data"
_LETTER, _LETTERS = 7.6, 53
"""Width of a letter, and letters that a row of passes has room for."""


def diagrams() -> dict[str, str]:
    """Return the diagrams as SVG, by the names of their files without the ending."""
    drawn = {
        "system": _system(),
        "checkpoint-life": _checkpoint_life(),
        "exact-step": _exact_step(),
        "kubernetes": _kubernetes(),
        "gain-by-clients": _gain_by_clients(),
        "passes": _passes(),
    }
    return {name: drawing.svg() for name, drawing in drawn.items()}


def _system() -> Drawing:
    it = Drawing(420, 350, "Training makes a checkpoint, which is calibrated, served and scaled")
    it.box(8, 8, 122, 52, ["Conversations", "JSONL, Parquet"])
    it.box(8, 74, 122, 52, ["Your model", "Hugging Face"])
    it.box(164, 8, 112, 118, ["Train", "fine-tune,", "then masks", "(Ray Train)"])
    it.box(310, 8, 102, 118, ["Calibrate", "speed and", "loss at", "each τ"])
    it.line([(130, 34), (162, 34)])
    it.line([(130, 100), (162, 100)])
    it.line([(276, 67), (308, 67)])
    it.line([(361, 126), (361, 198)])
    it.text(354, 154, "checkpoint and measured trade-off", "soft right")
    it.area(138, 172, 274, 170, "Ray Serve")
    it.box(8, 196, 98, 60, ["Clients", "OpenAI's,", "Anthropic's"])
    it.box(152, 200, 94, 52, ["Ingress", "queue, keys"])
    it.box(306, 208, 98, 44, [])
    it.box(300, 200, 98, 46, ["Replicas", "an engine each"])
    it.box(152, 286, 246, 46, ["Controller", "holds the time to the first token"], "glow")
    it.line([(106, 226), (150, 226)])
    it.line([(246, 226), (298, 226)])
    it.line([(199, 252), (199, 284)])
    it.text(192, 273, "load", "soft right")
    it.line([(349, 286), (349, 254)], "accent")
    it.text(342, 273, "τ and replicas", "accent right")
    return it


def _checkpoint_life() -> Drawing:
    it = Drawing(420, 372, "A checkpoint is trained, calibrated, compared, served and audited")
    steps = [
        ("Train", "marsray train own.yaml", "own/model: the AR model with masks, or an adapter"),
        ("Calibrate", "marsray calibrate own/model", "frontier.json: speed and loss of each mode"),
        ("Promote", "marsray promote own/model", "refused if it is worse than what is served"),
        ("Serve", "marsray serve", "mode exact, unless you ask for a τ"),
        ("Audit", "in the server", "a sample below τ = 1 is decoded again in exact"),
    ]
    for number, (name, command, result) in enumerate(steps):
        y = 8 + number * 74
        it.box(36, y, 376, 52, [], "glow" if name == "Serve" else "box")
        it.text(50, y + 22, name, "bold left")
        it.text(400, y + 22, command, "code right")
        it.text(50, y + 42, result, "soft left")
        if number + 1 < len(steps):
            it.line([(224, y + 52), (224, y + 72)])
    it.line([(36, 330), (14, 330), (14, 34), (34, 34)], "dashed")
    it.parts.append('<text class="soft" transform="translate(9 186) rotate(-90)">new data</text>')
    return it


def _exact_step() -> Drawing:
    it = Drawing(420, 388, "A step checks three drafts and makes new ones after each outcome")
    it.text(8, 18, "1. A pass gets the last token, drafts and masks m", "left bold")
    cells = [("71,", "box"), (" 73", "box"), (" hats", "box"), (" Then", "box")]
    for number, (token, kind) in enumerate(cells):
        it.box(8 + number * 101, 40, 92, 28, [token], kind)
        it.text(
            54 + number * 101, 84, ("last token", "draft 1", "draft 2", "draft 3")[number], "soft"
        )
        for mask in range(3):
            it.box(8 + number * 101 + mask * 32, 94, 28, 22, ["m"])
        it.text(
            54 + number * 101,
            132,
            ("if 0 are right", "if 1 is", "if 2 are", "if 3 are")[number],
            "soft",
        )
    it.line([(210, 142), (210, 166)])
    it.text(8, 184, "2. The model's own choice checks each draft", "left bold")
    checked = [("73", "right"), ("hats", "right"), ("Next", "wrong")]
    for number, (token, verdict) in enumerate(checked):
        x = 109 + number * 101
        it.box(x, 198, 92, 28, [token], "glow" if verdict == "right" else "box")
        it.text(x + 46, 242, "✓ right" if verdict == "right" else "✗ not Then", "soft")
    it.line([(210, 252), (210, 276)])
    it.text(8, 294, "3. Three tokens are out, and the next drafts are there", "left bold")
    for number, token in enumerate((" 73", " hats", " Next")):
        it.box(8 + number * 76, 308, 70, 28, [token], "glow")
    for number in range(3):
        it.box(244 + number * 58, 308, 54, 28, [("adding", "3", "and")[number]])
    it.text(119, 354, "output, as mode ar writes it", "soft")
    it.text(331, 354, "drafts by the masks of “if 2”", "soft")
    it.text(
        210, 378, "Keys and values of right drafts are kept; nothing is computed twice.", "soft"
    )
    return it


def _kubernetes() -> Drawing:
    it = Drawing(420, 470, "What runs where on Kubernetes, and which ports are open")
    it.box(8, 8, 122, 44, ["Clients", "HTTPS 443"])
    it.box(150, 8, 122, 44, ["Gateway", "ends TLS"])
    it.box(292, 8, 120, 44, ["KubeRay", "kuberay-system"])
    it.line([(130, 30), (148, 30)])
    it.area(8, 72, 404, 390, "namespace marsray")
    it.area(20, 98, 380, 208, "RayService")
    it.box(
        34,
        126,
        150,
        164,
        [
            "Head pod",
            "GCS, dashboard",
            "Serve's controller",
            "marsray's controller",
            "Ray's autoscaler",
        ],
    )
    it.box(216, 134, 166, 156, [])
    it.box(
        208,
        126,
        166,
        156,
        [
            "Worker pods",
            "proxy, port 8000",
            "ingress",
            "replica: one engine,",
            "on one GPU or on CPUs",
            "weights read only",
        ],
        "glow",
    )
    it.line([(256, 52), (256, 124)], "accent")
    it.text(264, 118, "8000", "accent left")
    it.line([(352, 52), (352, 62), (160, 62), (160, 124)])
    it.text(166, 90, "8265, 8000", "left soft")
    it.line([(208, 208), (186, 208)], "dashed")
    it.box(34, 330, 150, 56, ["RayJobs", "train, calibrate,", "evaluate, promote"])
    it.box(208, 330, 166, 56, ["Volumes or bucket", "/data, /models"])
    it.line([(184, 358), (206, 358)])
    it.line([(291, 330), (291, 294)])
    it.text(300, 322, "/models/current", "soft left")
    it.box(34, 406, 150, 44, ["Secrets", "keys, TLS, Redis"])
    it.box(208, 406, 166, 44, ["Prometheus", "8080, head 8000 (ha)"])
    return it


def _gain_by_clients() -> Drawing:
    """Tokens per second of two modes and of vLLM by the number of clients."""
    it = Drawing(420, 318, "Tokens per second by clients: exact leads up to 16 clients")
    head, *rows = results()["served"].rows
    clients = [int(cell) for cell in head[1:]]
    lines = {name.strip("`"): [float(cell.split()[0]) for cell in cells] for name, *cells in rows}
    shown = {"exact": "accent", "ar": "", "vLLM": "dashed"}
    most = max(value for name in shown for value in lines[name])
    left, right, top, bottom = 44, 352, 34, 268

    def at(place: int, value: float) -> tuple[float, float]:
        x = left + (right - left) * place / (len(clients) - 1)
        return round(x, 1), round(bottom - (bottom - top) * value / most, 1)

    it.text(8, 18, "tokens/s of all clients together", "left soft")
    for value in range(0, int(most) + 1, 100):
        it.line([(left, at(0, value)[1]), (right, at(0, value)[1])], "grid", head=False)
        it.text(left - 8, at(0, value)[1] + 4, str(value), "right soft")
    for place, count in enumerate(clients):
        it.text(at(place, 0)[0], bottom + 20, str(count), "soft")
    it.text((left + right) / 2, bottom + 42, "clients at once", "soft")
    for name, kind in shown.items():
        points = [at(place, value) for place, value in enumerate(lines[name])]
        it.line(points, f"{kind} curve", head=False)
        it.text(
            right + 8,
            points[-1][1] + {"exact": -1, "ar": 12}.get(name, 4),
            name,
            f"left bold {kind}",
        )
    return it


def _passes() -> Drawing:
    """Draw the beginning of one answer in each mode, with a box for each forward pass."""
    found = json.loads((DATA / "passes.json").read_text(encoding="utf-8"))
    it = Drawing(420, 198, "One answer takes fewer forward passes in mode exact and at a threshold")
    titles = {"ar": "mode ar", "exact": "mode exact, the same text", "threshold": "τ = .9"}
    for row, (mode, title) in enumerate(titles.items()):
        y = 18 + row * 66
        it.text(8, y, title, "left bold")
        it.text(412, y, f"{len(found[mode])} passes", "right soft")
        begin = 0
        for number, text in enumerate(found[mode]):
            text = text[: _LETTERS - begin]
            x, width = 8 + begin * _LETTER, len(text) * _LETTER
            if text:
                it.box(x, y + 10, width, 26, [], "glow" if number % 2 else "box")
            for place, letter in enumerate(text):
                it.text(x + (place + 0.5) * _LETTER, y + 27, letter, "code")
            begin += len(text)
    return it
