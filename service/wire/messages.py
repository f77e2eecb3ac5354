"""Messages: JSON objects, each with a CRC32C, since a network can flip a bit unnoticed.

JSON in UTF-8 | "\\n" | CRC32C of the JSON, 8 hexadecimal digits
"""

import json
from typing import Any

import google_crc32c

from .errors import Refused, Unavailable

Message = dict[str, Any]

_END = 9  # bytes after the JSON


def encode(message: Message) -> bytes:
    data = json.dumps(message).encode()
    return b"%s\n%08x" % (data, google_crc32c.value(data))


def decode(sealed: bytes) -> Message:
    """Reads a message.

    Raises Unavailable for one that is damaged, since it can be sent again, and Refused
    for anything but a JSON object with a checksum.
    """
    data, newline, seal = sealed[:-_END], sealed[-_END : 1 - _END], sealed[1 - _END :]
    crc = b"%08x" % google_crc32c.value(data)
    if newline != b"\n" and crc != seal:
        raise Refused(
            f"message of {len(sealed)} bytes: it has no checksum; do both sides have "
            "the same version of meshloom?"
        )
    if newline != b"\n" or crc != seal:
        raise Unavailable(
            f"message of {len(sealed)} bytes: it is damaged: CRC32C {crc.decode()}, "
            f"expected {seal!r}; send it again"
        )
    message = json.loads(data)
    if not isinstance(message, dict):
        raise Refused(f"message: a JSON {type(message).__name__}, expected an object")
    return message
