"""A server that gets notices, for tests of what is sent."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Receiver:
    """A server that keeps what it gets, and answers with these statuses, the last one for ever."""

    statuses: list[int] = field(default_factory=lambda: [200])
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    @contextlib.contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
        """Serve on a free port of this host."""
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                names = {name.lower(): value for name, value in self.headers.items()}
                receiver.got.append((names, body))
                statuses = receiver.statuses
                status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", receiver.url + "elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://localhost:{server.server_port}/T0/secret/"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
