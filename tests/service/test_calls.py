"""Tests calls over real sockets: answers, refusals, strangers, deadlines."""

import logging
import socket
import threading
import time

import google_crc32c
import grpc
import pytest
from authorities import Authority

from meshloom.service.wire import messages
from meshloom.service.wire.calls import Channel, Download, Server, Upload
from meshloom.service.wire.credentials import Tls
from meshloom.service.wire.errors import Refused, Unavailable

LOOPBACK = "127.0.0.1:0"


def echo(message):
    return {"got": message}


def refuse(message):
    raise Refused("no such job:\n  'x'")


def lose(message):
    raise Unavailable("server s1 is lost")


def break_down(message):
    raise KeyError("a secret of the server")


def count(messages):
    return {"sizes": [len(m) for m in messages]}


def numbers(message):
    for i in range(message["num"]):
        if i == message.get("fail_at"):
            raise ValueError(f"no number {i}")
        yield b"%d" % i


METHODS = {"Echo": echo, "Refuse": refuse, "Lose": lose, "Break": break_down}
STREAMS = {"Count": Upload(count), "Numbers": Download(numbers)}


@pytest.fixture
def connect():
    """Returns connect(server's arguments, channel's arguments) -> Channel."""
    closing = []

    def connect(server=None, channel=None):
        made = Server(LOOPBACK, METHODS, STREAMS, **(server or {}))
        closing.append(lambda: made.close(0))
        dialed = Channel(f"127.0.0.1:{made.port}", **(channel or {}))
        closing.append(dialed.close)
        return dialed

    yield connect
    for close in reversed(closing):
        close()


def test_a_call_and_streams(connect):
    channel = connect()
    message = {"text": "größer", "nested": [1, {"x": None}], "nan": float("inf")}
    assert channel.call("Echo", message, 5) == {"got": message}
    assert channel.upload("Count", iter([b"", b"abc"]), 5) == {"sizes": [0, 3]}
    assert list(channel.download("Numbers", {"num": 3}, 5)) == [b"0", b"1", b"2"]


def test_a_message_may_be_large(connect):
    text = "x" * (8 << 20)  # gRPC's own limit is 4 MiB
    assert connect().call("Echo", {"text": text}, 20)["got"]["text"] == text


def test_a_handler_says_no_in_one_line(connect):
    with pytest.raises(Refused, match="^no such job: 'x'$"):
        connect().call("Refuse", {}, 5)


def test_a_handler_that_lost_somebody_says_so(connect):
    with pytest.raises(Unavailable, match="server s1 is lost"):
        connect().call("Lose", {}, 5)


def test_other_errors_stay_in_the_log_of_the_server(connect, caplog):
    with caplog.at_level(logging.ERROR):
        with pytest.raises(Refused, match="internal error in Break") as caught:
            connect().call("Break", {}, 5)
    assert "secret" not in str(caught.value)
    assert "a secret of the server" in caplog.text and "Traceback" in caplog.text


def test_an_error_in_a_stream(connect):
    stream = connect().download("Numbers", {"num": 3, "fail_at": 1}, 5)
    assert next(stream) == b"0"
    with pytest.raises(Refused, match="no number 1"):
        list(stream)


def test_an_error_of_the_sender_is_raised_there(connect):
    def messages():
        yield b"abc"
        raise ZeroDivisionError("of the sender")

    with pytest.raises(ZeroDivisionError, match="of the sender"):
        connect().upload("Count", messages(), 5)


def test_an_unknown_method(connect):
    with pytest.raises(Refused, match="has no method Nothing"):
        connect().call("Nothing", {}, 5)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"[1]", "expected an object"), (b"\xff{", "decode|codec"), (None, "no checksum")],
)
def test_what_is_not_a_json_object_is_refused(connect, data, message):
    data = b"{}" if data is None else b"%s\n%08x" % (data, google_crc32c.value(data))
    address = connect().address
    with grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError, match=message) as caught:
            channel.unary_unary("/meshloom/Echo")(data, timeout=5)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore


