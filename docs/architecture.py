"""Draws docs/architecture.svg: the rooms of this repository and their imports.

  python docs/architecture.py           redraws the picture
  python docs/architecture.py --check   exits with 1 if the picture is out of date

The imports are read from the source (ast), without importing Meshloom. Arrows that are
implied by a longer path are omitted. Hover over a box in a browser to see all its
imports.
"""

import ast
import dataclasses
import pathlib
import sys
import textwrap
from html import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"


@dataclasses.dataclass(frozen=True)
class Room:
    """A package, a subpackage, or the files at the top of `trainer/`, drawn as a box.

    Attributes:
      name: the path of the package.
      about: a few words on what it does.
      row: the row of the box.
      column: the first column of the box.
      span: the number of columns of the box.
      label: the title of the box; defaults to the last part of the name.
    """

    name: str
    about: str
    row: int
    column: int
    span: int = 1
    label: str = ""


# In order: each may import those after it. A box is drawn below those that import it.
ROOMS = (
    Room("trainer", "the command meshloom", 0, 0, 3, label="cli.py, warm.py"),
    Room("trainer/commands", "the subcommands", 1, 1),
    Room("trainer/tune", "search for settings", 2, 1),
    Room("trainer/doctor", "is this machine ready?", 3, 1),
    Room("trainer/report", "a run as an HTML page", 3, 2),
    Room("trainer/plan", "what a run will cost", 4, 2),
    Room("trainer/verify", "certificates, drills", 3, 0),
    Room("trainer/hf", "from and to Hugging Face", 4, 1),
    Room("trainer/run", "config to trained state", 5, 1),
    Room("trainer/checkpoint", "save, restore, inspect", 6, 1),
    Room("trainer/job", "join, preflight, watchdog", 7, 1),
    Room("trainer/record", "metrics, ledger, folder", 8, 1),
    Room("trainer/program", "the step, without a run", 9, 1),
    Room("trainer/data", "text to device batches", 10, 1),
    Room("trainer/config", "gin files to dataclasses", 9, 0),
    Room("models", "the transformer", 9, 2),
    Room("service/coordinator", "decides every commit", 4, 0),
    Room("service/learner", "a run's side of it", 6, 2),
    Room("service/merger", "sums of contributions", 5, 2),
    Room("service/server", "blocks of parameters", 7, 2),
    Room("service/wire", "calls and streams", 8, 2),
    Room("service/blocks", "arrays as blocks", 10, 0),
    Room("service/store", "what must not be lost", 7, 0),
    Room("service/rounds", "engine, simulator", 8, 0),
    Room("launch/targets", "local, Slurm, ssh, ...", 6, 0),
    Room("launch", "supervisor; without jax", 11, 0),
    Room("sharding/pipeline", "schedules, executor", 10, 2),
    Room("sharding", "mesh, rules, plans; needs jax only", 11, 1, 2),
    Room("sharding/hlo", "reads compiled programs", 12, 1, 2),
    Room("configs", "gin files", 12, 0),
)
BY_NAME = {room.name: room for room in ROOMS}

Modules = dict[str, set[str]]  # module -> modules it imports, by dotted names


def room_of(module: str) -> str:
    """Returns the innermost room of a module: `trainer/run` for `trainer.run.loop`."""
    parts = module.split(".")
    names = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(name for name in names if name in BY_NAME)


