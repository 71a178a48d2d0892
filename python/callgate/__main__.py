# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate COMMAND`: streams, programs and builds from a terminal."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from callgate._core.errors import GateDefinitionError
from callgate._core.terminal import printable

# Each command's help, and its module, which is loaded when the command runs. The module's
# `command(name, parser)` adds the command's arguments to the parser and returns the function that
# runs the command.
COMMANDS: dict[str, tuple[str, str]] = {
  "tail": ("print the last records of a stream, and follow it", "callgate._stream.tail"),
  "show": ("print a recording's calls, or how it differs from another", "callgate._replay.show"),
  "watch": ("serve a live page of streams, on loopback", "callgate._watch.cli"),
  "knobs": ("list a program's knobs", "callgate._serve.commands"),
  "set": ("set knobs of a program", "callgate._serve.commands"),
  "stop": ("ask a program's loops to stop", "callgate._serve.commands"),
  "attach": ("debug a program that waits at a breakpoint", "callgate._breakpoint.attach"),
  "include-dir": (
    "print the folder that holds callgate/kernel.h", "callgate._build.toolchain"
  ),
  "cmake-dir": (
    "print the folder where CMake finds callgate (callgate_DIR)", "callgate._build.toolchain"
  ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status.

  Args:
    arguments: the arguments of the command line. Default: the process's own.

  Returns:
    0, 1 after an error, 130 after an interrupt.
  """
  parser = argparse.ArgumentParser(
    prog="python -m callgate",
    description="Streams of tapped values, programs that run, and builds of kernels",
  )
  given = list(sys.argv[1:] if arguments is None else arguments)
  called = next((one for one in given if not one.startswith("-")), None)
  subparsers = parser.add_subparsers(dest="command", required=True)
  for name, (text, module) in COMMANDS.items():
    command = subparsers.add_parser(name, help=text)
    if name == called:
      command.set_defaults(run=importlib.import_module(module).command(name, command))
  parsed, rest = parser.parse_known_args(given)
  if rest:  # argparse accepts no paths after an option
    if "where" not in parsed or any(one.startswith("-") for one in rest):
      parser.error(f"unrecognized arguments: {' '.join(rest)}")
    parsed.where += rest
  try:
    return parsed.run(parsed)
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # such as `| head`; Python's flush at exit has no reader, too
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except (OSError, ValueError, GateDefinitionError) as error:
    print(f"{parser.prog} {parsed.command}: {printable(str(error))}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main())
