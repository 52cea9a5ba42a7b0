"""`headway watch`: the report, served on loopback and redrawn as the run writes.

It only reads files: the new lines of metrics and timeline, and the whole ledger when the run has grown by a tenth, so
that nothing in a run waits for it. The page asks again and again,
naming the state it shows; it is answered with the whole report, or with nothing (204) while nothing is new.
"""

import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from headway.errors import HeadwayError
from headway.report.cards import report
from headway.report.page import live_page, require_plotly
from headway.report.run_data import RunReader, open_runs

POLL_S = 2.0
"""How often a page asks."""


class CannotServe(HeadwayError, OSError):
    """The port is taken or not allowed."""


class Watch:
    """The newest report of some runs, read anew only when they have written something."""

    def __init__(self, readers: Sequence[RunReader]) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._stamp = ""
        self._body = b""

    def news(self, seen: str) -> bytes | None:
        """`{"stamp", "report"}` as JSON; None for a page that shows the newest state already."""
        with self._lock:
            stamp = "|".join(reader.stamp for reader in self._readers)
            if stamp != self._stamp:
                found = report([reader.read() for reader in self._readers])
                self._body = json.dumps({"stamp": stamp, "report": found}, allow_nan=False).encode()
                self._stamp = stamp
            return None if seen == self._stamp else self._body


def make_server(paths: Sequence[Path], *, port: int) -> tuple[ThreadingHTTPServer, str]:
    """A server that is not running yet, and the address of the page with its token.

    Raises NoRun, PlotlyMissing and CannotServe.
    """
    require_plotly()
    token = secrets.token_urlsafe(24)
    watch = Watch(open_runs(paths))
    page = live_page(f"report?token={token}", every_s=POLL_S).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query)
            if not hmac.compare_digest(query.get("token", [""])[0].encode(), token.encode()):
                self._answer(HTTPStatus.FORBIDDEN, b"the address lacks its token: take the one `headway watch` printed")
            elif asked.path == "/":
                self._answer(HTTPStatus.OK, page, "text/html; charset=utf-8")
            elif asked.path == "/report":
                body = watch.news(query.get("seen", [""])[0])
                self._answer(HTTPStatus.NO_CONTENT if body is None else HTTPStatus.OK, body or b"", "application/json")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"there is only one page")

        def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Silence: every line would show the token."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise CannotServe(f"cannot listen on port {port}: {error.strerror}; give another --port, or 0") from error
    return server, f"http://127.0.0.1:{server.server_address[1]}/?token={token}"


def watch(paths: Sequence[Path], *, port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted, at the lowest priority: where every core is busy the runs come first."""
    os.nice(19)
    server, url = make_server(paths, port=port)
    with server:
        say(f"watch: {url}\nCtrl-C stops watching; the runs go on")
        server.serve_forever()