@pytest.mark.parametrize("position", [4, -9, -4])
def test_a_message_with_a_flipped_bit_is_not_taken(connect, position):
    """Neither by who is asked, nor by who gets the answer; both can try again."""
    data = bytearray(messages.encode({"weight": 8}))
    data[position] ^= 1
    with pytest.raises(Unavailable, match="it is damaged: CRC32C .*; send it again"):
        messages.decode(bytes(data))
    with grpc.insecure_channel(connect().address) as channel:
        with pytest.raises(grpc.RpcError, match="is damaged") as caught:
            channel.unary_unary("/meshloom/Echo")(bytes(data), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore


@pytest.mark.parametrize("shown", [None, "wrong", "right "])
def test_strangers_are_refused_by_every_kind_of_method(connect, shown):
    channel = connect({"token": "right"}, {"token": shown})
    calls = [
        lambda: channel.call("Echo", {}, 5),
        lambda: channel.upload("Count", iter([b"abc"]), 5),
        lambda: list(channel.download("Numbers", {"num": 1}, 5)),
    ]
    for call in calls:
        with pytest.raises(Refused, match="wrong or missing token") as caught:
            call()
        assert "right" not in str(caught.value)


def test_who_has_the_token_gets_in(connect):
    channel = connect({"token": "right"}, {"token": "right"})
    assert channel.call("Echo", {}, 5) == {"got": {}}
    assert channel.upload("Count", iter([b"abc"]), 5) == {"sizes": [3]}


@pytest.mark.parametrize("token", ["", "two\nlines", "ü"])
def test_tokens_that_cannot_be_sent_are_refused(token):
    with pytest.raises(ValueError, match="printable ASCII"):
        Channel("127.0.0.1:1", token=token)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "example.org:80"])
def test_an_open_port_needs_a_token_or_tls(bind):
    with pytest.raises(ValueError, match="set a token or TLS files"):
        Server(bind, METHODS)


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_an_address_without_a_port_is_refused(bind):
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        Server(bind, METHODS)


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot bind 127.0.0.1:{port}: is the"):
            Server(f"127.0.0.1:{port}", METHODS)


def test_two_servers_do_not_share_a_port():
    first = Server(LOOPBACK, METHODS)
    try:
        with pytest.raises(ValueError, match="cannot bind"):
            Server(f"127.0.0.1:{first.port}", METHODS)
    finally:
        first.close(0)


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    channel = Channel(f"127.0.0.1:{port}")
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}: no answer to Echo"):
        channel.call("Echo", {}, 5)
    channel.close()


def test_every_call_has_a_deadline():
    is_over = threading.Event()
    server = Server(LOOPBACK, {"Sleep": lambda message: {"x": is_over.wait(20)}})
    channel = Channel(f"127.0.0.1:{server.port}")
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="no answer to Sleep in time"):
        channel.call("Sleep", {}, 0.3)
    assert time.monotonic() - begin < 5
    is_over.set()
    channel.close()
    server.close(0)


BIG = bytes(1 << 20)  # more than a connection holds on the way


def slowly(messages, seconds=0.1):
    """Passes messages on as over a slow line."""
    for message in messages:
        time.sleep(seconds)
        yield message


@pytest.fixture
def slow():
    """A channel to a server that takes and gives 10 messages a second, or stops."""

    def take(messages):
        return {"sizes": [len(message) for message in slowly(messages)]}

    def stop(messages):
        return {"x": [next(messages), is_over.wait(20)]}

    def give(message):
        yield from slowly([BIG] * message["num"])
        is_over.wait(20 if message["stops"] else 0)

    is_over = threading.Event()
    streams = {"Take": Upload(take), "Stop": Upload(stop), "Give": Download(give)}
    server = Server(LOOPBACK, {}, streams)
    channel = Channel(f"127.0.0.1:{server.port}")
    yield channel
    is_over.set()
    channel.close()
    server.close(0)


