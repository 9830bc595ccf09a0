"""TLS of a job: both sides present the job's certificate, and nothing else is let in."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from acpfs.errors import MachineError, RefusedError
from acpfs.training import credentials as credentials_module
from acpfs.training.credentials import Credentials, connect, make_credentials
from acpfs.training.messages import Goodbye, Header, Sent
from acpfs.training.wire import LinkClosedError, SocketLink

clause = pytest.mark.clause
HELLO = Sent(Header("job", 0, 0, "rank 0"), Goodbye())


def serve(
    credentials: Credentials,
    speak: Callable[[SocketLink], object],
    before: Callable[[], object] = lambda: None,
) -> tuple[str, threading.Thread, list[BaseException]]:
    """A server that takes one connection. `before`: what it does before it says anything."""
    listener = socket.create_server(("127.0.0.1", 0))
    errors: list[BaseException] = []

    def take() -> None:
        connection, _ = listener.accept()
        listener.close()
        connection.settimeout(120)
        before()
        try:
            link = SocketLink(
                credentials.context(server=True).wrap_socket(connection, server_side=True)
            )
            speak(link)
            link.close()
        except OSError as error:
            errors.append(error)
            connection.close()

    thread = threading.Thread(target=take)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread, errors


@clause("T22")
def test_who_has_the_jobs_certificate_speaks(tmp_path: Path) -> None:
    credentials = make_credentials(tmp_path / "job")
    assert sorted(path.stat().st_mode & 0o777 for path in credentials.directory.iterdir()) == [
        0o600,
        0o600,
    ]
    assert credentials.directory.stat().st_mode & 0o777 == 0o700
    address, thread, errors = serve(credentials, lambda link: link.send(link.receive(120)))
    link = connect(address, credentials, 120)
    link.send(HELLO)
    assert link.receive(120) == HELLO
    link.close()
    thread.join()
    assert errors == []


def test_a_coordinator_that_stands_still_is_waited_for_longer_than_a_node_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the connection for it."""
    monkeypatch.setattr(credentials_module, "CONNECT_S", 0.5)
    credentials = make_credentials(tmp_path / "job")
    never = threading.Event()
    address, thread, errors = serve(
        credentials, lambda link: link.send(link.receive(120)), lambda: never.wait(1.0)
    )
    link = connect(address, credentials)
    link.send(HELLO)
    assert link.receive(120) == HELLO
    link.close()
    thread.join()
    assert errors == []


def test_whoever_says_how_long_is_not_kept_longer_by_a_handshake(tmp_path: Path) -> None:
    """The kernel takes the connection, and nobody ever says a word: it took 30 s whatever the
    caller said.
    """
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host, port = mute.getsockname()
        with pytest.raises(LinkClosedError, match="timed out"):
            connect(f"{host}:{port}", make_credentials(tmp_path / "job"), 0.2)


@clause("T22")
@pytest.mark.parametrize("whose", ["none", "another job's", "plain"])
def test_anybody_else_is_refused(tmp_path: Path, whose: str) -> None:
    credentials = make_credentials(tmp_path / "job")
    address, thread, errors = serve(credentials, lambda link: link.receive(120))
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 120) as plain:
        if whose == "plain":
            with contextlib.suppress(OSError):
                # the server may refuse what came first, and reset the connection, before the second
                # call
                plain.sendall(b"\0\0\0\2{}" + bytes(64))
                plain.shutdown(socket.SHUT_WR)
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            if whose != "none":
                other = make_credentials(tmp_path / "other").directory
                context.load_cert_chain(other / "certificate.pem", other / "key.pem")
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(plain) as secured,
            ):  # refused with an alert, or a reset behind it
                assert secured.recv(1) == b"", "the server said something"
    thread.join()
    assert len(errors) == 1


@clause("T22")
def test_a_member_takes_no_other_coordinator(tmp_path: Path) -> None:
    address, thread, errors = serve(
        make_credentials(tmp_path / "other"), lambda link: link.receive(120)
    )
    with pytest.raises(LinkClosedError, match="certificate"):
        connect(address, make_credentials(tmp_path / "job"), 120)
    thread.join()
    assert len(errors) == 1


@clause("T22")
def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    expired = make_credentials(tmp_path / "job", ends="20010101000000Z")
    address, thread, _ = serve(expired, lambda link: link.receive(120))
    with pytest.raises(LinkClosedError, match="expired"):
        connect(address, expired, 120)
    thread.join()


def test_who_makes_them_at_the_same_time_gets_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: make_credentials(tmp_path / "job").der, range(4)))
    assert len(set(made)) == 1
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["tls"]


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    credentials = make_credentials(tmp_path / "job")
    (credentials.directory / "key.pem").chmod(0o640)
    with pytest.raises(RefusedError, match="others may read"):
        credentials.context(server=True)


def test_without_openssl_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="openssl is not installed"):
        make_credentials(tmp_path / "job")
    assert list((tmp_path / "job").iterdir()) == []
