"""The status page: an HTTP server beside the devices' service, for reading only.

    /              the page; /?task=1 with the details of task 1
    /report/0/...  the report of task 0, as far as it was written (`report_files`)
    /metrics       figures for Prometheus

A server of several populations has all of this for each of them, under /0/, /1/ and so on, and
at / a list of links.

It listens on loopback by default, and has no TLS: to read it from another machine, use a tunnel
or a proxy with TLS. On other addresses it needs a token, unless the operator opens it to all. It
answers only to names of the server (`access`), so that no web site can read it through a browser
by DNS rebinding. It loads nothing from other servers, and inserts names and values as text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import prometheus_client
import tornado.httpserver
import tornado.netutil
import tornado.web
from tornado import httputil

from tff_dpftrl import reports, validation
from tff_dpftrl.reports import markup
from tff_dpftrl.runtime import addresses
from tff_dpftrl.runtime.status import access as access_lib
from tff_dpftrl.runtime.status import metrics, past, read_behind, report_files, view
from tff_dpftrl.runtime.status import observations as observations_lib

_ASSETS = pathlib.Path(__file__).parent / "assets"
_STYLE = pathlib.Path(reports.__file__).with_name("page.css")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_CHALLENGE = 'Basic realm="status page (any user name; the password is its token)"'
_FRESH_SECONDS = 0.5  # Smallest time between computations of the same page.


@dataclasses.dataclass(frozen=True)
class Shown:
    """Content of the page for one population.

    Attributes:
      seen: Observations to show.
      privacy: Function from a task to its privacy figures; None if the task is not private.
        It runs on a thread. The page shows these keys, if present: "epsilon" (None without a
        guarantee), "delta", "rho_zcdp", "unit_of_privacy", "num_rounds" and "skipped_rounds"
        (what "epsilon" charges), "next_epsilon" (with one more round), "declared_epsilon" (of
        all declared rounds), "budget_epsilon" (an upper limit), "no_guarantee" and
        "headline_caveats" (lists of sentences), "stopped" (the reason why there is no further
        round), and "declared" and "observed", each with "num_rounds", "min_sep" and
        "max_participations" (observed ones may be top-level keys).
      history: Function from a task to its `Store.history`. It runs on the same thread.
      reports: Function from a task to the folder in which its report is written; None if no
        report is to be shown. It runs on another thread.
    """

    seen: observations_lib.Observations
    privacy: Callable[[str], Mapping[str, Any] | None]
    history: Callable[[str], Sequence[Mapping[str, Any]]]
    reports: Callable[[str], pathlib.Path] | None = None


class StatusServer:
    """HTTP server of the page, on the event loop on which it is started."""

    def __init__(
        self,
        shown: Sequence[Shown],
        *,
        host: str = addresses.LOOPBACK_HOST,
        port: int = 0,
        allowed: access_lib.Access | None = None,
    ):
        """Creates the server, which does not listen yet.

        Args:
          shown: What to show of each population.
          host: Address to listen at.
          port: Port to listen at; 0 for any free one.
          allowed: Access rules; None for all users of this machine.

        Raises:
          ValueError: If other machines can reach `host`, and `allowed` does not admit them.
        """
        self._allowed = access_lib.Access() if allowed is None else allowed
        self._allowed.check(host)
        self._host = host
        self._port = port
        self._executor = futures.ThreadPoolExecutor(1, thread_name_prefix="status")
        self._parts = [_Part(one, self._executor, self.check) for one in shown]
        self._server: tornado.httpserver.HTTPServer | None = None
        self.address = ""

    async def start(self) -> None:
        """Starts listening, and sets `address` to the page's URL."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            sockets = tornado.netutil.bind_sockets(self._port, self._host, family)
        except OSError as error:
            raise OSError(
                error.errno,
                f"The status page cannot listen at {self._host} port {self._port} "
                f"({error.strerror}): choose another port, or 0 for a free one.",
            ) from error
        except UnicodeError as error:  # Of a name that cannot be looked up.
            raise validation.UsageError(
                f"The status page cannot listen at {self._host!r}: it is no name of a host."
            ) from error
        port = sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"http://{host}:{port}"
        several = len(self._parts) > 1
        routes = [
            route
            for i, part in enumerate(self._parts)
            for route in part.routes(f"/{i}/" if several else "/")
        ]
        common = {"status": self._parts[0]}
        if several:
            routes.append(
                ("/", _File, {**common, "content": self._list(), "kind": _TYPES[".html"]})
            )
        application = tornado.web.Application(
            routes,
            default_handler_class=_Missing,
            default_handler_args=common,
            log_function=lambda _: None,
        )
        self._server = tornado.httpserver.HTTPServer(
            application,
            max_header_size=16_384,
            max_body_size=0,
            idle_connection_timeout=60,
            body_timeout=5,
        )
        self._server.add_sockets(sockets)

    async def stop(self) -> None:
        """Stops listening and closes all connections."""
        if self._server is not None:
            self._server.stop()
            await self._server.close_all_connections()
            self._server = None
        for part in self._parts:
            await part.settle()
        self._executor.shutdown()

    def _list(self) -> bytes:
        """Returns the page of links to the populations' pages."""
        names = [markup.text(part.seen.served.name) for part in self._parts]
        links = "".join(f'<li><a href="{i}/">{name}</a></li>' for i, name in enumerate(names))
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Populations</title>'
        sheet = '<link rel="stylesheet" href="0/page.css">'
        return f"{head}{sheet}<main><h1>Populations</h1><ul>{links}</ul></main></html>".encode()

    def check(self, request: httputil.HTTPServerRequest) -> None:
        """Refuses a request with a foreign host name, or without the token if one is needed."""
        connected = request.connection.stream.socket  # None if the reader has gone.
        reached = connected.getsockname()[0] if connected else ""
        if not self._allowed.knows(request.host_name.strip("[]"), self._host, reached):
            is_local = addresses.is_loopback(self._host)
            reason = "Ask for localhost" if is_local else "Not a name of this server"
            raise tornado.web.HTTPError(403, reason=reason)
        if not self._allowed.admits(request.headers.get("Authorization", "")):
            raise tornado.web.HTTPError(401)


