"""Tell another program of verdicts, restarts and the end of a job: ``--notify URL``.

A notice is one POST, as the Standard Webhooks specification has it, so that receivers can check it
with the libraries that exist: ``webhook-id`` is the same for all tries of a notice, and
``webhook-signature`` is an HMAC over the id, the time and the body. ``docs/notices.md`` describes
it for who writes a receiver.

Instead of a URL, ``kubeflow`` names the server of the TrainJob that the process belongs to, which
takes what it calls a trainer status and knows the pod by its token.

Nothing waits for a receiver. Each notice has a thread, and a few minutes without an answer, or too
many notices on their way, lose it, which one line on stderr says.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.background import EXIT_S, BackgroundCall, at_exit, exit_budget
from rankcall.errors import AuthenticationError, RankcallError, warn_once
from rankcall.process import host_name
from rankcall.run.redaction import redact_text
from rankcall.secret import find_secret

NOTIFY = "RANKCALL_NOTIFY"
SECRET = "RANKCALL_NOTIFY_SECRET"
KUBEFLOW = "kubeflow"
# Set in the pods of a TrainJob by the controller of Kubeflow Trainer.
_SERVER, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_ANSWER_S = 10.0  # for a connection, and for each part of the answer's head
# A receiver that restarts is back within the minute that these take together.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
LAST_S = 10.0  # for which a launcher waits for its last notices, once its job has ended
_MOST_ON_THE_WAY = 8
_TRY_AGAIN = frozenset({408, 425, 429})  # beside those from 500 on
_BASE64_KEY = b"whsec_"  # how the specification writes a secret
_MOST_TOKEN = 1 << 16  # bytes


@dataclass(frozen=True)
class Notice:
    """What a receiver is told: a kind (``verdict``, ``restart``, ``ended``), and what of it."""

    kind: str
    run: str
    data: Mapping[str, Any]
    host: str
    epoch_s: float
    id: str


_on_the_way: list[BackgroundCall[None]] = []
_at_exit: list[object] = []  # what waits at the end of this process, once there was a notice


def notify(kind: str, run_dir: Path, data: Mapping[str, Any]) -> None:
    """Begin to send a notice, if the job has a receiver. Returns at once, and never raises.

    One thread of a process calls this, and ``wait``.

    Args:
        kind: ``verdict``, ``restart`` or ``ended``.
        run_dir: The run directory.
        data: What there is to say, as JSON has it.
    """
    receiver = os.environ.get(NOTIFY)
    if not receiver:
        return
    _on_the_way[:] = [call for call in _on_the_way if not call.ended(0)]
    if len(_on_the_way) >= _MOST_ON_THE_WAY:
        warn_once(f"a notice is lost: {_MOST_ON_THE_WAY} others wait for the receiver of {NOTIFY}")
        return
    if not _at_exit:
        _at_exit.append(at_exit(lambda: wait(EXIT_S)))
    notice = Notice(kind, str(run_dir), data, host_name(), time.time(), f"msg_{uuid.uuid4().hex}")
    _on_the_way.append(BackgroundCall(lambda: _send(receiver, notice), "rankcall-notice"))


def wait(seconds: float) -> None:
    """Wait up to ``seconds`` until all notices of this process have been taken or are lost."""
    until = time.monotonic() + seconds
    for call in _on_the_way:
        exit_budget.spend(call.ended, until - time.monotonic())


def check_receiver(receiver: str) -> None:
    """Raise ``RankcallError`` if no notice could be sent like this."""
    if receiver == KUBEFLOW:
        missing = [name for name in (_SERVER, _TOKEN) if not os.environ.get(name)]
        if missing:
            raise RankcallError(
                f"--notify {KUBEFLOW}: {' and '.join(missing)} not set: it works in a pod of a "
                "TrainJob, if Kubeflow Trainer takes trainer statuses"
            )
        return
    parts = urllib.parse.urlsplit(receiver)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RankcallError(f"--notify takes an http or https URL, or {KUBEFLOW}")
    _key()


def told_of(verdict: Verdict) -> dict[str, Any]:
    """Return what a notice says of a verdict: its first finding."""
    finding = verdict.findings[0]
    return {
        "verdict": verdict.origin.id,
        "stops": finding.stops,
        "advice": finding.advice,
        "failure": {
            "kind": finding.kind,
            "op": finding.op,
            "line": finding.culprit_line or finding.call_site,
            "ranks": list(finding.ranks),
            "hosts": list(finding.hosts),
            "summary": finding.summary,
        },
    }


def _send(receiver: str, notice: Notice) -> None:
    """Send a notice, again and again if the receiver does not take it; say if it is lost."""
    # A path may hold a secret, as those of chat services do.
    shown = receiver if receiver == KUBEFLOW else str(urllib.parse.urlsplit(receiver).hostname)
    try:
        request, context = _request(receiver, notice)
    except (RankcallError, OSError, ValueError) as error:
        warn_once(f"{shown} gets no notice: {redact_text(str(error))}")
        return
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects)
    for pause_s in (*_PAUSES_S, None):
        try:
            opener.open(request, timeout=_ANSWER_S).close()
            return
        except urllib.error.HTTPError as error:
            why, again = f"status {error.code}", error.code >= 500 or error.code in _TRY_AGAIN
            error.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            why, again = f"{type(error).__name__}: {redact_text(str(error))}", True
        if not again or pause_s is None:
            warn_once(f"{shown} has not taken a notice: {why}")
            return
        time.sleep(pause_s)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it could lead to a host of which the user does not know."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _request(receiver: str, notice: Notice) -> tuple[urllib.request.Request, ssl.SSLContext | None]:
    """Return what to send, and which certificates to trust; None: those of this system."""
    headers = {"Content-Type": "application/json", "User-Agent": "rankcall"}
    if receiver == KUBEFLOW:
        with open(os.environ.get(_TOKEN, ""), encoding="ascii") as file:
            headers["Authorization"] = f"Bearer {file.read(_MOST_TOKEN).strip()}"
        body = json.dumps({"trainerStatus": _trainer_status(notice)}).encode()
        ca = os.environ.get(_CA)
        context = ssl.create_default_context(cafile=ca) if ca else None
        return urllib.request.Request(os.environ[_SERVER], body, headers), context
    content = {
        "type": f"rankcall.{notice.kind}",
        "timestamp": _time_of(notice),
        "data": {"run": notice.run, "host": notice.host, **notice.data},
    }
    body = json.dumps(content).encode()
    sent = str(int(notice.epoch_s))
    headers |= {"webhook-id": notice.id, "webhook-timestamp": sent}
    key = _key()
    if key is not None:
        headers["webhook-signature"] = signature(key, notice.id, sent, body)
    return urllib.request.Request(receiver, body, headers), None


def signature(key: bytes, notice_id: str, seconds: str, body: bytes) -> str:
    """Return the signature of a notice, as Standard Webhooks has it (symmetric, version 1)."""
    signed = b".".join((notice_id.encode(), seconds.encode(), body))
    return f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"


def _key() -> bytes | None:
    """Return the key of signatures; None without one. Raises ``AuthenticationError``."""
    secret = find_secret(SECRET)
    if secret is None or not secret.startswith(_BASE64_KEY):
        return secret
    try:
        return base64.b64decode(secret.removeprefix(_BASE64_KEY), validate=True)
    except binascii.Error:
        raise AuthenticationError(f"{SECRET} begins with whsec_, and is no base64 then") from None


def _trainer_status(notice: Notice) -> dict[str, Any]:
    """Return a notice as Kubeflow's trainer status. Its metrics are pairs of texts."""
    failure = notice.data.get("failure") or {}
    known = {
        "event": notice.kind,
        "outcome": notice.data.get("outcome", ""),
        "reason": notice.data.get("reason", ""),
        "restarts": notice.data.get("restarts", ""),
        **{name: failure.get(name) for name in ("kind", "ranks", "hosts", "step", "summary")},
    }
    metrics = [
        {"name": f"rankcall_{name}", "value": text}
        for name, value in known.items()
        if (text := _text(value))
    ]
    return {"lastUpdatedTime": _time_of(notice), "metrics": metrics}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _time_of(notice: Notice) -> str:
    moment = datetime.fromtimestamp(int(notice.epoch_s), timezone.utc)
    return moment.isoformat().replace("+00:00", "Z")
