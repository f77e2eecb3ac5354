"""A Google Cloud Storage of one bucket, in memory, for tests without a network.

It knows the part of the JSON API that tensorstore, gcsfs and orbax use: put, get (also
a range), list, delete, move; with the generations by which tensorstore writes safely.
"""

import contextlib
import http.server
import itertools
import json
import re
import sys
import threading
import urllib.parse
from collections.abc import Iterator

BUCKET = "bucket"


class Objects(dict):
    """{name: (generation, content)}

    Attributes:
      resets: so many of the next reads of arrays end without an answer.
      refusals: so many of the next are answered with status 403.
    """

    resets = refusals = 0
    lock = threading.Lock()
    generations = itertools.count(1)

    def about(self, name: str) -> dict:
        generation, content = self[name]
        return {
            "kind": "storage#object",
            "bucket": BUCKET,
            "name": name,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "timeCreated": "2024-01-01T00:00:00Z",
            "updated": "2024-01-01T00:00:00Z",
        }

    def listing(self, query: dict[str, str]) -> dict:
        prefix, mark = query.get("prefix", ""), query.get("delimiter")
        first, last = query.get("startOffset", ""), query.get("endOffset")
        items, prefixes = [], set()
        for name in sorted(self):
            if not name.startswith(prefix) or name < first or (last and name >= last):
                continue
            head, found, _ = name[len(prefix) :].partition(mark or "\0")
            if mark and found:
                prefixes.add(prefix + head + mark)
            else:
                items.append(self.about(name))
        return {"items": items, "prefixes": sorted(prefixes)}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Clients may hang up early; anything else is a defect of this server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # With it, the second of an answer's two packets waits until the client acknowledges
    # the first, 40 ms.
    disable_nagle_algorithm = True
    objects: Objects

    def log_message(self, *args):
        """Says nothing of the requests."""

    def answer(self, status: int, content: bytes | dict = b"", **headers) -> None:
        if isinstance(content, dict):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def parts(self) -> tuple[list[str], dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        path = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        return path, dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))

    def unmet(self, name: str, query: dict[str, str]) -> bool:
        """Whether the object is not of the generation that was asked for."""
        wanted = query.get("ifGenerationMatch")
        present = str(self.objects[name][0]) if name in self.objects else "0"
        return wanted is not None and wanted != present

    def do_GET(self):
        path, query = self.parts()
        path = path[path.index("b") :] if "b" in path else path
        with self.objects.lock:
            if len(path) == 2:
                self.answer(200, {"kind": "storage#bucket", "name": path[1]})
            elif len(path) == 3:
                self.answer(200, self.objects.listing(query))
            elif path[3] not in self.objects:
                self.answer(404, {"error": {"code": 404, "message": "not found"}})
            elif query.get("alt") != "media":
                self.answer(200, self.objects.about(path[3]))
            elif not self.fails(path[3]):
                self.send_content(*self.objects[path[3]], query)

    def fails(self, name: str) -> bool:
        if "/state/" not in name:
            return False
        if self.objects.resets:
            self.objects.resets -= 1
            self.close_connection = True
            return True
        if self.objects.refusals:
            self.objects.refusals -= 1
            self.answer(403, {"error": {"code": 403, "message": "not now"}})
            return True
        return False

    def send_content(self, generation: int, content: bytes, query: dict) -> None:
        if query.get("ifGenerationNotMatch") == str(generation):
            self.answer(304)
            return
        headers = {"x_goog_generation": str(generation)}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, len(content) - int(last))
            stop = min(int(last) + 1, len(content)) if first and last else len(content)
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            self.answer(206, content[start:stop], **headers)
        else:
            self.answer(200, content, **headers)

    def do_POST(self):
        path, query = self.parts()
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path[0] == "batch":
            self.delete_all(content.decode())
            return
        path = path[path.index("b") :]
        with self.objects.lock:
            if "moveTo" in path:
                source = self.objects.pop(path[3], None)
                if source is None:
                    self.answer(404, {"error": {"code": 404, "message": "not found"}})
                else:
                    self.put(path[-1], source[1])
                    self.answer(200, self.objects.about(path[-1]))
                return
            name = query.get("name")
            if query.get("uploadType") == "resumable":
                name = urllib.parse.quote(name or json.loads(content)["name"], safe="")
                here = f"http://{self.headers['Host']}/b/{BUCKET}/o/{name}"
                self.answer(200, {}, Location=here)
                return
            if query.get("uploadType") == "multipart":
                kind = self.headers["Content-Type"]
                name, content = _multipart(kind, content)
            if name is None:  # a resumable upload; tests have files of one piece
                assert "Content-Range" in self.headers, self.path
                name = path[3]
            if self.unmet(name, query):
                self.answer(412, {"error": {"code": 412, "message": "generation"}})
                return
            self.put(name, content)
            self.answer(200, self.objects.about(name))

    def delete_all(self, requests: str) -> None:
        """Several requests to delete, in one, as gcsfs sends them."""
        parts = []
        with self.objects.lock:
            for part in re.findall(r"DELETE /storage/v1/b/\w+/o/(\S+) HTTP", requests):
                found = self.objects.pop(urllib.parse.unquote(part), None)
                parts.append(f"--part\n\nHTTP/1.1 {404 if found is None else 204}\n")
        content = "".join([*parts, "--part--"]).encode()
        self.answer(200, content, Content_Type="multipart/mixed; boundary=part")

    def put(self, name: str, content: bytes) -> None:
        self.objects[name] = (next(self.objects.generations), content)

    def do_DELETE(self):
        path, query = self.parts()
        name = path[path.index("b") :][3]
        with self.objects.lock:
            if name not in self.objects:
                self.answer(404, {"error": {"code": 404, "message": "not found"}})
            elif self.unmet(name, query):
                self.answer(412, {"error": {"code": 412, "message": "generation"}})
            else:
                del self.objects[name]
                self.answer(204)


def _multipart(kind: str, content: bytes) -> tuple[str, bytes]:
    """(name, content) of an upload in two parts: JSON about it, and itself."""
    mark = kind.split("boundary=")[1].strip("\"'").encode()
    about, body = content.split(b"--" + mark)[1:3]
    name = json.loads(
        about.split(b"\n\n" if b"\r\n" not in about else b"\r\n\r\n", 1)[1]
    )
    ends = b"\r\n" if b"\r\n" in about else b"\n"
    body = body.split(ends * 2, 1)[1]
    return name["name"], body.removesuffix(ends)


def environment(address: str) -> dict[str, str]:
    """What makes clients use the server, without asking who we are."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": address,
        "STORAGE_EMULATOR_HOST": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GOOGLE_CLOUD_PROJECT": "none",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, Objects]]:
    """(address, objects) of a server that ends with the block."""
    objects = Objects()
    handler = type("Bound", (Handler,), {"objects": objects})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", objects
    finally:
        server.shutdown()
        server.server_close()
