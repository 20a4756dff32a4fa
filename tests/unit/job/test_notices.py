"""Notices of ``--notify``: their form, their signature, and receivers that do not take them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import shutil
import socket
import ssl
import subprocess
import threading
from datetime import datetime
from pathlib import Path

import pytest
from receiving import Receiver

from rankcall.errors import RankcallError
from rankcall.job import notices
from rankcall.job.notices import KUBEFLOW, NOTIFY, SECRET, check_receiver, notify, signature, wait

WAIT_S = 60.0
FAILURE = {"kind": "stopped", "ranks": [1, 2], "hosts": ["node-a"], "step": None, "summary": "s"}
SAID = {"restarts": 1, "reason": "the machine is at fault", "failure": FAILURE}


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notice and no message of another test counts, and no try waits for the one before."""
    monkeypatch.setattr(notices, "_on_the_way", [])
    monkeypatch.setattr(notices, "_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr("rankcall.errors._warnings", set())
    monkeypatch.delenv(SECRET, raising=False)


def tell(receiver: Receiver, monkeypatch: pytest.MonkeyPatch, kind: str = "restart") -> None:
    """Send a notice, and wait until it was taken or is lost."""
    monkeypatch.setenv(NOTIFY, receiver.url)
    notify(kind, Path("run"), SAID)
    wait(WAIT_S)


def test_the_signature_is_that_of_the_specification() -> None:
    """The example of Standard Webhooks: its secret, id, time and body have this signature."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("secret", "key"),
    [
        ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
        ("sixteen bytes or more", base64.b64encode(b"sixteen bytes or more").decode()),
    ],
)
def test_a_notice(secret: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver gets what was said, can check who said it, and when."""
    monkeypatch.setenv(SECRET, secret)
    with Receiver().serving() as receiver:
        tell(receiver, monkeypatch)
    [(headers, body)] = receiver.got
    content = json.loads(body)
    assert content["type"] == "rankcall.restart"
    assert content["data"].items() >= {"run": "run", **SAID}.items()
    assert content["data"]["host"]
    sent = datetime.fromisoformat(content["timestamp"].replace("Z", "+00:00"))
    assert int(sent.timestamp()) == int(headers["webhook-timestamp"])
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(base64.b64decode(key), signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()


def test_without_a_secret_it_is_not_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice comes all the same."""
    with Receiver().serving() as receiver:
        tell(receiver, monkeypatch)
    [(headers, _)] = receiver.got
    assert "webhook-signature" not in headers


def test_without_a_receiver_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is started."""
    monkeypatch.delenv(NOTIFY, raising=False)
    notify("restart", Path("run"), SAID)
    assert notices._on_the_way == []


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_receiver_that_is_busy_is_asked_again(
    status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each try has the same id, so that the receiver can tell that it is one notice."""
    with Receiver([status, status, 200]).serving() as receiver:
        tell(receiver, monkeypatch)
    assert len(receiver.got) == 3
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (404, 1), (302, 1), (307, 1), (500, 4)])
def test_a_notice_that_is_lost(
    status: int, tries: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line names the host and no secret; another host is asked for nothing."""
    with Receiver([status]).serving() as receiver:
        tell(receiver, monkeypatch)
        tell(receiver, monkeypatch)
    assert len(receiver.got) == 2 * tries
    err = capfd.readouterr().err
    assert err == f"rankcall: localhost has not taken a notice: status {status}\n"


def test_an_answer_that_is_no_http(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A receiver that closes the connection, or says anything at all, does no harm."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for reply in (b"", b"\xff" * 100_000, b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000, b"220 "):
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    monkeypatch.setenv(NOTIFY, f"http://127.0.0.1:{server.getsockname()[1]}/")
    notify("ended", Path("run"), SAID)
    wait(WAIT_S)
    thread.join(WAIT_S)
    server.close()
    assert "127.0.0.1 has not taken a notice" in capfd.readouterr().err


def test_a_receiver_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for it, and not more than eight threads do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(NOTIFY, f"http://127.0.0.1:{server.getsockname()[1]}/")
        for _ in range(9):
            notify("ended", Path("run"), SAID)
        assert len(notices._on_the_way) == 8
        assert not any(call.ended(0) for call in notices._on_the_way)
        assert "a notice is lost: 8 others wait" in capfd.readouterr().err
    wait(WAIT_S)  # the kernel resets connections that nobody took
    assert all(call.ended(0) for call in notices._on_the_way)


@pytest.mark.parametrize(
    "receiver", ["ftp://host/x", "file:///etc/passwd", "host", "http://", "x:"]
)
def test_receivers_that_are_none(receiver: str) -> None:
    """They are refused before the job starts."""
    with pytest.raises(RankcallError, match="takes an http or https URL"):
        check_receiver(receiver)


def test_secrets_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before the job starts, and not repeated."""
    for secret in ("whsec_!!!!!!!!!!!!!!!!", "short"):
        monkeypatch.setenv(SECRET, secret)
        with pytest.raises(RankcallError) as error:
            check_receiver("https://host/")
        assert secret not in str(error.value)


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate with openssl")
def test_kubeflow_gets_a_trainer_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body is what Kubeflow's proposal 2779 describes, over TLS, with the token of the pod."""
    key, certificate, token = (tmp_path / name for name in ("key", "ca.crt", "token"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=WAIT_S,
    )
    token.write_text("abc.def\n")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with pytest.raises(RankcallError, match="KUBEFLOW_TRAINER_SERVER_URL"):
        check_receiver(KUBEFLOW)
    with Receiver().serving(tls) as receiver:
        for name, value in (("URL", receiver.url), ("CA_CERT", certificate), ("TOKEN", token)):
            monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{name}", str(value))
        check_receiver(KUBEFLOW)
        monkeypatch.setenv(NOTIFY, KUBEFLOW)
        notify("restart", Path("run"), SAID)
        wait(WAIT_S)
    [(headers, body)] = receiver.got
    assert headers["authorization"] == "Bearer abc.def"
    assert headers["content-type"] == "application/json"
    [(name, status)] = json.loads(body).items()
    assert name == "trainerStatus"
    # The fields of TrainJobTrainerStatus and Metric, with their types and least lengths.
    assert set(status) <= {
        "progressPercentage",
        "estimatedRemainingSeconds",
        "metrics",
        "lastUpdatedTime",
    }
    datetime.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
    for metric in status["metrics"]:
        assert set(metric) == {"name", "value"}
        assert all(isinstance(text, str) and text for text in metric.values())
    said = {metric["name"]: metric["value"] for metric in status["metrics"]}
    assert said["rankcall_event"] == "restart"
    assert (said["rankcall_kind"], said["rankcall_ranks"]) == ("stopped", "1,2")
    assert "rankcall_step" not in said
