"""Tests of packed numbers: what comes back, in how many bytes, on devices and hosts."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.service.blocks.layout import Box
from meshloom.service.wire import codecs
from meshloom.service.wire.codecs import CHUNK, ROW, Codec
from meshloom.service.wire.errors import Refused

NAMES = ["float32", "bfloat16", "int8", "topk:0.05", "topk:0.05+bfloat16"]
NAMES += ["topk:0.05+int8"]
BOXES = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 90)), max_size=3).map(
    lambda pairs: Box.at([a for a, _ in pairs], [n for _, n in pairs])
)


def numbers(box, seed=0, spread=8):
    """Numbers of very different sizes."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=box.shape) * np.exp(rng.normal(size=box.shape) * spread)
    return np.asarray(found, np.float32)


def there_and_back(codec, x, box):
    data = codec.to_bytes(codec.pack(x, box))
    assert data.dtype == np.uint8 and data.size == codec.nbytes(box)
    found = codec.from_bytes(data, box)
    assert found.shape == box.shape and found.dtype == np.float32
    return found


def top(rows, k):
    return jax.lax.top_k(rows, k)[1]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(box=BOXES, seed=st.integers(0, 9))
def test_sizes_and_errors(name, box, seed):
    codec, x = codecs.parse(name), numbers(box, seed)
    assert str(codec) == name and codec.is_plain == (name == "float32")
    found = there_and_back(codec, x, box)
    if codec.share is not None:
        num, length, k = codec.chunks(box.size)
        assert np.count_nonzero(found) <= num * k
        flat = np.pad(np.abs(x).ravel(), (0, num * length - box.size))
        kept = np.pad(found.ravel() != 0, (0, num * length - box.size))
        for sizes, is_kept in zip(
            flat.reshape(num, length), kept.reshape(num, length), strict=True
        ):
            if is_kept.any() and not is_kept.all():
                assert sizes[is_kept].min() >= np.sort(sizes)[-k]
        return
    if name == "int8":
        offset = box.start[-1] % ROW if box.start else 0
        wide = np.abs(x).reshape(box.shape or (1,))
        for i in range(-(-(offset + wide.shape[-1]) // ROW)):
            part = slice(max(0, i * ROW - offset), (i + 1) * ROW - offset)
            error = np.abs(x - found).reshape(wide.shape)[..., part].max(-1)
            assert (error <= wide[..., part].max(-1) * 1.02 / 254).all()
    else:
        bound = 2.0**-8 if name == "bfloat16" else 0
        assert (np.abs(x - found) <= np.abs(x) * bound).all()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=10)
@given(box=BOXES, seed=st.integers(0, 9))
def test_devices_pack_as_hosts_do(name, box, seed):
    codec, x = codecs.parse(name), numbers(box, seed, spread=2)
    host = codec.pack(x, box)

    @jax.jit
    def there_and_back(x):  # in one program, as learners do it
        parts = codec.pack(x, box, jnp, top)
        return parts, codec.unpack(parts, box, jnp)

    device, found = there_and_back(x)
    for a, b in zip(host, device, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, np.asarray(b))
    assert np.array_equal(np.asarray(found), codec.unpack(host, box))


@pytest.mark.parametrize("name", NAMES[2:])
@settings(deadline=None, max_examples=40)
@given(box=BOXES, seed=st.integers(0, 9))
def test_what_is_left_over_is_exact(name, box, seed):
    codec, x = codecs.parse(name), numbers(box, seed, spread=3)
    found = there_and_back(codec, x, box)
    left = (x - found).astype(np.float64)
    assert np.array_equal(left + found, x.astype(np.float64))


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_part_has_the_numbers_of_the_whole(name):
    """Shards with a multiple of 64 columns are packed like the leaf they belong to."""
    codec, whole = codecs.parse(name), Box.whole((6, 3 * ROW))
    x = numbers(whole)
    expected = there_and_back(codec, x, whole)
    for box in (Box((2, 0), (5, ROW)), Box((0, ROW), (6, 3 * ROW))):
        assert np.array_equal(
            there_and_back(codec, x[box.slices()], box), expected[box.slices()]
        )


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(name, bad):
    box = Box.whole((300,))
    x = numbers(box)
    x[123] = bad
    found = there_and_back(codecs.parse(name), x, box)
    assert not np.isfinite(found).all()


def test_zeros_and_ties():
    box = Box.whole((2, 3 * CHUNK))
    for name in NAMES:
        found = there_and_back(codecs.parse(name), np.zeros(box.shape), box)
        assert not found.any()
    codec = codecs.parse("topk:0.01")
    found = there_and_back(codec, np.ones(box.shape, np.float32), box)
    first = found.reshape(-1, CHUNK)
    assert (first[:, :41] == 1).all() and not first[:, 41:].any()


def test_bytes_of_a_matrix():
    box = Box.whole((1024, 4096))  # a chunk in every row
    sizes = {name: codecs.parse(name).nbytes(box) / box.size for name in NAMES}
    assert sizes["bfloat16"] == 2 and sizes["int8"] == 1 + 2 / ROW
    assert codecs.parse("topk:0.01").nbytes(box) == 1024 * 41 * 6
    assert codecs.parse("topk:0.01+int8").nbytes(box) == 1024 * (41 * 3 + 2)
    assert 4 / (codecs.parse("topk:0.01+int8").nbytes(box) / box.size) > 100


def test_an_index_outside_of_its_chunk_is_refused():
    codec, box = Codec("float32", 0.5), Box.whole((4,))
    parts = codec.pack(np.arange(4, dtype=np.float32), box)
    parts[0] = parts[0] + np.uint16(3)
    with pytest.raises(Refused, match=r"topk:0.5 is outside of its chunk"):
        codec.from_bytes(codec.to_bytes(parts), box)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4", "'int4' is not a compression; expected float32, bfloat16, int8"),
        ("topk:2", r"'topk:2': expected a share in \(0, 1\]"),
        ("topk:0", r"expected a share"),
        ("topk:0.1+int4", "is not a compression"),
        ("topk:1e", "expected a share"),
    ],
)
def test_other_names_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        codecs.parse(text)


def test_scales_are_bfloat16_and_cover_the_largest():
    x = np.linspace(1, 2, 999, dtype=np.float32)[:, None]
    box = Box.whole(x.shape)
    scales, q = codecs.parse("int8").pack(x, box)
    assert scales.dtype == ml_dtypes.bfloat16
    assert (scales.astype(np.float64) * 127 >= x).all() and q.max() <= 127
    assert math.isclose(float(scales.max()), 2 / 127, rel_tol=2**-7)
