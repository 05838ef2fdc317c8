"""Loopback server with scripted AWS responses, for responses that moto cannot produce."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs

REGION = "us-west-2"
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


class Answers:
    """Scripted responses by operation, and the recorded requests."""

    def __init__(self):
        self.asked: list[tuple[str, dict]] = []
        self.ready: dict[str, list[tuple[int, str]]] = {}
        self.address = ""

    def give(self, operation: str, status: int, body) -> None:
        """Add a response to ``operation``; the last one repeats. Strings are sent verbatim."""
        text = body if isinstance(body, str) else json.dumps(body)
        self.ready.setdefault(operation, []).append((status, text))

    def refuse(self, operation: str, code: str, message: str = "no", status: int = 400) -> None:
        """Add an AWS error response to ``operation``."""
        self.give(operation, status, {"__type": code, "message": message})

    def next(self, operation: str, asked: dict) -> tuple[int, str]:
        self.asked.append((operation, asked))
        queue = self.ready[operation]
        return queue.pop(0) if len(queue) > 1 else queue[0]


@contextlib.contextmanager
def serving() -> Iterator[Answers]:
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if target := self.headers["X-Amz-Target"]:
                asked, operation = json.loads(body), target.rpartition(".")[2]
            else:  # services with a query protocol, such as IAM
                asked = {name: values[0] for name, values in parse_qs(body).items()}
                operation = asked["Action"]
            status, text = answers.next(operation, asked)
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    answers.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