def test_a_stream_may_take_longer_than_a_call(slow):
    # gRPC takes some messages before the server does, so the last ones do not count.
    num, limit = 30, 2.0
    assert slow.upload("Take", iter([BIG] * num), limit) == {"sizes": [len(BIG)] * num}
    found = slow.download("Give", {"num": num, "stops": False}, limit)
    assert [len(message) for message in found] == [len(BIG)] * num


def test_a_stream_in_which_nothing_moves_is_ended(slow):
    begin = time.monotonic()
    message = "in time: nothing has moved for 0.5 s"
    with pytest.raises(Unavailable, match=f"no answer to Stop {message}"):
        slow.upload("Stop", iter([BIG] * 100), 0.5)
    with pytest.raises(Unavailable, match=f"no answer to Give {message}"):
        list(slow.download("Give", {"num": 1, "stops": True}, 0.5))
    assert time.monotonic() - begin < 10


def test_a_server_that_returns_is_found_again():
    first = Server(LOOPBACK, METHODS)
    channel = Channel(f"127.0.0.1:{first.port}")
    assert channel.call("Echo", {}, 5) == {"got": {}}
    first.close(0)
    with pytest.raises(Unavailable):
        channel.call("Echo", {}, 5)
    second = Server(f"127.0.0.1:{first.port}", METHODS)
    deadline = time.monotonic() + 20
    while True:
        try:
            assert channel.call("Echo", {}, 5) == {"got": {}}
            break
        except Unavailable:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    channel.close()
    second.close(0)


def test_mutual_tls(connect, tmp_path):
    authority = Authority(tmp_path / "ours")
    channel = connect({"tls": authority.tls("s")}, {"tls": authority.tls("c")})
    assert channel.call("Echo", {}, 10) == {"got": {}}
    assert channel.upload("Count", iter([b"abc"]), 10) == {"sizes": [3]}


def test_tls_and_a_token_are_both_asked_for(connect, tmp_path):
    authority = Authority(tmp_path / "ours")
    server = {"tls": authority.tls("s"), "token": "right"}
    channel = connect(server, {"tls": authority.tls("c")})
    with pytest.raises(Refused, match="wrong or missing token"):
        channel.call("Echo", {}, 10)


def test_a_certificate_of_another_authority_is_refused(connect, tmp_path):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    stranger = theirs.tls("c")
    # It trusts our server, so that only the server can be who refuses.
    mixed = Tls(ca=ours.ca, cert=stranger.cert, key=stranger.key)
    channel = connect({"tls": ours.tls("s")}, {"tls": mixed})
    with pytest.raises(Unavailable):
        channel.call("Echo", {}, 10)


def test_no_certificate_is_refused(connect, tmp_path):
    authority = Authority(tmp_path / "ours")
    address = connect({"tls": authority.tls("s")}).address
    only_ca = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    with grpc.secure_channel(address, only_ca) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/meshloom/Echo")(b"{}", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore


def test_plaintext_against_tls_fails_within_the_deadline(connect, tmp_path):
    channel = connect({"tls": Authority(tmp_path / "ours").tls("s")})
    begin = time.monotonic()
    with pytest.raises(Unavailable):
        channel.call("Echo", {}, 5)
    assert time.monotonic() - begin < 7


def test_a_server_of_another_authority_is_not_trusted(connect, tmp_path):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    channel = connect({"tls": theirs.tls("s")}, {"tls": ours.tls("c")})
    with pytest.raises(Unavailable):
        channel.call("Echo", {}, 10)


def test_a_missing_file_is_named(tmp_path):
    tls = Tls(ca=tmp_path / "ca.pem", cert="x", key="y")
    with pytest.raises(ValueError, match=r"TLS ca file .*ca.pem: No such file"):
        Server(LOOPBACK, METHODS, tls=tls)
