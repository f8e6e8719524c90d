"""A hub of data sets, small but real for its clients: commits, lists of files, and the files."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class HubServer:
    """Serves one data set on this machine; a context manager.

    Attributes:
        commits: files of each commit, oldest first; `main` is the newest one.
        asked: paths that were asked for.
    """

    name: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes]) -> str:
        """Adds a commit; gives its hash."""
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[sha] = files
        return sha

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: HubServer

    def _any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.asked.append(path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = re.escape(self.served.name)
        if found := re.fullmatch(
            rf"/api/datasets/{name}(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?", path
        ):
            self._api(found[1] or "revision", found[2] or "main", body)
        elif found := re.fullmatch(rf"/datasets/{name}/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2])
        else:
            self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD = do_POST = _any

    def _api(self, what: str, revision: str, body: bytes) -> None:
        sha = list(self.served.commits)[-1] if revision == "main" else revision
        files = self.served.commits.get(sha)
        if files is None:
            self._reply(404, b'{"error": "no such revision"}', {"X-Error-Code": "RevisionNotFound"})
            return
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            about = {
                "private": False,
                "disabled": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
            }
            self._json({"id": self.served.name, "sha": sha, "siblings": siblings, **about})
        elif what == "tree":
            self._json(entries)
        else:
            asked = re.findall(rb"paths=([^&]+)", body)
            wanted = [unquote(each.decode()) for each in asked] or json.loads(body or b"{}").get("paths", [])
            self._json([entry for entry in entries if entry["path"] in wanted])

    def _file(self, sha: str, name: str) -> None:
        data = self.served.commits.get(sha, {}).get(name)
        if data is None:
            self._reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        else:
            tag = hashlib.sha1(data).hexdigest()
            self._reply(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": sha})

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""
