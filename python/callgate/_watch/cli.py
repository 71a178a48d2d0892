# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate watch`: serves a live page of streams or runs, on the loopback interface.

It reads streams as any other reader does, so the program that writes them serves nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Sequence
from typing import Any

from callgate._core.terminal import Command, integer
from callgate._stream.reader import is_address
from callgate._watch.answers import PageAnswers
from callgate._watch.feed import Follower
from callgate._watch.model import Model
from callgate._watch.runs import RunsFollower
from callgate._watch.runs_answers import RunsAnswers
from callgate._watch.server import PageServer


def command(name: str, parser: argparse.ArgumentParser) -> Command:
  del name
  add = parser.add_argument
  add("where", metavar="PATH_OR_ADDRESS", nargs="+",
      help="a stream (a file, a glob pattern, unix:PATH or tcp://HOST:PORT)"
           " or a folder of runs")  # fmt: skip
  add("--port", type=integer("a port from 0 to 65535", most=65535), default=5007, metavar="N",
      help="the port of the dashboard; 0 for any free port (default: 5007)")  # fmt: skip
  add("--points", type=integer("2 to 20000 points", least=2, most=20_000), default=1000,
      metavar="N", help="the maximum number of points per curve (default: 1000)")  # fmt: skip
  add("--plots", type=integer("1 plot or more", least=1), default=12, metavar="N",
      help="the maximum number of initial plots (default: 12)")  # fmt: skip
  add("--wait", action="store_true", help="wait for files and addresses that don't exist yet")
  add("--no-browser", action="store_true", help="don't open a browser")
  return _watch


def _watch(arguments: argparse.Namespace) -> int:
  """Serves the page until an interrupt or SIGTERM; returns the exit status."""
  folders = [one for one in arguments.where if not is_address(one) and os.path.isdir(one)]
  if folders and len(folders) < len(arguments.where):
    other = next(one for one in arguments.where if one not in folders)
    raise ValueError(
      f"where: expected only folders of runs, or only streams, got {folders[0]!r} and {other!r}"
    )
  return _watch_runs(arguments) if folders else _watch_streams(arguments)


def _watch_runs(arguments: argparse.Namespace) -> int:
  runs = RunsFollower(arguments.where)
  runs.start()
  try:
    answers = RunsAnswers(runs, points=arguments.points, plots=arguments.plots)
    server = PageServer(
      answers.gets(), {}, port=arguments.port, option="--port", page="runs.html"
    )  # fmt: skip
    try:
      _show_until_ended(server.url, browser=not arguments.no_browser)
    finally:
      server.close()
  finally:
    runs.stop()
  return 0


def _watch_streams(arguments: argparse.Namespace) -> int:
  model = Model(runs=names_of(arguments.where))
  feeds = [Follower(where, model, index) for index, where in enumerate(arguments.where)]
  for start in (Follower.start,) if arguments.wait else (Follower.connect, Follower.start):
    for feed in feeds:
      start(feed)
  try:
    answers = PageAnswers(
      model,
      lambda: [f"{one.where}: {one.state}" for one in feeds],
      plots=arguments.plots,
      points=arguments.points,
    )
    server = PageServer(answers.gets(), {}, port=arguments.port, option="--port")
    try:
      _show_until_ended(server.url, browser=not arguments.no_browser)
    finally:
      server.close()
  finally:
    for feed in feeds:
      feed.stop()
  return 0


def names_of(where: Sequence[str]) -> list[str]:
  """Returns short names of runs: the last parts of their paths that differ."""
  short = [one if is_address(one) else os.path.basename(one) for one in where]
  return short if len({*short}) == len(short) and all(short) else list(where)


class _Terminated(BaseException):
  """SIGTERM has come."""


def _show_until_ended(url: str, *, browser: bool) -> None:
  def end(number: int, frame: Any) -> None:
    raise _Terminated

  before = signal.signal(signal.SIGTERM, end)
  try:
    print(f"callgate watch: {url} (Ctrl-C ends it)", flush=True)
    # Only a browser in a window, not one in the terminal that shows the address.
    displays = map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
    if browser and (sys.platform == "darwin" or any(displays)):
      webbrowser.open(url)
    ended = threading.Event()
    while not ended.wait(1):  # Python handles a signal only after a wait that began just after it
      pass
  except _Terminated:
    pass
  finally:
    signal.signal(signal.SIGTERM, before)
