"""A port of one process on which Prometheus finds its figures. Knows nothing of ray.

Each scrape is collected in a thread of its own, when it comes; between two of them nobody pays.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from pdmux_ray.serve.keys import allowed

IDLE_S = 10.0  # a connection that says nothing for so long is closed
MOST = 16  # connections at once; more are closed at once: a thread each, beside the step loop

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

log = logging.getLogger("ray.serve")


class ScrapePort:
    """GET /metrics, from now until `close`. It asks for one of the keys, if there are any."""

    def __init__(self, registry: Collector, host: str, keys: Collection[bytes] = ()) -> None:
        """`host`: the address to listen on, and where others reach it."""
        kind = _Ipv6Server if ":" in host else _Server
        self._server = make_server(host, 0, _keyed(make_wsgi_app(registry), keys), kind, _Handler)
        self.address = f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="scrape-port", daemon=True).start()

    def close(self) -> None:
        """Blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()


def _keyed(app: WsgiApp, keys: Collection[bytes]) -> WsgiApp:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"There is /metrics, and nothing else.\n"]
        if not allowed(keys, environ.get("HTTP_AUTHORIZATION", "")):
            start_response("401 Unauthorized", [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
            return [b"A valid API key is needed: send it as `Authorization: Bearer <key>`.\n"]
        return app(environ, start_response)

    return answer


class _Server(ThreadingWSGIServer):
    request_queue_size = MOST

    def __init__(self, *args: Any) -> None:
        self._places = threading.BoundedSemaphore(MOST)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def server_bind(self) -> None:
        """Without looking the host's name up, which can take as long as a name server wants."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        log.info("A scrape by %s has failed.", client_address, exc_info=True)


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line a scrape would say nothing."""
