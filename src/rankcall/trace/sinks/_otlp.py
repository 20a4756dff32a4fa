"""OTLP exporters that say once when the collector is away, and give up before long."""

from __future__ import annotations

import logging
import threading
from typing import Any

from rankcall.trace.sinks.base import logger
from rankcall.trace.sinks.extras import imported

_PACKAGE = "opentelemetry.exporter.otlp.proto.http"
_TIMEOUT_SECONDS = 2
_TRIES = 3


def exporter(module: str, name: str, endpoint: str | None, path: str) -> Any:
    """Return an exporter over HTTP, to ``endpoint`` or where the SDK's own variables say."""
    base = getattr(imported(f"{_PACKAGE}.{module}", "otel"), name)
    made = type(name, (_ReportsOnce, base), {})
    where = {} if endpoint is None else {"endpoint": f"{endpoint.rstrip('/')}/{path}"}
    return made(timeout=_TIMEOUT_SECONDS, **where)


class _ReportsOnce:
    """Stands in front of an exporter: three failures in a row, and it is dropped."""

    _failures = 0
    _result: Any = None

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Export; quietly, for this class does the talking."""
        if self._failures >= _TRIES:
            return self._result
        with _Quiet():
            self._result = super().export(*args, **kwargs)  # type: ignore[misc]
        if self._result.name == "SUCCESS":
            self._failures = 0
        else:
            self._failures += 1
            if self._failures == 1:
                where = getattr(self, "_endpoint", "the collector")
                logger.error(
                    "the OpenTelemetry collector at %s cannot be reached; training goes on, and "
                    "after %d tries without it", where, _TRIES
                )  # fmt: skip
        return self._result


class _Quiet:
    """Keeps what the SDK logs on this thread, at each retry, from whoever reads the log."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._loggers = [
            each
            for name, each in list(logging.Logger.manager.loggerDict.items())
            if name.startswith("opentelemetry.exporter.otlp") and isinstance(each, logging.Logger)
        ]
        for each in self._loggers:
            each.addFilter(self._passes)

    def __exit__(self, *exception: object) -> None:
        for each in self._loggers:
            each.removeFilter(self._passes)

    def _passes(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread
