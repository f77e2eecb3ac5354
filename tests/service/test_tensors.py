"""Tests that arrays arrive as they were sent, or are refused by name."""

import json

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.service.blocks.layout import Box
from meshloom.service.wire import tensors
from meshloom.service.wire.calls import Channel, Download, Server, Upload
from meshloom.service.wire.errors import Refused, Unavailable
from meshloom.service.wire.messages import decode

PLACES = ("block", "slab")


def numbers(shape, dtype="float32"):
    size = int(np.prod(shape))
    return np.sin(np.arange(size)).reshape(shape).astype(dtype)


def sent(*arrays):
    rows = (({"block": i, "slab": 0}, (5,) * a.ndim, a) for i, a in enumerate(arrays))
    return list(tensors.encode(rows))


def received(messages):
    found = []

    def done(header, array):
        found.append((header, array.copy()))

    nbytes = tensors.decode(iter(messages), PLACES, tensors.Scratch(), done)
    assert nbytes == sum(header.nbytes for header, _ in found)
    return found


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=4),
    st.sampled_from(["float32", "float16", ml_dtypes.bfloat16]),
)
def test_arrays_of_any_shape_and_dtype(shapes, dtype):
    arrays = [numbers(tuple(shape), dtype) for shape in shapes]
    found = received(sent(*arrays))
    assert [header.place["block"] for header, _ in found] == list(range(len(arrays)))
    for expected, (header, array) in zip(arrays, found, strict=True):
        assert header.box == Box.at((5,) * expected.ndim, expected.shape)
        assert array.dtype == expected.dtype and array.shape == expected.shape
        assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("array", [numbers((6, 8))[1:5:2, 3:].T, numbers((6, 8)).T])
def test_parts_that_are_not_contiguous(array):
    assert np.array_equal(received(sent(array))[0][1], array)


@pytest.mark.parametrize("extra", [0, 1, -1])
def test_messages_have_the_size_of_a_chunk(extra):
    array = np.arange(3 * tensors.CHUNK // 2 + extra, dtype=np.uint16)
    array = array.view(np.float16)
    messages = sent(array)
    assert [len(message) for message in messages[:-1]] == [tensors.CHUNK] * 3
    assert 0 < len(messages[-1]) < 1000  # the header and the checksum
    assert received(messages)[0][1].tobytes() == array.tobytes()


def test_small_arrays_share_a_message():
    arrays = [numbers((7, 11)) for _ in range(50)]
    messages = sent(*arrays)
    assert len(messages) == 1
    for _, array in received(messages):
        assert np.array_equal(array, arrays[0])


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1))
def test_messages_may_be_cut_anywhere(sizes):
    arrays = [numbers((3, 7)), numbers((2,), "float16"), numbers((4, 6))]
    data, messages = b"".join(sent(*arrays)), []
    for size in sizes:
        messages.append(data[:size])
        data = data[size:]
    found = received([*messages, b"", data])
    for expected, (_, array) in zip(arrays, found, strict=True):
        assert np.array_equal(array, expected)


def parts(messages):
    """Returns [first array, header, bytes, checksum] of a stream of two arrays."""
    data = b"".join(messages)
    first = len(b"".join(sent(numbers((2, 3)))))
    size = int.from_bytes(data[first : first + 4], "little")
    header = first + 4 + size
    return [data[:first], data[first + 4 : header], data[header + 4 : -4], data[-4:]]


def joined(first, header, values, checksum):
    text = len(header).to_bytes(4, "little") + header
    crc = google_crc32c.value(text).to_bytes(4, "little")
    return [first + text + crc + values + checksum]


def with_header(messages, **changes):
    first, header, *rest = parts(messages)
    changed = {**json.loads(header), **changes}
    return joined(first, json.dumps(changed).encode(), *rest)


def flipped(messages, position):
    data = bytearray(b"".join(messages))
    data[position] ^= 1
    return [bytes(data)]


def spoiled(change):
    return lambda messages: joined(*change(*parts(messages)))


SPOILED = {
    "flipped bit": (lambda m: flipped(m, -20), "block 1, slab 0 is damaged: CRC32C"),
    "flipped checksum": (lambda m: flipped(m, -1), "block 1, slab 0 is damaged"),
    "flipped header": (lambda m: with_header(m, block=0), "block 0, slab 0 is damaged"),
    "no bytes": (
        spoiled(lambda a, b, c, d: (a, b, b"", b"")),
        "block 1, slab 0 is short: 0 of 96 bytes",
    ),
    "cut bytes": (
        spoiled(lambda a, b, c, d: (a, b, c[:90], b"")),
        "is short: 90 of 96 bytes",
    ),
    "lost bytes": (spoiled(lambda a, b, c, d: (a, b, c[:95], d)), "no checksum"),
    "no checksum": (spoiled(lambda a, b, c, d: (a, b, c, b"")), "has no checksum"),
    "cut header": (
        lambda m: [m[0][: len(parts(m)[0]) + 24]],
        "header of a piece is damaged: 20 of .* bytes",
    ),
    "cut length": (
        lambda m: [parts(m)[0] + b"xx"],
        "header of a piece is damaged: 0 of 0 ",
    ),
    "long header": (
        lambda m: [parts(m)[0] + b"\xff" * 4 + m[0]],
        "header of a piece is damaged: 0 of 4294967295 bytes",
    ),
    "wrong size": (lambda m: with_header(m, nbytes=92), "92 bytes, but shape"),
    "other shape": (lambda m: with_header(m, shape=[4, 7]), r"96 bytes, but .* 112"),
    "dimensions": (lambda m: with_header(m, start=[0]), "as many starts"),
    "negative": (lambda m: with_header(m, start=[0, -1]), "-1 is not an integer"),
    "a string": (lambda m: with_header(m, block="1"), "'1' is not an integer"),
    "dtype": (lambda m: with_header(m, dtype="object"), "'object' cannot be"),
    "not JSON": (
        spoiled(lambda a, b, c, d: (a, b"\x80\x04", c, d)),
        "header of a piece",
    ),
    "no slab": (spoiled(lambda a, b, c, d: (a, b'{"block": 1}', c, d)), "no 'slab'"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_not_as_sent_is_refused_by_name(case):
    spoil, message = SPOILED[case]
    messages = sent(numbers((2, 3)), numbers((4, 6)))
    counted = []
    # What is damaged can be sent again; the rest was never right.
    error = Unavailable if "damaged" in message else Refused
    with pytest.raises(error, match=message):
        tensors.decode(
            iter(spoil(messages)),
            PLACES,
            tensors.Scratch(),
            lambda header, array: counted.append(header.place["block"]),
        )
    assert counted == [0]  # the piece before it stays, the spoiled one does not count


def test_a_flip_anywhere_is_damage_so_that_all_is_sent_again():
    messages = sent(numbers((2, 3)), numbers((4, 6)))
    for position in range(len(b"".join(messages))):
        with pytest.raises(Unavailable, match="is damaged: .*; send it again"):
            received(flipped(messages, position))


@pytest.fixture
def echo():
    """A server that keeps what is pushed and gives it back, and a channel to it."""
    kept = {}

    def push(messages):
        about = decode(next(messages))

        def done(header, array):
            kept[header.place["block"], header.box] = array.copy()

        nbytes = tensors.decode(messages, PLACES, tensors.Scratch(), done)
        return {"bytes": nbytes, "about": about}

    def pull(message):
        boxes = [(leaf, Box(tuple(a), tuple(b))) for leaf, a, b in message["boxes"]]
        if message["version"] == 1:  # one that errs
            boxes = boxes[:-1]
        if message["version"] == 2:
            boxes = boxes[::-1]
        rows = (({"leaf": leaf}, box.start, kept[leaf, box]) for leaf, box in boxes)
        yield from tensors.encode(rows)

    streams = {"Push": Upload(push), "Pull": Download(pull)}
    server = Server("127.0.0.1:0", {}, streams)
    channel = Channel(f"127.0.0.1:{server.port}")
    yield channel
    channel.close()
    server.close(0)


def pushed(channel):
    arrays = [numbers((3, 4)), numbers((1100, 1000)), numbers((2,), "float16")]
    boxes = [(i, Box.at((0,) * a.ndim, a.shape)) for i, a in enumerate(arrays)]
    rows = [(i, 0, box.start, arrays[i]) for i, box in boxes]
    answer = channel.push("job", 3, 1, 7, rows, 20)
    assert answer["bytes"] == sum(a.nbytes for a in arrays)
    assert answer["about"] == {"job": "job", "learner": 3, "incarnation": 1, "round": 7}
    return arrays, boxes


def test_push_and_pull_into_arrays(echo):
    arrays, boxes = pushed(echo)
    wide = np.zeros((3, 9), np.float32)
    into = {box: np.zeros_like(a) for box, a in zip(boxes, arrays, strict=True)}
    into[boxes[0]] = wide[:, 2:6]  # not contiguous
    into[boxes[2]] = np.zeros(2, np.float32)  # of a wider dtype
    assert echo.pull("job", 0, boxes, into, 20) == sum(a.nbytes for a in arrays)
    for box, array in zip(boxes, arrays, strict=True):
        assert np.array_equal(into[box], array)
    assert not wide[:, :2].any() and not wide[:, 6:].any()


def test_pull_into_a_function(echo):
    arrays, boxes = pushed(echo)
    found = {}
    echo.pull(
        "job", 0, boxes, lambda leaf, box, a: found.update({(leaf, box): a.copy()}), 20
    )
    assert list(found) == boxes
    assert all(np.array_equal(found[b], a) for b, a in zip(boxes, arrays, strict=True))


@pytest.mark.parametrize(
    ("version", "message"), [(1, "1 of 3 boxes did not come"), (2, "was not asked for")]
)
def test_a_pull_that_is_not_what_was_asked_for(echo, version, message):
    _, boxes = pushed(echo)
    with pytest.raises(Refused, match=message):
        echo.pull("job", version, boxes, lambda leaf, box, array: None, 20)
