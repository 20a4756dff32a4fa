"""Answer a Prometheus scraper over HTTP, or add to a registry that the program serves itself."""

from __future__ import annotations

from typing import Any

from rankcall.trace.sinks.optional import optional_module

_CLOSE_SECONDS = 1.0  # a scrape that is under way when the sink closes may take that long


class Endpoint:
    """A collector of metrics in a registry, and the server that answers with it.

    Args:
        port: The first port; 0 takes a free one.
        address: The address to listen on.
        registry: A registry of the caller's own; then nothing is served.
    """

    def __init__(self, port: int, address: str, registry: Any = None) -> None:
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port must be from 0 to 65535; got {port}")
        self._client = optional_module("prometheus_client", "prometheus")
        self._asked, self._address, self._registry = port, address, registry
        self._serves = registry is None
        self._collector: Any = None
        self._server: Any = None
        self.port: int | None = None

    def open(self, collector: Any, local_rank: int) -> None:
        """Register the collector, and listen on the port of a local rank."""
        if self._serves:
            registry = self._client.CollectorRegistry()
            port = self._asked + local_rank if self._asked else 0
            try:
                self._server = self._client.start_http_server(port, self._address, registry)
            except OSError as error:
                text = f"port {port} on {self._address}: {error.strerror}"
                raise OSError(error.errno, text) from error
            self.port = self._server[0].server_port
            self._registry = registry
        self._registry.register(collector)
        self._collector = collector

    def close(self) -> None:
        """Remove the collector and stop listening."""
        if self._collector is not None:
            self._registry.unregister(self._collector)
            self._collector = None
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(_CLOSE_SECONDS)
            self._server = None
