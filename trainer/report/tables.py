"""Tables and small HTML snippets for the sections of a report."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any


def section(title: str, html: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{html}</section>"


def absent(text: str) -> str:
    """Returns a line about something that a run folder does not contain."""
    return f'<p class="absent">{escape(text)}</p>'


def code(text: str | None) -> str:
    return f"<code>{escape(text)}</code>" if text else ""


def plain_text(value: Any) -> str:
    """Returns a JSON value as short, unescaped text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, (str, int)) for v in value):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    marked: Sequence[bool] = (),
) -> str:
    """Returns an HTML table; cells are HTML, headings are text.

    On a narrow page, tables of more than two columns stack the cells of a row, each
    with its heading, so that no table is wider than the page.

    Args:
      headings: the column headings.
      rows: the cells of each row.
      numbers: the columns to right-align.
      marked: whether to highlight each row; empty highlights none.
    """
    kinds = [' class="number"' if i in numbers else "" for i in range(len(headings))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(heading)}</th>'
        for kind, heading in zip(kinds, headings, strict=True)
    )
    lines = []
    for number, (first, *rest) in enumerate(rows):
        cells = "".join(
            f'<td{kind} data-name="{escape(heading)}">{cell}</td>'
            for kind, heading, cell in zip(kinds[1:], headings[1:], rest, strict=True)
        )
        mark = ' class="changed"' if marked and marked[number] else ""
        lines.append(f'<tr{mark}><th scope="row">{first}</th>{cells}</tr>')
    stacked = ' class="stacked"' if len(headings) > 2 else ""
    return (
        f'<div class="frame"><table{stacked}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
