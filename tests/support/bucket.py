"""An S3 service that can fail on request: moto behind a proxy that records and rejects calls."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs

BROKEN = "broken"
"""Response that closes the connection."""
HALF = "half"
"""Response truncated to its first half."""


@dataclass(frozen=True)
class Call:
    """A request to the service."""

    method: str
    key: str
    """Key of the object, prefixed with the bucket."""
    query: dict[str, list[str]]
    range: str

    @property
    def is_part(self) -> bool:
        """True for the upload of a part."""
        return self.method == "PUT" and "partNumber" in self.query


@dataclass
class S3Proxy:
    """Proxy in front of a WSGI application.

    ``refuse(call)`` returns an error's status and code, `BROKEN`, `HALF`, or None to pass the call.
    """

    application: Callable
    refuse: Callable[[Call], tuple[int, str] | str | None] = lambda call: None
    calls: list[Call] = field(default_factory=list)

    def __call__(self, environ, start_response):
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        path, byte_range = environ["PATH_INFO"].lstrip("/"), environ.get("HTTP_RANGE", "")
        call = Call(environ["REQUEST_METHOD"], path, query, byte_range)
        self.calls.append(call)
        answer = self.refuse(call)
        if answer is None:
            return self.application(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if answer == BROKEN:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if answer == HALF:
            return self._half(environ, start_response)
        status, code = answer
        start_response(f"{status} No", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>No.</Message></Error>".encode()]

    def _half(self, environ, start_response) -> Iterator[bytes]:
        whole = b"".join(self.application(environ, start_response))
        yield whole[: len(whole) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def opened() -> Iterator[tuple[S3Proxy, str]]:
    """Serve moto's AWS account of this process; yield the proxy and its address."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    proxy = S3Proxy(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, proxy, threaded=True)
    running = threading.Thread(target=server.serve_forever, daemon=True)
    running.start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        running.join()
        server.server_close()
