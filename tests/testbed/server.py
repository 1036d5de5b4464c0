"""The fake cloud over HTTP: the Compute, Network and Identity calls that a node provider makes, the sign-in service for
instances, and the metadata service that every instance finds at 169.254.169.254.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.testbed.cloud import ApiError, FakeCloud
from tests.testbed.identity import Identity

BASE = "/20160918"
ROUTES: list[tuple[str, str, str]] = [
    ("GET", r"/instances", "list"),
    ("POST", r"/instances", "launch"),
    ("GET", r"/instances/([^/]+)", "get"),
    ("PUT", r"/instances/([^/]+)", "update"),
    ("DELETE", r"/instances/([^/]+)", "terminate"),
    ("GET", r"/vnicAttachments", "attachments"),
    ("GET", r"/vnics/([^/]+)", "vnic"),
    ("GET", r"/subnets/([^/]+)", "subnet"),
    ("GET", r"/images", "images"),
    ("GET", r"/images/([^/]+)", "image"),
    ("GET", r"/availabilityDomains", "domains"),
]


@dataclass
class Listener:
    """One socket that the API answers on; `instance` is who asks, where it is a metadata service."""

    sock: socket.socket
    instance: str | None = None
    server: Any = field(default=None, repr=False)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class ApiServer:
    """Serves one cloud on any number of sockets, each in whatever network it was made in."""

    def __init__(self, cloud: FakeCloud, identity: Identity | None = None) -> None:
        self.cloud, self.identity = cloud, identity or Identity()
        self._listeners: list[Listener] = []

    def serve(self, sock: socket.socket, instance: str | None = None) -> Listener:
        listener = Listener(sock, instance)
        handler = type("Handler", (_Handler,), {"api": self, "listener": listener})
        server = _Server(("", 0), handler, bind_and_activate=False)
        server.socket.close()
        server.socket = sock
        server.server_address = sock.getsockname()
        listener.server = server
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="fake-oci").start()
        self._listeners.append(listener)
        return listener

    def local(self) -> str:
        """Serve on a free port of this machine's loopback; the endpoint."""
        sock = socket.create_server(("127.0.0.1", 0))
        self.serve(sock)
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Any, dict[str, str]]:
        parts = urlsplit(path)
        if parts.path == "/v1/x509":
            return self.identity.federate(json.loads(body or b"{}")), {}
        self.identity.check(method, path, headers, body)
        for verb, pattern, operation in ROUTES:
            match = re.fullmatch(BASE + pattern + "/?", parts.path)
            if match and verb == method:
                resource = unquote(match[1]) if match.groups() else None
                query = dict(parse_qsl(parts.query))
                result = self.cloud.call(operation, resource, query, headers, json.loads(body or b"{}"))
                return result if isinstance(result, tuple) else (result, {})
        raise ApiError(404, "NotFound", f"There is no operation {method} {parts.path}.")

    def metadata(self, path: str, headers: dict[str, str], instance: str) -> str | None:
        if headers.get("authorization") != "Bearer Oracle":
            return None
        tail = path.removeprefix("/opc/v2")
        if tail == "/instance/region":
            return "iad"
        if tail == "/instance/id":
            return instance
        if tail == "/identity/intermediate.pem":
            return self.identity.intermediate()
        if tail in ("/identity/cert.pem", "/identity/key.pem"):
            return self.identity.certificate(instance)[tail.endswith("key.pem")]
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    api: ClassVar[ApiServer]
    listener: ClassVar[Listener]

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {key.lower(): value for key, value in self.headers.items()}
        if self.listener.instance is not None:
            text = self.api.metadata(self.path, headers, self.listener.instance)
            self._send(200 if text else 404, (text or "").encode(), {"Content-Type": "text/plain"})
            return
        try:
            result, more = self.api.answer(self.command, self.path, headers, body)
        except ApiError as error:
            if error.drop:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._send(error.status, json.dumps({"code": error.code, "message": error.message}).encode(), {})
            return
        if result is None:
            self._send(204, b"", more)
        else:
            self._send(200, json.dumps(result).encode(), more)

    def _send(self, status: int, body: bytes, more: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **more}.items():
            self.send_header(key, value)
        self.send_header("opc-request-id", "testbed")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status != 204:
            self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the cloud keeps its own log."""