class _Part:
    """The page of one population: what the request handlers call."""

    def __init__(
        self,
        shown: Shown,
        executor: futures.Executor,
        check: Callable[[httputil.HTTPServerRequest], None],
    ):
        self.seen = shown.seen
        self.check = check
        self._reports = shown.reports
        self._privacy = read_behind.ReadBehind(
            lambda task: view.plain(shown.privacy(task)), executor
        )
        self._history = read_behind.ReadBehind(
            lambda task: past.of_history(shown.history(task)), executor
        )
        self._registry = metrics.registry(self.seen, self._known_privacy)
        self._made: dict[int, tuple[float, bytes]] = {}

    def routes(self, place: str) -> list[tuple[Any, ...]]:
        """Returns the routes of the page under a path that ends with a slash."""
        common = {"status": self}
        return [
            (place, _Page, common),
            *((f"{place}{name}", _File, {**common, **file}) for name, file in _files().items()),
            (place + r"report/(\d{1,4})/([a-z_.]{1,40})", _Report, common),
            (f"{place}metrics", _Metrics, common),
        ]

    async def settle(self) -> None:
        """Waits until all that is being read has been read."""
        await self._privacy.settle()
        await self._history.settle()

    def _known_privacy(self) -> dict[str, Mapping[str, Any]]:
        known = {}
        for name, task in self.seen.tasks.items():
            figures, _, _ = self._privacy.get(name, task.rounds_done)
            if isinstance(figures, Mapping):
                known[name] = figures
                task.stopped = str(figures.get("stopped") or "")
        return known

    def first_task(self) -> int:
        """Returns the index of the task that is shown without a choice: one that trains."""
        tasks = enumerate(self.seen.tasks.values())
        return next((i for i, task in tasks if task.settings.model_of is None), 0)

    async def page(self, index: int) -> bytes:
        """Returns the page with the details of a task; it is made twice a second at most."""
        name, task = list(self.seen.tasks.items())[index]
        written = []
        if self._reports is not None:
            written = await asyncio.to_thread(report_files.listed, self._reports(name))
        now = time.monotonic()
        made_at, content = self._made.get(index, (-_FRESH_SECONDS, b""))
        if now - made_at >= _FRESH_SECONDS:
            known = self._known_privacy()
            figures, error, _ = self._privacy.get(name, task.rounds_done)
            rounds, rounds_error, _ = self._history.get(name, task.rounds_done)
            details = view.Details(figures, error, rounds, rounds_error, written)
            content = view.page(self.seen, index, known, details).encode("utf-8", "replace")
            self._made[index] = (now, content)
        return content

    async def report(self, index: int, name: str) -> bytes | None:
        """Reads a file of a task's report; returns None if there is none."""
        task = list(self.seen.tasks)[index]
        if self._reports is None:
            return None
        return await asyncio.to_thread(report_files.read, self._reports(task), name)

    def metrics(self) -> bytes:
        """Returns the content of `/metrics`."""
        return prometheus_client.generate_latest(self._registry)


