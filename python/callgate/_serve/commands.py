# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate knobs`, `set` and `stop`: the controls of a program's page, in a terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import urllib.parse
from typing import Any

from callgate._core.terminal import Command, printable
from callgate._watch.server import HOSTS

_SECONDS = 10.0
_MOST_FILE = 4096  # the most bytes of a file with an address
_ADDRESS = "the address (callgate.serve(control=True).url), or the file of serve(file=)"


def command(name: str, parser: argparse.ArgumentParser) -> Command:
  add = parser.add_argument
  add("address", metavar="ADDRESS", help=_ADDRESS)
  if name == "knobs":
    add("--json", action="store_true", help="print one JSON object per line")
    return _knobs
  if name == "set":
    add(
      "values", metavar="NAME=VALUE", nargs="+", type=_assignment, help="a knob and its new value"
    )
    return _set
  add("reason", nargs="?", default="stopped from the command line",
      help="the reason, which callgate.stop_reason() returns")  # fmt: skip
  return _stop


def _assignment(text: str) -> tuple[str, str]:
  name, equals, value = text.rpartition("=")
  if equals and name and value:
    return name, value
  raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")


def _knobs(arguments: argparse.Namespace) -> int:
  for knob in _ask(arguments.address, "GET", "knobs")["knobs"]:
    print(json.dumps(knob) if arguments.json else printable(_line(knob)))
  return 0


def _set(arguments: argparse.Namespace) -> int:
  names = [name for name, _ in arguments.values]
  if twice := next((name for name in names if names.count(name) > 1), None):
    raise ValueError(f"expected each name once, got {twice!r} twice")
  for knob in _ask(arguments.address, "POST", "knobs", dict(arguments.values))["knobs"]:
    print(printable(f"{knob['name']} = {knob['value']}"))
  return 0


def _stop(arguments: argparse.Namespace) -> int:
  answer = _ask(arguments.address, "POST", "stop", {"reason": arguments.reason})
  print(printable(f"asked to stop: {answer['stop_reason']}"))
  return 0


def _line(knob: dict[str, Any]) -> str:
  ends = knob["range"]
  limits = "" if ends is None else f", {ends[0]} to {ends[1]}"
  scale = ", log" if knob["scale"] == "log" else ""
  return f"{knob['name']} = {knob['value']} ({knob['dtype']}{limits}{scale})"


def _ask(address: str, method: str, name: str, sent: Any = None) -> dict[str, Any]:
  """Sends one request. Raises OSError if there is no answer, ValueError if the program refuses."""
  url = urllib.parse.urlsplit(_read(address))
  try:
    port = url.port
  except ValueError:
    port = None
  if url.scheme != "http" or url.hostname not in HOSTS or port is None or len(url.path) < 2:
    expected = "expected an address such as http://127.0.0.1:PORT/TOKEN/, or a file with one"
    raise ValueError(f"{expected}, got {address!r}")
  where = f"{url.hostname}:{port}"
  # Not by urllib, which would use a proxy.
  connection = http.client.HTTPConnection(url.hostname, port, timeout=_SECONDS)
  try:
    headers = {"Content-Type": "application/json"} if sent is not None else {}
    body = None if sent is None else json.dumps(sent)
    connection.request(method, f"{url.path.rstrip('/')}/api/{name}", body, headers)
    answer = connection.getresponse()
    said = answer.read()
  except TimeoutError:
    raise TimeoutError(f"{where}: no answer in {_SECONDS:g} seconds") from None
  except ConnectionRefusedError:
    raise ConnectionRefusedError(
      f"{where}: the connection was refused: has the program ended?"
    ) from None
  except (OSError, http.client.HTTPException) as error:
    raise OSError(f"{where}: {error or type(error).__name__}") from error
  finally:
    connection.close()
  try:
    value = json.loads(said)
  except ValueError:
    raise ValueError(f"{where}: expected a page by callgate, got {said[:60]!r}") from None
  if answer.status != 200:
    raise ValueError(f"{where}: {value.get('error', answer.reason)}")
  return value


def _read(address: str) -> str:
  """Returns the address, or the address in the file of that name."""
  if re.match(r"[a-z]+://", address):
    return address
  with open(address, encoding="utf-8", errors="replace") as file:
    return file.read(_MOST_FILE).strip()
