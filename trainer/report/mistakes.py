"""The section on a classifier's mistakes: a table of all classes, and the worst."""

import base64
import struct
import zlib
from html import escape
from typing import Any

import numpy as np

from .data import RunFiles
from .tables import section

SPLITS = {"eval": "held-out", "test": "test"}


def mistakes(run: RunFiles) -> str:
    """Returns nothing for a run that did not compare predictions with labels."""
    found = run.mistakes
    if found is None:
        return ""
    num, wrong = found["examples"], found["mistakes"]
    html = (
        f"<p>At step {found['step']}, {wrong:,} of {num:,} {SPLITS[found['split']]} "
        f"examples are predicted wrong ({wrong / num:.2%}).</p>"
    )
    if "confusion" in found:
        html += _confusion(np.array(found["confusion"]))
    if found["worst"]:
        html += "<p>The mistakes with the most certain predictions:</p>"
        html += f'<div class="mistakes">{"".join(map(_mistake, found["worst"]))}</div>'
    return section("Mistakes", html)


def _confusion(counts: np.ndarray) -> str:
    """Returns a table: a row for each label, a column for each prediction."""
    head = "".join(f'<th scope="col">{c}</th>' for c in range(len(counts)))
    lines = []
    for label, row in enumerate(counts):
        share = row / max(row.sum(), 1)
        cells = "".join(
            f'<td class="{"right" if c == label else "wrong"}" '
            f'style="--share:{share[c]:.3f}">{count or ""}</td>'
            for c, count in enumerate(row.tolist())
        )
        lines.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    return (
        '<div class="frame"><table class="confusion"><caption>Rows are labels, columns '
        f'are predictions.</caption><thead><tr><th scope="col"></th>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _mistake(row: dict[str, Any]) -> str:
    text = f"{row['label']}, predicted {row['class']}"
    if "probability" in row:
        text += f" ({row['probability']:.0%})"
    image = ""
    if "image" in row:
        pixels = base64.b64encode(png(np.array(row["image"], np.uint8))).decode()
        image = f'<img alt="" src="data:image/png;base64,{pixels}">'
    return (
        f'<figure title="example {row["example"]}">{image}'
        f"<figcaption>{escape(text)}</figcaption></figure>"
    )


def png(image_HWC: np.ndarray) -> bytes:
    """Returns an image of bytes, gray or red, green and blue, as a PNG file."""
    H, W, C = image_HWC.shape

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + checksum.to_bytes(4)

    color = {1: 0, 3: 2}[C]
    lines = b"".join(b"\0" + line.tobytes() for line in image_HWC)  # 0: no filter
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", W, H, 8, color, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )
