"""Pictures of schedules show every operation in its place."""

import re
from xml.etree import ElementTree

import pytest

from meshloom.sharding.pipeline import make, picture

pytestmark = pytest.mark.compiles_anew

SVG = "{http://www.w3.org/2000/svg}"
TOOLTIP = re.compile(r"tick (\d+), stage (\d+): (\w+) of microbatch (\d+), chunk (\d+)")


def test_the_text_of_1f1b():
    assert picture.text(make("1f1b", 2, 3)) == (
        """\
tick       0
stage 0  F 0 1 2 . .
         B . . 0 1 2
stage 1  F . 0 1 2 .
         B . 0 1 2 .
F forward and B backward of microbatches; . idle"""
    )


def test_text_has_letters_for_chunks_and_room_for_two_digits():
    lines = picture.text(make("interleaved", 2, 11, 2), 200).splitlines()
    assert lines[0].startswith("tick         0                   5                  10")
    assert lines[1].startswith("stage 0  F  0a  1a  0b  1b  2a  3a  2b  3b")
    assert lines[1].rstrip(" .").endswith("10a   . 10b")
    assert "letters are chunks of layers" in lines[-1]
    # The tick number is right-aligned above its cell.
    ticks = {int(m[0]): m.end() for m in re.finditer(r"\d+", lines[0])}
    assert lines[1][ticks[5] - 2 : ticks[5]] == "3a"


@pytest.mark.parametrize("width", [40, 60, 79, 80, 81])
def test_ticks_that_do_not_fit_are_left_out_and_named(width):
    schedule = make("1f1b", 3, 40)
    *rows, note, _ = picture.text(schedule, width).splitlines()
    assert len(rows) == 1 + 2 * 3
    assert all(len(row) <= width for row in rows)
    first, last, total = map(int, re.findall(r"\d+", note))
    assert note == f"Ticks {first} to {last} of {total} are left out."
    head, tail = rows[1].split(" ... ")
    assert len(head.split()) - 3 == first  # besides "stage", "0" and "F"
    assert len(tail.split()) == total - last - 1
    assert total == schedule.num_ticks == 44
    assert rows[2].endswith(" 39")  # the end is shown


def test_all_ticks_are_shown_if_they_fit():
    schedule = make("1f1b", 3, 40)
    width = max(map(len, picture.text(schedule, 1000).splitlines())) + 1
    assert "left out" not in picture.text(schedule, width)
    assert "left out" in picture.text(schedule, width - 1)


def test_color_changes_only_the_color():
    schedule = make("interleaved", 4, 8, 2)
    plain, painted = (picture.text(schedule, color=color) for color in (False, True))
    stripped = re.sub(r"\x1b\[[\d;]*m", "", painted)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()
    shades = set(re.findall(r"48;2;([\d;]+)m", painted))
    assert len(shades) == 4  # forward and backward, of two chunks


def cells(svg: str) -> dict[tuple[str, ...], ElementTree.Element]:
    """Returns the rectangle of each (kind, microbatch, chunk, tick, stage)."""
    result = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            match = TOOLTIP.fullmatch(title.text)
            assert match, title.text
            tick, stage, kind, m, r = match.groups()
            assert (kind, m, r, tick, stage) not in result
            result[kind, m, r, tick, stage] = rect
    return result


CASES = [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("interleaved", 8, 64, 2)]


@pytest.mark.parametrize("name, S, M, R", CASES)
def test_svg_draws_every_operation_once(name, S, M, R):
    schedule = make(name, S, M, R)
    expected = {
        (kind, str(m), str(r), str(t), str(s))
        for kind, table in (
            ("forward", schedule.forward),
            ("backward", schedule.backward),
        )
        for t, row in enumerate(table.tolist())
        for s, (m, r) in enumerate(row)
        if m >= 0
    }
    assert len(expected) == 2 * S * M * R
    assert cells(picture.svg(schedule)).keys() == expected


@pytest.mark.parametrize("name, S, M, R", CASES)
def test_no_two_cells_of_the_svg_overlap_and_all_are_inside(name, S, M, R):
    svg = picture.svg(make(name, S, M, R))
    root = ElementTree.fromstring(svg)
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    covered = set()
    for rect in cells(svg).values():
        x, y, w, h = (int(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x < x + w <= width and 0 <= y < y + h <= height
        area = {(i, j) for i in range(x, x + w) for j in range(y, y + h)}
        assert covered.isdisjoint(area)
        covered |= area
    numbers = [text.text for text in root.iter(f"{SVG}text")]
    assert numbers.count(str(M - 1)) >= 2 * S * R  # the last microbatch, in its cells


def test_svg_splits_a_tick_of_both_kinds_on_every_stage():
    result = cells(picture.svg(make("1f1b", 2, 3)))

    def top_and_height(*key):
        rect = result[tuple(map(str, key))]
        return int(rect.attrib["y"]), int(rect.attrib["height"])

    top, tall = top_and_height("forward", 0, 0, 0, 0)
    above, short = top_and_height("forward", 2, 0, 2, 0)
    below, _ = top_and_height("backward", 0, 0, 2, 0)
    assert above == top < below
    assert short < tall / 2
    # At tick 1, stage 1 does both; stage 0 does only a forward and is idle below.
    assert top_and_height("forward", 1, 0, 1, 0) == (above, short)


def test_svg_shows_the_cost_and_escapes_the_name():
    schedule = make("interleaved", 4, 8, 2)
    svg = picture.svg(schedule)
    assert ">interleaved: 4 stages of 2 chunks, 8 microbatches<" in svg
    assert ">26 ticks in the time of 9.5 forwards and 9.5 backwards<" in svg
    assert ">bubble 15.8 %, at most 11 saved inputs on a stage<" in svg
    assert ">forward, chunks 0 to 1<" in svg and ">idle (bubble)<" in svg
    assert ">1f1b: 2 stages, 1 microbatch<" in picture.svg(make("1f1b", 2, 1))
    object.__setattr__(schedule, "name", "<b>")
    assert "&lt;b&gt;" in picture.svg(schedule)


def test_numbers_that_do_not_fit_are_left_out_of_the_svg():
    svg = picture.svg(make("1f1b", 2, 1001))
    numbers = [t.text for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert numbers.count("7") == 0  # neither in a cell nor as a tick
    assert len(cells(svg)) == 2 * 2 * 1001