def _files() -> dict[str, dict[str, Any]]:
    """Reads the files beside the page: content and type by name."""
    style = _STYLE.read_bytes() + (_ASSETS / "page.css").read_bytes()
    contents = {path.name: path.read_bytes() for path in sorted(_ASSETS.iterdir())}
    return {
        name: {"content": content, "kind": _TYPES[pathlib.Path(name).suffix]}
        for name, content in (contents | {"page.css": style}).items()
        if pathlib.Path(name).suffix in _TYPES
    }


class _Handler(tornado.web.RequestHandler):
    """Handler of GET and HEAD, with headers that forbid content of other servers."""

    SUPPORTED_METHODS = ("GET", "HEAD")

    def initialize(self, status: _Part) -> None:
        self.status = status

    def set_default_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.set_header(name, value)
        self.clear_header("Server")

    def prepare(self) -> None:
        self.status.check(self.request)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        if status_code == 401:
            self.set_header("WWW-Authenticate", _CHALLENGE)
        self.finish(f"{status_code} {self._reason}\n")

    def send(self, content: bytes, kind: str) -> None:
        self.set_header("Content-Type", kind)
        self.finish(content)

    def head(self, *parts: str) -> Awaitable[None] | None:
        return self.get(*parts)

    def get(self, *parts: str) -> Awaitable[None] | None:
        raise NotImplementedError

    def task_index(self, text: str) -> int:
        """Returns an index of a task in a request; answers 404 if there is none."""
        index = int(text) if text.isdecimal() and len(text) < 5 else -1
        if not 0 <= index < len(self.status.seen.tasks):
            raise tornado.web.HTTPError(404, reason="No such task")
        return index


class _Missing(_Handler):
    def get(self) -> None:
        raise tornado.web.HTTPError(404)


class _File(_Handler):
    def initialize(self, content: bytes, kind: str, **common: Any) -> None:
        super().initialize(**common)
        self._content, self._kind = content, kind

    def get(self) -> None:
        self.send(self._content, self._kind)


class _Page(_Handler):
    async def get(self) -> None:
        index = self.task_index(self.get_query_argument("task", str(self.status.first_task())))
        self.send(await self.status.page(index), _TYPES[".html"])


class _Report(_Handler):
    async def get(self, index: str, name: str) -> None:
        content = await self.status.report(self.task_index(index), name)
        if content is None:
            raise tornado.web.HTTPError(404)
        for header, value in report_files.HEADERS.items():
            self.set_header(header, value)
        self.send(content, report_files.FILES[name])


class _Metrics(_Handler):
    def get(self) -> None:
        self.send(self.status.metrics(), prometheus_client.CONTENT_TYPE_LATEST)
