# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate watch`: serves a live page of streams on loopback, by Bokeh.

It reads streams as any other reader does: the program that writes them serves nothing for it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import webbrowser
from typing import TYPE_CHECKING, Any

from callgate._core import extras
from callgate._core.errors import GateDefinitionError
from callgate._stream.tail import integer
from callgate._watch.feed import Feed
from callgate._watch.model import Model

if TYPE_CHECKING:
  from callgate._stream.tail import Subparsers

_PERIOD_MS = 400  # between two looks at the model


def add_watch(subparsers: Subparsers) -> None:
  parser = subparsers.add_parser("watch", help="serve a live page of a stream, on loopback")
  add = parser.add_argument
  add("where", metavar="PATH_OR_ADDRESS", nargs="+", help="a file, unix:PATH or tcp://HOST:PORT")
  add("--port", type=integer("a port from 0 to 65535", most=65535), default=5007, metavar="N",
      help="port of the page; 0 is any free one (default: 5007)")  # fmt: skip
  add("--points", type=integer("2 points or more", least=2), default=1000, metavar="N",
      help="points a curve is drawn with, at most (default: 1000)")  # fmt: skip
  add("--plots", type=integer("1 plot or more", least=1), default=12, metavar="N",
      help="plots to begin with, at most (default: 12)")  # fmt: skip
  add("--wait", action="store_true", help="wait for files and addresses that are not there yet")
  add("--no-browser", action="store_true", help="open no browser")
  parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
  """Serves the page until an interrupt or SIGTERM; returns the exit status, 1 without Bokeh."""
  try:
    extras.library("bokeh.server.server", "Bokeh", "watch", by="python -m callgate watch:")
  except GateDefinitionError as error:
    print(error, file=sys.stderr)
    return 1
  model = Model(arguments.points)
  feeds = [Feed(where, model, index) for index, where in enumerate(arguments.where)]
  for start in (Feed.start,) if arguments.wait else (Feed.connect, Feed.start):
    for feed in feeds:
      start(feed)
  try:
    asyncio.run(_serve(model, feeds, arguments))
  finally:
    for feed in feeds:
      feed.stop()
  return 0


async def _serve(model: Model, feeds: list[Feed], arguments: argparse.Namespace) -> None:
  server, port = make_server(model, feeds, port=arguments.port, plots=arguments.plots)
  server.start()
  ended = asyncio.Event()
  asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
  logging.getLogger("bokeh.server.views.ws").setLevel(logging.ERROR)  # a closed tab is no news
  address = f"http://127.0.0.1:{port}/"
  print(f"callgate watch: {address} (Ctrl-C ends it)", flush=True)
  # A browser that would be a window: not one in the terminal that shows the address.
  displays = map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
  if not arguments.no_browser and (sys.platform == "darwin" or any(displays)):
    webbrowser.open(address)
  try:
    await ended.wait()
  finally:
    server.stop()


def make_server(model: Model, feeds: list[Feed], *, port: int, plots: int) -> tuple[Any, int]:
  """A Bokeh server on loopback, not started, and its port: `port`, or any free one for 0."""
  from bokeh.application import Application
  from bokeh.application.handlers.function import FunctionHandler
  from bokeh.server.server import BaseServer
  from tornado.httpserver import HTTPServer
  from tornado.ioloop import IOLoop

  from callgate._watch.guard import HOSTS, GuardedTornado
  from callgate._watch.page import Page

  def fill(document: Any) -> None:
    shown = Page(document, model, lambda: [f"{one.where}: {one.state}" for one in feeds], plots)
    document.add_periodic_callback(shown.update, _PERIOD_MS)

  try:
    listener = socket.create_server(("127.0.0.1", port))
  except OSError as error:
    raise OSError(f"port {port} of 127.0.0.1: {error.strerror}: choose another --port") from error
  listener.setblocking(False)
  port = listener.getsockname()[1]
  # Pages of other servers, on this machine too, must not talk to this one.
  origins = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in HOSTS]
  page = {"/": Application(FunctionHandler(fill))}
  http = HTTPServer(tornado := GuardedTornado(page, extra_websocket_origins=origins))
  http.add_sockets([listener])
  return BaseServer(IOLoop.current(), tornado, http), port
