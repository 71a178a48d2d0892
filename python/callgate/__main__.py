# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate COMMAND`: streams, programs and builds from a terminal.

A command is a module-level function that `_COMMANDS` names: it gets the argparse subparsers, adds
its own parser, and sets `run`, which gets the parsed arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from callgate._breakpoint.attach import add_attach
from callgate._build import toolchain
from callgate._core.errors import GateDefinitionError
from callgate._serve.commands import add_control
from callgate._stream.tail import add_tail, printable
from callgate._watch.cli import add_watch

if TYPE_CHECKING:
  Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]


def add_folders(subparsers: Subparsers) -> None:
  """Adds `include-dir` and `cmake-dir`: where a build of kernels finds callgate."""
  folders = {
    "include-dir": (toolchain.include_dir, "print the folder that holds callgate/kernel.h"),
    "cmake-dir": (
      toolchain.cmake_dir,
      "print the folder where CMake finds callgate (callgate_DIR)",
    ),
  }
  for name, (folder, text) in folders.items():
    parser = subparsers.add_parser(name, help=text)
    parser.set_defaults(run=_print_folder, folder=folder)


_COMMANDS: tuple[Callable[[Any], None], ...] = (
  add_tail,
  add_watch,
  add_control,
  add_attach,
  add_folders,
)


def _print_folder(arguments: argparse.Namespace) -> int:
  print(arguments.folder())
  return 0


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status.

  Args:
    arguments: those of the command line; None for the process's own.

  Returns:
    0, 1 after an error, 130 after an interrupt.
  """
  parser = argparse.ArgumentParser(
    prog="python -m callgate",
    description="Streams of tapped values, programs that run, and builds of kernels",
  )
  subparsers = parser.add_subparsers(dest="command", required=True)
  for add in _COMMANDS:
    add(subparsers)
  parsed, rest = parser.parse_known_args(arguments)
  if rest:  # argparse takes no more paths after an option
    if "where" not in parsed or any(one.startswith("-") for one in rest):
      parser.error(f"unrecognized arguments: {' '.join(rest)}")
    parsed.where += rest
  try:
    return parsed.run(parsed)
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # as of `| head`; what Python would flush at exit has no reader either
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except (OSError, ValueError, GateDefinitionError) as error:
    print(f"{parser.prog} {parsed.command}: {printable(str(error))}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main())
