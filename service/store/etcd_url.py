"""Which etcd: `etcd://HOST:PORT[,HOST:PORT...]/PREFIX[?lease=SECONDS&ca=FILE...]`."""

import dataclasses
import ssl
import urllib.parse
from pathlib import Path

from .election import LEASE_SECONDS

FORM = "etcd://HOST:PORT[,HOST:PORT...]/PREFIX[?lease=SECONDS&ca=FILE&cert=FILE&...]"
FILES = ("ca", "cert", "key", "user")
SHORTEST_LEASE = 2.0


@dataclasses.dataclass(frozen=True)
class EtcdUrl:
    """The members of a cluster, and which of its keys are ours.

    Attributes:
      endpoints: (host, port) of each member.
      prefix: of all keys.
      lease_seconds: of the coordinator that leads.
      ca, cert, key: PEM files. With any of them connections use TLS; `cert` and `key`
        go together.
      user: a file with NAME:PASSWORD.
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    lease_seconds: float = LEASE_SECONDS
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: Path | None = None

    def tls(self) -> ssl.SSLContext | None:
        """Reads the TLS files, if there are any."""
        if self.ca is None and self.cert is None:
            return None
        try:
            context = ssl.create_default_context(
                cafile=None if self.ca is None else str(self.ca)
            )
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise ValueError(
                f"--store: ca={self.ca}, cert={self.cert}, key={self.key}: {error}; "
                "expected PEM files"
            ) from error
        return context

    def credentials(self) -> tuple[str, str] | None:
        """Reads the name and the password, if there is a file of them."""
        if self.user is None:
            return None
        try:
            name, colon, password = self.user.read_text().strip().partition(":")
        except OSError as error:
            raise ValueError(f"--store: user={self.user}: {error.strerror}") from error
        if not (name and colon):
            raise ValueError(
                f"--store: user={self.user}: expected NAME:PASSWORD in this file"
            )
        return name, password


def parse(url: str) -> EtcdUrl:
    """Reads a URL; refuses what it does not understand."""
    parts = urllib.parse.urlsplit(url)
    prefix = parts.path.strip("/")
    if parts.scheme != "etcd" or not prefix or parts.fragment:
        raise ValueError(f"--store {url!r}: expected {FORM}")
    options = _options(url, parts.query)
    lease = options.pop("lease", None)
    files = {name: Path(value) for name, value in options.items()}
    if ("cert" in files) != ("key" in files):
        raise ValueError(f"--store {url!r}: cert and key go together")
    return EtcdUrl(
        endpoints=tuple(_endpoint(url, part) for part in parts.netloc.split(",")),
        prefix=prefix,
        lease_seconds=LEASE_SECONDS if lease is None else _lease(url, lease),
        **files,
    )


def _options(url: str, query: str) -> dict[str, str]:
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    known = ("lease", *FILES)
    for name, value in options.items():
        if name not in known or not value:
            raise ValueError(
                f"--store {url!r}: {name}={value}: expected {', '.join(known)}, each "
                "with a value"
            )
    return options


def _endpoint(url: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"--store {url!r}: {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _lease(url: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not SHORTEST_LEASE <= seconds <= 3600:
        raise ValueError(
            f"--store {url!r}: lease={text}: expected seconds, from "
            f"{SHORTEST_LEASE:g} to 3600"
        )
    return seconds
