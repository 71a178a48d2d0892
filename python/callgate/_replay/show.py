# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate show`: prints a recording's calls, or the differences of two recordings."""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import sys
from collections.abc import Iterator, Sequence

from callgate._core.errors import ReplayError
from callgate._core.terminal import Command, printable
from callgate._replay import calls, differ, static
from callgate._replay.answers import place_of
from callgate._replay.calls import Recorded
from callgate._replay.replay import read_recording


def command(name: str, parser: argparse.ArgumentParser) -> Command:
  """Adds `show`, which prints a recording's calls, or the first difference of two recordings."""
  del name
  parser.add_argument("recording", metavar="PATH", help="a file of callgate.record")
  parser.add_argument(
    "--diff", metavar="OTHER",
    help="print the first difference to another recording and the number of differing calls; "
    "exit status: 0 equal, 1 different, 2 unreadable file",
  )  # fmt: skip
  return _show


def _show(arguments: argparse.Namespace) -> int:
  if arguments.diff is None:
    for line in _table(_sorted(arguments.recording)):
      print(printable(line))
    return 0
  try:
    one, other = _sorted(arguments.recording), _sorted(arguments.diff)
  except (ReplayError, OSError) as error:
    print(printable(str(error)), file=sys.stderr)
    return 2
  differences = list(_differences(one, other))
  if not differences:
    print(f"equal: {_counted(len(one))}")
    return 0
  print(printable(differences[0]))
  total = max(len(one), len(other), len(differences))
  print(f"{len(differences)} of {_counted(total)} differ{'s' * (len(differences) == 1)}")
  return 1


def _sorted(path: str) -> list[Recorded]:
  return sorted(read_recording("show", path), key=lambda call: call.number)


def _counted(count: int) -> str:
  return f"{count} call{'s' * (count != 1)}"


# -- a recording -----------------------------------------------------------------------------------
def _table(recorded: Sequence[Recorded]) -> Iterator[str]:
  """Yields a line for each call, in columns."""
  head = ("call", "gate", "operands", "results", "time", "effect")
  rows = [head, *((str(call.number), *_cells(call)) for call in recorded)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    yield "  ".join(map(str.ljust, row, widths)).rstrip()
  yield _counted(len(recorded))


def _cells(call: Recorded) -> tuple[str, ...]:
  names = (name.replace("'", "") for name in call.all_names)
  given = [f": {calls.text_of(type)}" for type in call.types]
  given += [f"={static.text_of(code)}" for _, code in call.static]
  operands = ", ".join(map("".join, zip(names, given, strict=True)))
  moment = datetime.datetime.fromtimestamp(call.time_ns // 10**9)
  clock = f"{moment:%H:%M:%S}.{call.time_ns % 10**9 // 10**6:03d}"
  gate = call.gate + (f" lane {call.lane}" if call.lane else "")
  gate += f" device {call.device}" if call.device > 0 else ""
  return gate, f"({operands})", _results_text(call), clock, "wait" if call.waits else call.effect


def _results_text(call: Recorded) -> str:
  if call.results is None:
    return f"raised {_raised(call)[0]}"
  return "(" + ", ".join(calls.text_of((code, shape)) for code, shape, _ in call.results) + ")"


def _raised(call: Recorded) -> tuple[str, str]:
  """Returns the class of a recorded exception, and its text."""
  try:
    held = json.loads(call.error)
    return str(held["kind"]), str(held["said"])
  except (ValueError, LookupError, TypeError):
    return "an exception", call.error[:80]


# -- two recordings --------------------------------------------------------------------------------
def _differences(one: Sequence[Recorded], other: Sequence[Recorded]) -> Iterator[str]:
  """Yields the differences, in the order of the first recording.

  Calls of a gate are compared in their order on each device and lane, because XLA runs the calls of
  several gates, devices and lanes in any order.
  """
  others = collections.defaultdict[object, collections.deque[Recorded]](collections.deque)
  for call in other:
    others[_group(call)].append(call)
  for call in one:
    head, group = f"call {call.number} of '{call.gate}': ", others[_group(call)]
    if not group:
      yield f"{head}expected this call in the other recording, got no more calls of the gate"
    elif found := _difference(call, group.popleft()):
      yield head + found
  left = sorted((call for group in others.values() for call in group), key=lambda it: it.number)
  for call in left:
    yield (
      f"call {call.number} of '{call.gate}' in the other recording: expected no more calls, "
      "got this one"
    )


def _group(call: Recorded) -> object:
  return call.gate, call.waits, place_of(call)._replace(site="")


def _difference(call: Recorded, other: Recorded) -> str:
  """Returns the first difference of two calls; "" if they are equal."""
  if call.operands is None or other.operands is None:
    call, other = call.digested(), other.digested()
  if (call.types, call.equality) != (other.types, other.equality):
    return differ.difference(call, other)
  if call.results is None or other.results is None:
    if call.results is None and other.results is None and _raised(call) == _raised(other):
      return ""
    return f"expected {_outcome(call)}, got {_outcome(other)}"
  return differ.of_results(call.results, other.results)


def _outcome(call: Recorded) -> str:
  if call.results is not None:
    return f"results {_results_text(call)}"
  return "{}: {}".format(*_raised(call))
