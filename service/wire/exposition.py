"""Metrics for Prometheus: its text format, at a port of their own.

https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

import http.server
import logging
import math
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_SECONDS = 10.0  # for one that does not come to its end
_LOG = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One number of a metric, at one moment."""

    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """A number by labels. A counter only grows, until its process starts again."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: list[Sample]


def text(metrics: Iterable[Metric]) -> str:
    """Returns metrics in the text format."""
    lines = []
    for name, kind, help, samples in metrics:
        help = help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            pairs = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
            braces = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{name}{braces} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def parse_bind(bind: str) -> tuple[str, int]:
    """Reads PORT or HOST:PORT; the host is loopback unless it is given."""
    host, colon, port = bind.rpartition(":")
    host = host.strip("[]") if colon else LOOPBACK
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(
            f"--metrics {bind!r}: expected PORT, or HOST:PORT to be reached from other "
            "machines (port 0: any free one)"
        )
    return host, int(port)


class MetricsServer:
    """Answers GET /metrics to anybody who asks, until closed.

    Attributes:
      address: that was bound.
    """

    def __init__(self, bind: str, collect: Callable[[], Iterable[Metric]]):
        host, port = parse_bind(bind)
        try:
            self._server = _Server(host, port, collect)
        except OSError as error:
            raise ValueError(
                f"--metrics {bind}: cannot bind ({error.strerror or error}). Choose "
                "another port, or port 0 for any free one"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    # Not HTTPServer, which asks for the name of this host, and may wait for the answer.
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Metric]]):
        self.collect = collect
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.info("metrics: %s went away", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"metrics are at {PATH}")
            return
        try:
            body = text(self.server.collect()).encode()
        except Exception:
            _LOG.exception("metrics cannot be collected")
            self.send_error(500, "metrics cannot be collected; the log says more")
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.debug(format, *args)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
