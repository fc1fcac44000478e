"""A program that answers chat completions as other servers do: ``python other_server.py FLAWS``.

Every answer is the last message's words, one event for each, with vLLM's counters in
``/metrics``. The flaws, joined by commas: ``ends`` at once, ``refuses`` all requests, ``silent``
about usage and counters, ``wrong`` answers.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FLAWS = sys.argv[1].split(",")
COUNTS = {"vllm:generation_tokens_total": 90, "vllm:spec_decode_num_accepted_tokens_total": 0}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path == "/health" or "silent" not in FLAWS
        lines = [f"# TYPE {name} counter\n{name} {n}\n" for name, n in COUNTS.items()]
        self.answer(200 if found else 404, "".join(lines))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "refuses" in FLAWS:
            self.answer(422, json.dumps({"error": {"message": "no such field", "code": "bad"}}))
            return
        assert "cache_salt" not in body  # a server may refuse fields that it does not know
        words = body["messages"][-1]["content"].split()[: body["max_tokens"]]
        texts = ["no" if "wrong" in FLAWS else f"{word} " for word in words]
        events = [{"choices": [{"delta": {"content": text}}]} for text in ["", *texts]]
        if "silent" not in FLAWS:
            assert body["stream_options"] == {"include_usage": True}
            events.append({"choices": [], "usage": {"completion_tokens": len(words)}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        lines += ["data: [DONE]\n\n"] if "silent" in FLAWS else []
        self.answer(200, "".join(lines))
        COUNTS["vllm:generation_tokens_total"] += len(words)
        COUNTS["vllm:spec_decode_num_accepted_tokens_total"] += len(words) // 2

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


if "ends" in FLAWS:
    sys.exit("cannot start")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
