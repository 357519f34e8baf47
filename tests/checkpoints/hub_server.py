"""As much of the Hugging Face hub as a download needs, on this machine, with a log of what was asked.

As there, the weights are found behind a redirect, by their SHA-256, and are said to be on Xet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

COMMIT = "c" * 40


@dataclass
class Hub:
    """`root` holds the repositories, `owner/name`. What is sent of the weights of `cut` ends after
    `after` bytes: the connection is closed and then refused, or held where `hold`."""

    root: Path
    cut: str = ""
    after: int = 0
    hold: bool = False
    url: str = ""
    cdn: str = ""  # another host for the client, which then follows no redirect in a HEAD
    ranges: list[tuple[str, str]] = field(default_factory=list)  # repository, Range of each GET
    reached: Event = field(default_factory=Event)  # `after` bytes were sent
    ended: Event = field(default_factory=Event)


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}/cdn"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._resolve()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            repo = "/".join(path.split("/")[3:5])
            if not (self.hub.root / repo).exists():
                self._send(404, {"X-Error-Code": "RepoNotFound"})
            elif "/tree/" in path:
                self._listing(repo)
            else:
                self._json({"id": repo, "sha": COMMIT})
        elif path.startswith("/cdn/"):
            repo = "/".join(path.split("/")[2:4])
            self._weights(repo, path.removeprefix("/cdn/"))
        elif "/resolve/" in path:
            self._resolve()
        else:
            self._send(404, {})

    def _listing(self, repo: str) -> None:
        entries = []
        for path in sorted((self.hub.root / repo).iterdir()):
            size, digest = path.stat().st_size, _sha256(path)
            entry = {"type": "file", "path": path.name, "size": size, "oid": digest[:40]}
            if path.suffix == ".safetensors":
                lfs = {"oid": digest, "size": size, "pointerSize": 134}
                entry |= {"lfs": lfs, "xetHash": digest}
            entries.append(entry)
        self._json(entries)

    def _resolve(self) -> None:
        owner, name, _, _, file = self.path.strip("/").split("/")
        path = self.hub.root / owner / name / file
        if not path.exists():
            return self._send(404, {"X-Error-Code": "EntryNotFound"})
        etag = f'"{_sha256(path)}"'
        headers = {"X-Repo-Commit": COMMIT, "ETag": etag}
        if path.suffix == ".safetensors":
            linked = {"X-Linked-ETag": etag, "X-Linked-Size": str(path.stat().st_size)}
            there = {"Location": f"{self.hub.cdn}/{owner}/{name}/{file}"}
            return self._send(302, headers | linked | there)
        return self._send(200, headers, path.read_bytes())

    def _weights(self, repo: str, file: str) -> None:
        hub, asked = self.hub, self.headers.get("Range", "")
        hub.ranges.append((repo, asked))
        if hub.cut == repo and hub.reached.is_set():
            return self._send(503, {})
        data = (hub.root / file).read_bytes()
        begin = int(asked.removeprefix("bytes=").removesuffix("-") or 0)
        headers = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if asked else {}
        cut = hub.cut == repo
        self._send(206 if asked else 200, headers, data[begin:], hub.after if cut else None)
        if cut:
            self.wfile.flush()
            hub.reached.set()
            if hub.hold:
                hub.ended.wait()
            self.close_connection = True
        return None

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self._send(200, {"Content-Type": "application/json"}, data)

    def _send(
        self, status: int, headers: dict[str, str], data: bytes = b"", only: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:only])

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