def files(root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
    """Returns the modules of all rooms; a package stands for its `__init__.py`."""
    found = {}
    for package in sorted({room.name.split("/")[0] for room in ROOMS}):
        for path in sorted((root / package).glob("**/*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(p for p in parts if p != "__init__")] = path
    del found["service"]  # has nothing but its rooms
    return found


def imports(root: pathlib.Path = ROOT) -> Modules:
    """Returns all imports, including those in functions and under TYPE_CHECKING."""
    known = files(root)
    found: Modules = {}
    for module, path in known.items():
        package = module.split(".")
        if path.name != "__init__.py":
            package.pop()
        found[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _imported(node, package):
                while name and name not in known:  # a name inside a module
                    name = name.rpartition(".")[0]
                if name and name != module:
                    found[module].add(name)
    return found


def _imported(node: ast.AST, package: list[str]) -> list[str]:
    """Returns dotted names relative to the repository root, which is `meshloom` too."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        names = [".".join([*base, alias.name]) for alias in node.names]
        if node.level:
            return names
    else:
        return []
    return [n.removeprefix("meshloom.") for n in names if n.startswith("meshloom.")]


def graph(modules: Modules) -> Modules:
    """Returns the imports between rooms."""
    found: Modules = {room.name: set() for room in ROOMS}
    for module, imported in modules.items():
        found[room_of(module)] |= {room_of(name) for name in imported}
    return {name: rooms - {name} for name, rooms in found.items()}


def reduced(downward: Modules) -> Modules:
    """Returns the imports not implied by a longer path; there must be no cycle."""
    below: Modules = {}
    for name in reversed(downward):  # what is imported comes later in ROOMS
        below[name] = set().union(*({x} | below[x] for x in downward[name]))
    return {
        name: {x for x in rooms if not any(x in below[y] for y in rooms)}
        for name, rooms in downward.items()
    }


def num_files(name: str, root: pathlib.Path = ROOT) -> int:
    """Counts the modules of a room (no `__init__.py`), or the gin files of configs."""
    if name == "configs":
        return len(list((root / name).glob("*.gin")))
    known = files(root).items()
    return sum(room_of(m) == name for m, p in known if p.name != "__init__.py")


# Sizes. At a width of 400 px, the smallest text is still 8 px high.
WIDTH, MARGIN, BOX, HEIGHT = 620, 20, 180, 46
GUTTER = (WIDTH - 2 * MARGIN - 3 * BOX) // 2
PITCH, TOP, LANE, PORT = 72, 104, 5, 26
GRAY = "#57606a"
ABOUT = "Arrows are imports; those implied by a longer path are omitted."
FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif"
FILLS = {
    "trainer": ("#dfeafb", "#5b84c4"),
    "launch": ("#fbe8d3", "#c58a45"),
    "models": ("#dcf0df", "#5a9c68"),
    "service": ("#fbdfe4", "#c46a7c"),
    "sharding": ("#eae2f8", "#8a6cc0"),
    "configs": ("#ecebe6", "#8b8778"),
}


def _left(room: Room) -> int:
    return MARGIN + room.column * (BOX + GUTTER)


def _width(room: Room) -> int:
    return room.span * BOX + (room.span - 1) * GUTTER


def _top(room: Room) -> int:
    return TOP + room.row * PITCH


def _is_free(x: float, rows: range) -> bool:
    """Returns whether a vertical line at x misses all boxes in these rows."""
    inside = (r for r in ROOMS if r.row in rows)
    return not any(_left(r) - 6 < x < _left(r) + _width(r) + 6 for r in inside)


def _ends(source: Room, target: Room) -> tuple[float, float]:
    """Returns where an arrow starts and ends; arrows to different sides do not meet."""
    spans = [(_left(r), _left(r) + _width(r)) for r in (source, target)]
    centers = [sum(span) / 2 for span in spans]
    if source.span != target.span:  # straight, from or to a wide box
        narrow = centers[0] if source.span == 1 else centers[1]
        if max(s[0] for s in spans) <= narrow <= min(s[1] for s in spans):
            return narrow, narrow
    side = (centers[1] > centers[0]) - (centers[1] < centers[0])
    return centers[0] + side * PORT, centers[1] - side * PORT


class Router:
    """Routes arrows through the gaps between boxes, never through a box."""

    def __init__(self):
        self._lanes: dict[int, list] = {}  # in the gap below each row
        self._verticals: dict[float, int] = {}

    def _y(self, row: int, key: tuple) -> int:
        """Returns the y of a horizontal segment in the gap below a row."""
        lanes = self._lanes.setdefault(row, [])
        if key not in lanes:
            lanes.append(key)
        return TOP + row * PITCH + HEIGHT + 5 + LANE * (lanes.index(key) % 3)

    def _gutter(self, source: Room, target: Room, near: float) -> float:
        """Returns the x of a vertical segment beside or between the columns."""
        sides = [MARGIN + i * (BOX + GUTTER) - GUTTER / 2 for i in range(1, 3)]
        via = min(sides, key=lambda x: abs(x - near))
        if {source.column, target.column} == {0}:
            via = MARGIN / 2
        elif source.column == 2 and target.column + target.span == 3:
            via = WIDTH - MARGIN / 2
        number = self._verticals[via] = self._verticals.get(via, -1) + 1
        return via + (0, 5, -5)[number % 3]

    def path(self, source: Room, target: Room) -> str:
        """Returns the SVG path of an arrow."""
        if target.row <= source.row:
            raise ValueError(
                f"{source.name} imports {target.name}, which is not drawn below it: "
                "move one of them to another row of ROOMS in docs/architecture.py"
            )
        x, end = _ends(source, target)
        begin, stop = _top(source) + HEIGHT, _top(target) - 2
        between = range(source.row + 1, target.row)
        leaving = (source.name, end > x)
        arriving = (target.name, end > x)
        if x == end and _is_free(x, between):
            return f"M{x:g} {begin}V{stop}"
        if _is_free(end, between):
            return f"M{x:g} {begin}V{self._y(source.row, leaving)}H{end:g}V{stop}"
        if _is_free(x, between):
            low = self._y(target.row - 1, arriving)
            return f"M{x:g} {begin}V{low}H{end:g}V{stop}"
        via = self._gutter(source, target, end)
        end += PORT if via > end else -PORT
        high = self._y(source.row, leaving)
        low = self._y(target.row - 1, arriving)
        return f"M{x:g} {begin}V{high}H{via:g}V{low}H{end:g}V{stop}"


def _text(x: float, y: float, text: str, size: float, **more: str) -> str:
    options = {"fill": "#1f2328", **more}
    rest = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in options.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{rest}>{escape(text)}</text>'


def _box(room: Room, imported: set[str], root: pathlib.Path) -> list[str]:
    x, y, width = _left(room), _top(room), _width(room)
    fill, line = FILLS[room.name.split("/")[0]]
    count = num_files(room.name, root)
    label = room.label or room.name.split("/")[-1]
    title = f"{room.name} imports {', '.join(sorted(imported)) or 'no other room'}"
    soft = {"fill": GRAY, "text_anchor": "end"}
    return [
        f"<g><title>{escape(title)}</title>",
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="7" '
        f'fill="{fill}" stroke="{line}"/>',
        _text(x + 9, y + 19, label, 15, font_weight="600"),
        _text(x + width - 9, y + 19, f"{count} file{'s' * (count != 1)}", 13, **soft),
        _text(x + 9, y + 37, room.about, 13),
        "</g>",
    ]


def draw(modules: Modules, root: pathlib.Path = ROOT) -> str:
    """Returns the picture as SVG; the same files and imports give the same text."""
    found = graph(modules)
    order = list(BY_NAME)
    down = {
        n: {x for x in xs if order.index(x) > i}
        for i, (n, xs) in enumerate(found.items())
    }
    up = [f"{n}\u00a0→\u00a0{x}" for n in found for x in sorted(found[n] - down[n])]
    notes = _notes(up)
    end = TOP + (max(room.row for room in ROOMS) + 1) * PITCH
    height = end + 18 * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="{FONT}" role="img" '
        'aria-label="The rooms of Meshloom and their imports">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{GRAY}"/></marker></defs>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" '
        'fill="#fbfaf7" stroke="#dedad0"/>',
        _text(MARGIN, 32, "Rooms and imports", 18, font_weight="600"),
        _text(MARGIN, 55, ABOUT, 13.5),
    ]
    x = MARGIN
    for package, (fill, line) in FILLS.items():
        parts.append(
            f'<rect x="{x}" y="69" width="13" height="13" rx="3" fill="{fill}" '
            f'stroke="{line}"/>'
        )
        parts.append(_text(x + 19, 80, f"{package}/", 13.5))
        x += 36 + 9 * len(package) + 9
    router = Router()
    for name, rooms in reduced(down).items():
        for other in sorted(rooms, key=order.index):
            path = router.path(BY_NAME[name], BY_NAME[other])
            parts.append(
                f'<path d="{path}" fill="none" stroke="{GRAY}" stroke-width="1.4" '
                'stroke-linejoin="round" marker-end="url(#tip)"/>'
            )
    for room in ROOMS:
        parts += _box(room, found[room.name], root)
    for i, note in enumerate(notes):
        parts.append(_text(MARGIN, end + 18 * i, note, 13, fill="#a3312a"))
    return "\n".join([*parts, "</svg>", ""])


def _notes(up: list[str]) -> list[str]:
    """Lists imports against the order as text; arrows up would hide others."""
    if not up:
        return []
    text = f"Against the order: {', '.join(up)}".replace("trainer/", "")
    return textwrap.wrap(text, 72, break_long_words=False, break_on_hyphens=False)


def main(argv: list[str]) -> int:
    picture = draw(imports())
    if argv == ["--check"]:
        agrees = PICTURE.exists() and PICTURE.read_text() == picture
        name = PICTURE.relative_to(ROOT)
        remedy = "run `python docs/architecture.py`"
        print(f"{name} agrees with the code" if agrees else f"{name}: {remedy}")
        return 0 if agrees else 1
    if argv:
        print(__doc__)
        return 2
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
