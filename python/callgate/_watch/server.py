# SPDX-License-Identifier: Apache-2.0
"""The live page's server: HTTP on loopback for clients that have the secret of its address.

Loopback excludes other machines, but not web pages: a foreign page can let its own name resolve to
127.0.0.1. So a request must name this machine (`Host`), come from the page itself if a page sends
it (`Origin`), and have the secret as the first part of its path. A request that changes something
must be JSON sent by POST. The page's Content-Security-Policy allows only the server's own files.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import secrets
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HOSTS = ("localhost", "127.0.0.1", "::1")
Query = Mapping[str, list[str]]
_MOST_BYTES = 1 << 16  # the most bytes of a request's body
_MOST_REQUESTS = 32  # the most simultaneous requests with the secret
_MOST_STRANGERS = 32  # the most connections without the secret; one more ends the oldest
_SECONDS = 10.0  # the most seconds that a client may be silent
_HEAD_SECONDS = 10.0  # seconds in which a connection must show the secret
_FILES = frozenset({
  "page.css", "runs.css", "page.js", "runs.js", "runs_table.js", "chart.js", "controls.js",
  "common.js"
})  # fmt: skip
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
  " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
  "Cache-Control": "no-store",
  "Content-Security-Policy": _POLICY,
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Resource-Policy": "same-origin",
  "Referrer-Policy": "no-referrer",
  "X-Content-Type-Options": "nosniff",
}


class RequestError(Exception):
  """Refuses a request, with an HTTP status and a message."""

  def __init__(self, status: int, message: str) -> None:
    super().__init__(message)
    self.status = status


class PageServer:
  """Serves the page and its requests, on threads of its own, until it is closed.

  Args:
    gets: functions by name, which answer GET requests of `api/NAME`: from the query to a value for
      JSON.
    posts: functions by name, which answer POST requests: from the sent object to a value for JSON.
      They may change something.
    port: the port of 127.0.0.1; 0 for any free one.
    option: the name of the port's option in messages.
    page: the file of the page.

  Attributes:
    url: the page's address, with the secret.
  """

  def __init__(
    self,
    gets: Mapping[str, Callable[[Query], Any]],
    posts: Mapping[str, Callable[[dict[str, Any]], Any]],
    *,
    port: int,
    option: str,
    page: str = "page.html",
  ) -> None:
    secret = secrets.token_urlsafe(24)
    try:
      self._http = _Http(port, secret, gets, posts, page)
    except OSError as error:
      what = f"port {port} of 127.0.0.1: {error.strerror}; choose another {option}"
      raise OSError(what) from error
    self.port: int = self._http.server_address[1]
    self.url = f"http://127.0.0.1:{self.port}/{secret}/"
    self._thread = threading.Thread(
      target=self._http.serve_forever, args=(0.2,), name="callgate page", daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Frees the port and ends every connection; called once, in the server's own process."""
    self._http.shutdown()
    self._thread.join()
    self._http.server_close()
    self._http.hang_up()

  def forget(self) -> None:
    """In a fork's child: closes its copies of the parent's sockets."""
    self._http.forget()


class _Http(socketserver.ThreadingMixIn, socketserver.TCPServer):
  daemon_threads = True
  block_on_close = False
  allow_reuse_address = True
  request_queue_size = 16

  def __init__(self, port: int, secret: str, gets: Any, posts: Any, page: str) -> None:
    self.secret, self.gets, self.posts, self.page = secret, gets, posts, page
    self._lock = threading.Lock()
    self._open: set[Any] = set()
    self._strangers: dict[Any, float] = {}  # by connection: since when; the oldest first
    self._guests: set[Any] = set()
    super().__init__(("127.0.0.1", port), _PageRequest)

  def process_request(self, request: Any, client_address: Any) -> None:
    with self._lock:
      crowd = list(self._strangers)[: len(self._strangers) - _MOST_STRANGERS + 1]
      self._open.add(request)
      self._strangers[request] = time.monotonic()
    self._end_strangers(crowd)
    try:
      super().process_request(request, client_address)
    except BaseException:
      self._left(request)
      raise

  def process_request_thread(self, request: Any, client_address: Any) -> None:
    try:
      super().process_request_thread(request, client_address)
    finally:
      self._left(request)

  def admit(self, request: Any) -> None:
    """Gives a place to a connection with the secret. Raises RequestError if none is left."""
    with self._lock:
      if len(self._guests) >= _MOST_REQUESTS:
        raise RequestError(503, f"expected at most {_MOST_REQUESTS} requests at once, got more")
      if self._strangers.pop(request, None) is not None:
        self._guests.add(request)

  def service_actions(self) -> None:
    """Ends connections that send their head too slowly; called a few times a second."""
    late = time.monotonic() - _HEAD_SECONDS
    with self._lock:
      slow = [request for request, since in self._strangers.items() if since < late]
    self._end_strangers(slow)

  def _end_strangers(self, requests: Sequence[Any]) -> None:
    for request in requests:
      with self._lock:
        is_one = self._strangers.pop(request, None) is not None
      if is_one:
        with contextlib.suppress(OSError):
          request.shutdown(socket.SHUT_RDWR)

  def _left(self, request: Any) -> None:
    with self._lock:
      self._open.discard(request)
      self._guests.discard(request)
      self._strangers.pop(request, None)

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Ignores clients that went away, and reports errors of the server itself."""
    if not isinstance(sys.exception(), OSError):
      super().handle_error(request, client_address)

  def hang_up(self) -> None:
    """Ends all connections."""
    for request in list(self._open):
      with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)

  def forget(self) -> None:
    for one in (self.socket, *self._open):
      with contextlib.suppress(OSError):
        one.close()


class _PageRequest(http.server.BaseHTTPRequestHandler):
  """One request; each has a connection and a thread of its own."""

  server: _Http  # pyright: ignore[reportIncompatibleVariableOverride]
  timeout = _SECONDS
  server_version, sys_version = "callgate", ""

  def do_GET(self) -> None:
    self._serve(self._get)

  def do_POST(self) -> None:
    self._serve(self._post)

  def _serve(self, answer: Callable[[str, Query], tuple[str, bytes]]) -> None:
    try:
      path, query = self._admitted()
      kind, body = answer(path, query)
    except RequestError as error:
      self._send(error.status, "application/json", to_json({"error": str(error)}))
    except Exception as error:  # noqa: BLE001 - reported to the client
      text = f"{type(error).__name__}: {error}"
      self._send(500, "application/json", to_json({"error": text}))
    else:
      self._send(200, kind, body)

  # -- access ------------------------------------------------------------------------------------
  def _admitted(self) -> tuple[str, Query]:
    """Returns the path after the secret, and the query. Raises RequestError without the secret."""
    host, name = self.headers.get("Host", ""), None
    with contextlib.suppress(ValueError):  # without the port, which differs behind a tunnel
      name = urllib.parse.urlsplit(f"//{host}").hostname
    if name not in HOSTS:
      raise RequestError(403, f"expected a request for one of {', '.join(HOSTS)}, got {host!r}")
    origin = self.headers.get("Origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
      raise RequestError(403, f"expected a request from the page itself, got one from {origin!r}")
    parts = urllib.parse.urlsplit(self.path)
    secret, slash, path = parts.path.removeprefix("/").partition("/")
    given, expected = secret.encode(errors="replace"), self.server.secret.encode()
    if not hmac.compare_digest(given, expected):
      raise RequestError(403, "wrong secret: use the address that callgate printed")
    self.server.admit(self.request)
    if not slash:
      raise RequestError(404, "expected a slash at the end of the address")
    return path, urllib.parse.parse_qs(parts.query, keep_blank_values=True, max_num_fields=256)

  # -- answers -----------------------------------------------------------------------------------
  def _get(self, path: str, query: Query) -> tuple[str, bytes]:
    if not path or path in _FILES:
      file = Path(__file__).with_name(path or self.server.page)
      return f"{_TYPES[file.suffix]}; charset=utf-8", file.read_bytes()
    found = self.server.gets.get(path.removeprefix("api/")) if path.startswith("api/") else None
    if found is None:
      raise RequestError(404, f"expected a path of the page to get, got {path!r}")
    return "application/json", to_json(found(query))

  def _post(self, path: str, query: Query) -> tuple[str, bytes]:
    del query
    # A foreign page can't send this type unless the browser asks the server first.
    if self.headers.get_content_type() != "application/json":
      raise RequestError(415, "expected the content type application/json")
    length = self.headers.get("Content-Length", "")
    if not length.isascii() or not length.isdigit() or int(length) > _MOST_BYTES:
      raise RequestError(
        413, f"expected a Content-Length of at most {_MOST_BYTES} bytes, got {length!r}"
      )
    found = self.server.posts.get(path.removeprefix("api/")) if path.startswith("api/") else None
    if found is None:
      raise RequestError(404, f"expected a path of the page to post to, got {path!r}")
    try:
      sent = json.loads(self.rfile.read(int(length)))
    except (ValueError, RecursionError) as error:
      raise RequestError(400, f"expected JSON: {error}") from None
    if not isinstance(sent, dict):
      raise RequestError(400, f"expected a JSON object, got {type(sent).__name__}")
    return "application/json", to_json(found(sent))

  def _send(self, status: int, kind: str, body: bytes) -> None:
    self.send_response(status)
    for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": len(body)}.items():
      self.send_header(name, str(value))
    self.end_headers()
    self.wfile.write(body)

  def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
    """Answers a request that the protocol refuses, in JSON as all others."""
    del explain
    self.close_connection = True
    self._send(
      code, "application/json", to_json({"error": message or "expected a valid HTTP request"})
    )

  def log_message(self, format: str, *args: Any) -> None:
    """Requests aren't logged."""


def to_json(value: Any) -> bytes:
  """Returns JSON, which has no NaN: callers replace it by None or text."""
  return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
