"""Who may talk to whom: a shared token, mutual TLS, or both."""

import dataclasses
import hmac
import ipaddress
from pathlib import Path
from typing import Any

import grpc

TOKEN_KEY = "authorization"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tls:
    """Files (PEM) of mutual TLS; both sides show a certificate of the same authority.

    A server's certificate must name the host that its clients connect to.
    """

    ca: str | Path
    cert: str | Path
    key: str | Path

    def server_credentials(self) -> grpc.ServerCredentials:
        ca, cert, key = self._read()
        return grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=ca, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        ca, cert, key = self._read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _read(self) -> list[bytes]:
        contents = []
        for name in ("ca", "cert", "key"):
            path = Path(getattr(self, name))
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise ValueError(
                    f"TLS {name} file {path}: {error.strerror}; expected a PEM file"
                ) from error
        return contents


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call that shows a token."""
    return () if token is None else ((TOKEN_KEY, f"Bearer {token}"),)


def is_authorized(call: Any, token: str | None) -> bool:
    """Returns whether the metadata of a call has the token, if one is expected."""
    if token is None:
        return True
    found = dict(call.invocation_metadata()).get(TOKEN_KEY, "")
    return hmac.compare_digest(str(found).encode(), f"Bearer {token}".encode())


def check_token(token: str | None) -> None:
    """Refuses a token that metadata cannot carry, without showing it."""
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise ValueError("the token must be printable ASCII, and must not be empty")


def check_bind(bind: str, token: str | None, tls: Tls | None) -> None:
    """Refuses an address that strangers could reach without being asked anything."""
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"bind {bind!r}: expected HOST:PORT (port 0: any free one)")
    if token is None and tls is None and not _is_loopback(host):
        raise ValueError(
            f"bind {bind!r}: other machines can reach this address, so set a token or "
            "TLS files; or bind to 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # another name
