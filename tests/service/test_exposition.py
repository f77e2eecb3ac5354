"""Metrics in Prometheus' text format, over HTTP, and those of a server."""

import re
import urllib.error
import urllib.request

import pytest

from meshloom.service.server.metrics import of_server
from meshloom.service.wire.exposition import (
    CONTENT_TYPE,
    Metric,
    MetricsServer,
    Sample,
    parse_bind,
    text,
)

HELD = {
    "jobs": [
        {"job": "a", "version": 3, "blocks": 2, "bytes": 64, "staged": 1},
        {"job": "b", "version": None, "blocks": 1, "bytes": 32, "staged": 0},
    ],
    **{"received_bytes": 100, "sent_bytes": 7},
}
# One line of the format: a comment, or a name with labels and a number.
LINE = re.compile(
    r'# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{([a-z_]+="([^"\\]|\\.)*",?)+\})? \S+'
)


def get(address: str, path: str = "/metrics"):
    return urllib.request.urlopen(f"http://{address}{path}", timeout=10)


def test_labels_and_numbers_are_escaped():
    samples = [
        Sample({"job": 'a"\\\n', "x": "1"}, 0.5),
        Sample({}, float("nan")),
        Sample({}, 2**60),
        Sample({}, float("inf")),
    ]
    assert text([Metric("m", "gauge", "one\ntwo", samples)]).splitlines() == [
        r"# HELP m one\ntwo",
        "# TYPE m gauge",
        r'm{job="a\"\\\n",x="1"} 0.5',
        "m NaN",
        "m 1152921504606846976",
        "m +Inf",
    ]


def test_a_server_tells_what_it_holds():
    lines = text(of_server(HELD)).splitlines()
    assert all(map(LINE.fullmatch, lines)), lines
    assert "meshloom_received_bytes_total 100" in lines
    assert 'meshloom_store_bytes{job="b"} 32' in lines
    assert 'meshloom_store_version{job="a"} 3' in lines
    assert not any("store_version" in x and '"b"' in x for x in lines)


def test_only_loopback_unless_told():
    assert parse_bind("9100") == ("127.0.0.1", 9100)
    assert parse_bind("0.0.0.0:9100") == ("0.0.0.0", 9100)
    assert parse_bind("[::1]:0") == ("::1", 0)


@pytest.mark.parametrize("bind", ["", ":9100", "host", "host:", "1.2.3.4:70000"])
def test_another_address_is_refused(bind):
    with pytest.raises(ValueError, match="expected PORT, or HOST:PORT"):
        parse_bind(bind)


def test_metrics_are_answered_over_http():
    held = dict(HELD)
    server = MetricsServer("0", lambda: of_server(held))
    try:
        with get(server.address) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            assert answer.read().decode() == text(of_server(HELD))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.address, "/")
        with pytest.raises(ValueError, match="Choose another port, or port 0"):
            MetricsServer(server.address, lambda: [])
        del held["jobs"]  # a bug ends the request, not the server
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(server.address)
        held["jobs"] = []
        assert get(server.address).status == 200
    finally:
        server.close()
