"""An endpoint that speaks OpenAI's chat completions and rates steps, in place of a model: for `prm.toml`. Standard library only.

.venv/bin/python examples/prm_judge.py [PORT]           # default: 8123; 0 takes a free one, and prints it
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def rate(question: str) -> float:
    """0 to 10: how much of the last step is vowels. A real judge reads the task and thinks."""
    steps = re.findall(r"<steps>\n(.*?)\n</steps>", question, re.DOTALL)
    last = steps[-1].rpartition("\n\n")[2] if steps else ""
    return round(10 * sum(character in "aeiou" for character in last) / max(1, len(last)), 1)


class Judge(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = f"The last step counts.\nSCORE: {rate(request['messages'][-1]['content'])}"
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: there is a request for every step of every rollout."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8123), Judge)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
