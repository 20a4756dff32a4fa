"""OTLP exporters that log one error if the collector does not answer, and soon stop trying."""

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
    """Return an exporter over HTTP.

    Args:
        module: The exporter's module in the OTLP package.
        name: The exporter's class.
        endpoint: The collector's address; None leaves it to the SDK's environment variables.
        path: The path of this kind of data below ``endpoint``.

    Raises:
        ExtraMissing: The OTLP package is not installed.
    """
    base = getattr(imported(f"{_PACKAGE}.{module}", "otel"), name)
    made = type(name, (_ReportsOnce, base), {})
    where = {} if endpoint is None else {"endpoint": f"{endpoint.rstrip('/')}/{path}"}
    return made(timeout=_TIMEOUT_SECONDS, **where)


class _ReportsOnce:
    """Wraps an exporter's ``export``; after three failures in a row it exports no more."""

    _failures = 0
    _result: Any = None

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Export without the SDK's log messages; log the first failure."""
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
    """Suppresses the messages that the SDK logs on this thread at each retry."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._loggers = [
            known
            for name, known in list(logging.Logger.manager.loggerDict.items())
            if name.startswith("opentelemetry.exporter.otlp") and isinstance(known, logging.Logger)
        ]
        for sdk_logger in self._loggers:
            sdk_logger.addFilter(self._passes)

    def __exit__(self, *exception: object) -> None:
        for sdk_logger in self._loggers:
            sdk_logger.removeFilter(self._passes)

    def _passes(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread
