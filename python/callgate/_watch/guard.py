# SPDX-License-Identifier: Apache-2.0
"""Decides who gets the live page, and what it may do in a browser.

The page's server listens on loopback, which keeps other machines out and no web page: one of
somebody else's can have its own name resolved to 127.0.0.1. So a request has to name this machine
(`Host`). The page may load and run what its Content-Security-Policy says: the server's own scripts,
and the one in the page that starts them, by a number that nobody can guess.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import urllib.parse
from typing import Any

from bokeh.server.tornado import BokehTornado
from bokeh.server.views.doc_handler import DocHandler
from bokeh.server.views.static_handler import StaticHandler
from bokeh.server.views.ws import WSHandler
from tornado.httputil import HTTPServerRequest
from tornado.web import RequestHandler

HOSTS = ("localhost", "127.0.0.1", "::1")
_SERVED = (DocHandler, StaticHandler, WSHandler)  # Bokeh would let other pages embed this one, too
_NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
  "Content-Security-Policy": _NOTHING,
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Resource-Policy": "same-origin",
  "Referrer-Policy": "no-referrer",
  "X-Content-Type-Options": "nosniff",
}


class GuardedTornado(BokehTornado):
  """Bokeh's application for those who ask for this machine by its own name."""

  def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
    host = None
    with contextlib.suppress(ValueError):  # without the port: behind a tunnel that is another one
      host = urllib.parse.urlsplit(f"//{request.headers.get('Host', '')}").hostname
    if host not in HOSTS:
      return self.get_handler_delegate(request, _Refusal, {"status": 403})
    found = super().find_handler(request, **kwargs)
    if not issubclass(found.handler_class, _SERVED):
      return self.get_handler_delegate(request, _Refusal, {"status": 404})
    found.handler_class = _guarded(found.handler_class)
    return found


def policy(nonce: str, host: str) -> str:
  """The Content-Security-Policy of the page, whose socket is at the host it was asked for by."""
  allowed = {
    "script-src": f"'nonce-{nonce}' 'self'",
    "style-src": "'self' 'unsafe-inline'",  # Bokeh's views make style elements
    "img-src": "'self' data: blob:",  # icons
    "font-src": "'self' data:",
    "connect-src": "'self'" + ("" if "[" in host else f" ws://{host}"),  # older browsers
  }
  return "; ".join([_NOTHING, *(f"{kind} {sources}" for kind, sources in allowed.items())])


class _Guarded(RequestHandler):
  def set_default_headers(self) -> None:
    for name, value in _HEADERS.items():
      self.set_header(name, value)


class _Refusal(_Guarded):
  """The answer to whoever asks for another machine, or for something else."""

  def initialize(self, status: int) -> None:
    self._status = status

  def prepare(self) -> None:
    if self._status == 404:
      self.send_error(404)
    else:
      self.set_status(403)
      self.set_header("Content-Type", "text/plain")
      self.finish(f"callgate watch: expected a request for one of {', '.join(HOSTS)}\n")


class _Page(_Guarded):
  """Bokeh's handler of the page: puts the number into its scripts."""

  def prepare(self) -> None:
    self._nonce = secrets.token_urlsafe(16)
    self.set_header("Content-Security-Policy", policy(self._nonce, self.request.host))

  def write(self, chunk: Any) -> None:
    # Bokeh makes the page before it knows of any stream: all scripts in it are Bokeh's.
    if isinstance(chunk, str):
      chunk = chunk.replace("<script", f'<script nonce="{self._nonce}"')
    super().write(chunk)


@functools.cache
def _guarded(handler: type[Any]) -> type[Any]:
  first = _Page if issubclass(handler, DocHandler) else _Guarded
  return type(handler.__name__, (first, handler), {})
