# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate COMMAND`: streams, running programs and builds, from a terminal."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from callgate._core.errors import GateDefinitionError
from callgate._core.terminal import printable

# Each command's help and module. The module is imported when the command is called; its
# `command(name, parser)` adds the command's arguments and returns the function that runs it.
COMMANDS: dict[str, tuple[str, str]] = {
  "tail": ("print the last records of a stream, and follow new ones", "callgate._stream.tail"),
  "show": ("print the calls of a recording, or compare two recordings", "callgate._replay.show"),
  "watch": ("serve a live dashboard of streams and runs on this machine", "callgate._watch.cli"),
  "knobs": ("list the knobs of a running program", "callgate._serve.commands"),
  "set": ("set knobs of a running program", "callgate._serve.commands"),
  "stop": ("ask the loops of a running program to stop", "callgate._serve.commands"),
  "attach": ("debug a program that waits at a breakpoint", "callgate._breakpoint.attach"),
  "include-dir": (
    "print the include folder of callgate/kernel.h", "callgate._build.toolchain"
  ),
  "cmake-dir": (
    "print the folder for CMake's callgate_DIR", "callgate._build.toolchain"
  ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status.

  Args:
    arguments: the command line without the program's name; None for `sys.argv[1:]`.

  Returns:
    0; 1 after an error; 130 after Ctrl-C.
  """
  parser = argparse.ArgumentParser(
    prog="python -m callgate",
    description="Read streams, control running programs, and build kernels.",
  )
  given = list(sys.argv[1:] if arguments is None else arguments)
  called = next((one for one in given if not one.startswith("-")), None)
  subparsers = parser.add_subparsers(dest="command", required=True)
  for name, (text, module) in COMMANDS.items():
    description = f"{text[0].upper()}{text[1:]}."
    command = subparsers.add_parser(name, help=text, description=description)
    if name == called:
      command.set_defaults(run=importlib.import_module(module).command(name, command))
  parsed, rest = parser.parse_known_args(given)
  if rest:  # argparse accepts no further paths after an option
    if "where" not in parsed or any(one.startswith("-") for one in rest):
      parser.error(f"unrecognized arguments: {' '.join(rest)}")
    parsed.where += rest
  try:
    return parsed.run(parsed)
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # as with `| head`: no reader is left for the rest of the output
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except (OSError, ValueError, GateDefinitionError) as error:
    print(f"{parser.prog} {parsed.command}: {printable(str(error))}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main())
