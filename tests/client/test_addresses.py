"""A client reaches its server over TLS, IPv6, a Unix socket and below a base path."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import holdfast
from holdfast import InvalidArgument, StoreUnavailable
from holdfast.kernel.signals import TREE_TOPIC
from holdfast.server.options import Options
from holdfast.server.serve import Address
from tests.server.live import Live, live


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate of this machine that has signed itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "holdfast test")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "cert.pem").write_bytes(signed.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *private))
    return {"certfile": str(folder / "cert.pem"), "keyfile": str(folder / "key.pem")}


@pytest.fixture
def database(tmp_path: Path) -> dict[str, Any]:
    return {"url": f"sqlite:///{tmp_path}/store.db"}


def check(server: Live, url: str = "") -> None:
    """Write, read and wait through a server."""
    with holdfast.connect(url or server.url, token=server.secret) as store:
        session = store.session("one")
        session.append("log", [1])
        assert session.info().version == 1
        signals, topic = store.runtime.signals, TREE_TOPIC + "one"
        # The first ring tells that the WebSocket is open as well.
        assert signals.wait(topic, signals.count(topic), 60)
        environment = session.environment()
        with holdfast.connect(environment["HOLDFAST_URL"], token=server.secret) as child:
            assert child.find_session("one").info().version == 1


def test_tls(
    database: dict[str, Any], certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(address=Address(**certificate), **database) as server:  # type: ignore[arg-type]
        assert server.url.startswith("https://127.0.0.1:")
        with pytest.raises(StoreUnavailable, match=r"certificate is not trusted.*SSL_CERT_FILE"):
            holdfast.connect(server.url, token=server.secret)
        monkeypatch.setenv("SSL_CERT_FILE", certificate["certfile"])
        check(server)
        # A certificate for other names is no better than none.
        with pytest.raises(StoreUnavailable, match="certificate is not trusted"):
            holdfast.connect(server.url.replace("127.0.0.1", "localhost"), token=server.secret)
    monkeypatch.setenv("SSL_CERT_FILE", "/none/such")
    with pytest.raises(InvalidArgument, match="SSL_CERT_FILE cannot be read"):
        holdfast.connect(server.url, token=server.secret)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_ipv6(database: dict[str, Any]) -> None:
    with live(address=Address(host="::1"), **database) as server:
        assert server.url.startswith("http://[::1]:")
        check(server)


def test_a_unix_socket_below_a_base_path(database: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a socket"
    address = Address(uds=str(path))
    with live(Options(base_path="/hold/fast"), address, **database) as server:
        assert server.url.startswith("http+unix://%2F")
        assert server.url.endswith("%2Fa%20socket/hold/fast")
        check(server)


def test_a_base_path(database: dict[str, Any]) -> None:
    with live(Options(base_path="/holdfast"), **database) as server:
        check(server, f"{server.url}/")
        with pytest.raises(holdfast.Forbidden):
            holdfast.connect(server.url.removesuffix("/holdfast"), token=server.secret)


@pytest.mark.parametrize("url", ["http+unix:///run/s", "http+unix://run%2Fs", "http+unix://"])
def test_what_is_no_socket_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        holdfast.connect(url, token="t")
