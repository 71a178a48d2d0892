# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate attach`: a terminal for a breakpoint of a process without a terminal.

The process listens at a Unix socket in a folder that only its user may enter. Text goes both ways,
as through a terminal.
"""

from __future__ import annotations

import argparse
import array
import codecs
import contextlib
import fcntl
import os
import select
import socket
import stat
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

from callgate import _callgate
from callgate._core import kept
from callgate._core.terminal import Command


def folder() -> Path:
  """Returns the folder of sockets: `$XDG_RUNTIME_DIR/callgate`, or one in the temporary folder.

  Raises:
    OSError: another user owns the folder, or may write to it.
  """
  home = os.environ.get("XDG_RUNTIME_DIR")
  # The system creates that folder when a user logs in.
  path = Path(tempfile.gettempdir()) / f"callgate-{os.getuid()}"
  if home and os.path.isdir(home):
    path = Path(home) / "callgate"
  with contextlib.suppress(FileExistsError):
    path.mkdir(mode=0o700)
  about = path.lstat()
  if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
    raise OSError(
      f"{path}: expected a folder that only this user can enter, got one with "
      "another owner or mode; remove it"
    )
  return path


# Pipes on stdin through which debuggers got input. Guarded by session._one_at_a_time; never
# emptied: the numbers of pipes, which are few.
taken: set[int] = set()


@contextlib.contextmanager
def waiting(stdin: int | None) -> Generator[tuple[IO[str], IO[str], socket.socket] | None]:
  """Waits for `python -m callgate attach`; yields files of its user's input and output.

  If `stdin` is the number of a pipe and the pipe gets input before, it yields None.
  """
  path = folder() / f"{os.getpid()}.sock"
  with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listening:
    unheard = path.with_suffix(".new")  # a socket refuses connections before it listens
    unheard.unlink(missing_ok=True)  # left by an earlier process of the same number
    listening.bind(str(unheard))
    listening.listen(1)
    unheard.replace(path)
    try:
      how = "" if stdin is None else "write pdb's commands to its stdin, or "
      print(
        "callgate: the program waits at a breakpoint, until pdb gets c (continue) or q (quit)\n"
        f"callgate: {how}run on this machine: python -m callgate attach {os.getpid()}",
        file=sys.stderr, flush=True,
      )  # fmt: skip
      connection = _first(listening, stdin)
    finally:
      path.unlink(missing_ok=True)
  if connection is None:
    taken.add(stdin or 0)
    yield None
    return
  with connection:
    # A file for both would drop the lines that it has read ahead when it writes.
    typed = connection.makefile("r", encoding="utf-8", errors="replace")
    shown = connection.makefile("w", encoding="utf-8", errors="replace")
    try:
      yield typed, shown, connection
    finally:
      typed.close()
      with contextlib.suppress(OSError):  # the reader may be gone
        shown.close()


def has_hung_up(connection: socket.socket) -> bool:
  """Returns True if the other end is closed; after Ctrl-D it still reads."""
  look = select.poll()
  look.register(connection, 0)  # poll always reports a hang-up
  return bool(look.poll(0))


def _first(listening: socket.socket, stdin: int | None) -> socket.socket | None:
  """Returns the first connection, or None for stdin. Ctrl-C ends the wait on any thread."""
  sources: list[Any] = [listening] if stdin is None else [listening, stdin]
  interrupted = _interrupts()
  while not interrupted():
    ready, _, _ = select.select(sources, [], [], 0.2)
    if listening in ready:
      return listening.accept()[0]
    if stdin is not None and stdin in ready:
      count = array.array("i", [0])
      fcntl.ioctl(stdin, termios.FIONREAD, count)
      if count[0]:
        return None
      sources.remove(stdin)  # its other end is closed
  raise kept.mark_raised(KeyboardInterrupt())


def _interrupts() -> Callable[[], bool]:
  """Returns a function that is True after a new Ctrl-C; the runtime reports one for a second."""
  earlier, end = _callgate.interrupted_recently(), time.monotonic() + 1

  def interrupted() -> bool:
    nonlocal earlier
    recently = _callgate.interrupted_recently()
    earlier = earlier and recently and time.monotonic() < end
    return recently and not earlier

  return interrupted


def command(name: str, parser: argparse.ArgumentParser) -> Command:
  del name
  parser.add_argument(
    "process", nargs="?", type=int, help="the process ID; default: the one process that waits"
  )
  return _attach


def _attach(arguments: argparse.Namespace) -> int:
  waiting_ones = sorted(folder().glob("*.sock"))
  if arguments.process is not None:
    path = folder() / f"{arguments.process}.sock"
  elif len(waiting_ones) == 1:
    path = waiting_ones[0]
  else:
    numbers = ", ".join(one.stem for one in waiting_ones)
    which = f"several: {numbers}; pass the number of one" if waiting_ones else "none"
    raise ValueError(f"expected one program that waits at a breakpoint, got {which}")
  with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
    try:
      connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError) as error:
      path.unlink(missing_ok=True)
      what = f"process {path.stem} doesn't wait at a breakpoint"
      raise ValueError(
        f"expected a program that waits at a breakpoint, got none: {what}"
      ) from error
    return _talk(connection)


def _talk(connection: socket.socket) -> int:
  """Sends stdin, and shows the answers, until the program continues."""
  stdin = sys.stdin.fileno()  # select doesn't see lines in the buffer of `sys.stdin`
  sources: list[Any] = [connection, stdin]
  decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a character may come in parts
  while True:
    ready, _, _ = select.select(sources, [], [])
    if connection in ready:
      try:
        came = connection.recv(1 << 16)
      except ConnectionResetError:  # the program continued before it read all lines
        return 0
      if not came:
        return 0
      sys.stdout.write(decode(came))
      sys.stdout.flush()
    if stdin in ready:
      typed = os.read(stdin, 1 << 12)
      try:
        if typed:
          connection.sendall(typed)
          continue
        connection.shutdown(socket.SHUT_WR)  # end of input: pdb reads it as `q`
      except (BrokenPipeError, ConnectionResetError):  # the last answers may still come
        pass
      sources.remove(stdin)
