# SPDX-License-Identifier: Apache-2.0
"""New processes with Python in them, for tests of exits, signals, forks, caches and first imports.

`start` and `run` are as subprocess.Popen and subprocess.run of `python -c SOURCE`, `python SCRIPT`
or `python -m MODULE`. The process is forked off a template that has imported JAX, once for each
process of tests (template.py), where nothing tells it from a new interpreter. It is a new
interpreter where something does: what an interpreter or the loader read from the environment when
they start, a test of what an import does, no Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

import stray_output

FOLDER = pathlib.Path(__file__).parent  # of what the tests share

_PR_SET_CHILD_SUBREAPER = 36
# Prefixes of variables that count when a process starts. The template hands on the one below, and
# JAX's, which are options by other names.
_AT_START = ("PYTHON", "LD_", "MALLOC", "OMP_", "OPENBLAS", "GLIBC")
_LATER = ("PYTHONPATH",)


@dataclasses.dataclass
class Interpreter:
  """A process of the template, with the methods of subprocess.Popen that tests use."""

  pid: int
  stdout: IO[str] | None
  stderr: IO[str] | None
  returncode: int | None = None

  def poll(self) -> int | None:
    """Its exit status, negative for a signal; None while it runs."""
    if self.returncode is None:
      pid, status = os.waitpid(self.pid, os.WNOHANG)
      self.returncode = os.waitstatus_to_exitcode(status) if pid else None
    return self.returncode

  def wait(self, timeout: float | None = None) -> int:
    """Waits for its end; subprocess.TimeoutExpired after `timeout` seconds."""
    end = None if timeout is None else time.monotonic() + timeout
    pause = 0.0005
    while (status := self.poll()) is None:
      if end is not None and time.monotonic() > end:
        raise subprocess.TimeoutExpired(f"interpreter {self.pid}", timeout or 0)
      time.sleep(pause)
      pause = min(2 * pause, 0.02)
    return status

  def communicate(self, timeout: float | None = None) -> tuple[str, str]:
    """The rest of its outputs and its end; killed after `timeout` seconds, with what it said."""
    texts = ["", ""]

    def read(index: int, stream: IO[str]) -> None:
      texts[index] = stream.read()

    outputs = enumerate((self.stdout, self.stderr))
    pairs = [(i, stream) for i, stream in outputs if stream and not stream.closed]
    readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in pairs]
    for reader in readers:
      reader.start()
    end = None if timeout is None else time.monotonic() + timeout
    left = lambda: None if end is None else max(0.0, end - time.monotonic())
    for reader in readers:
      reader.join(left())
    try:
      self.wait(left())
    except subprocess.TimeoutExpired:
      self.kill()
      self.wait()
      raise subprocess.TimeoutExpired(f"interpreter {self.pid}", timeout or 0, *texts) from None
    for _, stream in pairs:
      stream.close()
    return texts[0], texts[1]

  def send_signal(self, number: int) -> None:
    """Sends a signal, where it still runs."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    """Ends it at once, where it still runs."""
    self.send_signal(signal.SIGKILL)


Process = Interpreter | subprocess.Popen[str]


@dataclasses.dataclass(frozen=True)
class Module:
  """A module that runs as a program."""

  name: str


def start(
  program: str | pathlib.Path | Module,
  *arguments: Any,
  environment: Mapping[str, str] | None = None,
  cwd: str | pathlib.Path | None = None,
  stdout: IO[bytes] | int = subprocess.PIPE,
  stderr: IO[bytes] | int = subprocess.PIPE,
  errors: bool = False,
  new_session: bool = False,
  new: bool = False,
  preload: str = "",
) -> Process:
  """Starts a program; its outputs are text.

  Args:
    program: Python source, which is dedented; a script's path; a module.
    *arguments: the program's.
    environment: variables beside those of this process. XLA gets the flags of quick_xla, too.
    cwd: its folder; this process's where None.
    stdout: subprocess.PIPE, or a file.
    stderr: likewise, or subprocess.STDOUT.
    errors: whether warnings are errors.
    new_session: whether it leads a session and a group of processes.
    new: whether the interpreter must be a new one: for tests of what imports do.
    preload: a module that the template has imported, too, in the name of the program.
  """
  import quick_xla  # and pytest, which a process that imports this file does without

  variables = quick_xla.of_process({**os.environ, **(environment or {})})
  words = [str(word) for word in arguments]
  if isinstance(program, Module):
    kind, text = "module", program.name
  elif isinstance(program, pathlib.Path):
    kind, text = "script", str(program.absolute())
  else:
    kind, text = "source", textwrap.dedent(program)
  if new or not sys.platform.startswith("linux") or not _template(preload).serves(variables):
    ways = {"source": ["-c"], "script": [], "module": ["-m"]}
    options = [*(["-W", "error"] if errors else []), *ways[kind]]
    return subprocess.Popen(
      [sys.executable, *options, text, *words],
      env=variables,
      cwd=cwd,
      stdin=subprocess.DEVNULL,
      stdout=stdout,
      stderr=stderr,
      text=True,
      start_new_session=new_session,
    )
  request = {
    "kind": kind,
    "program": text,
    "arguments": words,
    "environment": variables,
    "cwd": str(cwd or os.getcwd()),
    "errors": errors,
    "new_session": new_session,
  }
  return _template(preload).fork(request, stdout, stderr)


def begin_program(source: str, environment: Mapping[str, str] | None = None) -> Process:
  """Starts a program, and waits until it prints "go"."""
  process = start(source, environment=environment)
  assert process.stdout is not None
  line = process.stdout.readline()
  if line != "go\n":
    process.kill()
    printed, errors = process.communicate()
    raise AssertionError(f"expected the line 'go', got {line + printed!r}\n{errors}")
  return process


def finish(process: Process) -> tuple[str, str]:
  """The process's outputs to its end, which has to come soon."""
  try:
    out, err = process.communicate(timeout=60)
  finally:
    process.kill()
  stray_output.expect_none(err or "")
  return out, err


def run(
  program: str | pathlib.Path | Module, *arguments: Any, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
  """Runs a program to its end; one that hangs is killed, and is subprocess.TimeoutExpired."""
  process = start(program, *arguments, **options)
  try:
    out, err = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
    raise
  assert process.returncode is not None
  stray_output.expect_none(err or "")
  return subprocess.CompletedProcess(["python", *map(str, arguments)], process.returncode, out, err)


def run_python(
  source: str, *, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
  """Runs a source with JAX on the CPU; a hang is subprocess.TimeoutExpired."""
  return run(source, timeout=timeout, environment={"JAX_PLATFORMS": "cpu", **environment})


def succeed(program: str | pathlib.Path | Module, *arguments: Any, **options: Any) -> str:
  """The output of a program that exits with 0; else the test fails. Takes the options of `run`."""
  done = run(program, *arguments, **options)
  assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
  return done.stdout


def output_of(source: str, *, timeout: float = 120, **environment: str) -> str:
  """The output of a source with JAX on the CPU; fails unless it exits with 0."""
  return succeed(source, timeout=timeout, environment={"JAX_PLATFORMS": "cpu", **environment})


def printed_by(
  code: str, *arguments: str, new: bool = False, preload: str = "", **environment: str
) -> str:
  """The output of a source for which warnings are errors; fails unless it exits with 0."""
  return succeed(code, *arguments, environment=environment, errors=True, new=new, preload=preload)


def same_path(*first: str | pathlib.Path) -> dict[str, str]:
  """A PYTHONPATH with which a program imports what this process does, `first` before the rest."""
  return {"PYTHONPATH": os.pathsep.join([*map(str, first), *filter(None, sys.path)])}


class _Template:
  """A template of this process, and the socket on which it takes requests."""

  def __init__(self, preload: str) -> None:
    reaper = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert reaper == 0, os.strerror(ctypes.get_errno())
    self._lock = threading.Lock()
    self._prefixes = (*_AT_START, f"{preload.upper()}_") if preload else _AT_START
    self._at_start = self._of_the_start(os.environ)
    self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
      self.process = subprocess.Popen(
        [
          sys.executable,
          str(pathlib.Path(__file__).with_name("template.py")),
          str(theirs.fileno()),
          *filter(None, [preload]),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
      )

    atexit.register(self._close, os.getpid())

  def _close(self, process: int) -> None:
    """Ends the template with the process that made it, not with a fork's child."""
    if os.getpid() == process:
      self._socket.close()
      self.process.kill()
      self.process.wait()

  def serves(self, variables: Mapping[str, str]) -> bool:
    """True if its processes are as new interpreters with these variables."""
    return self._of_the_start(variables) == self._at_start

  def _of_the_start(self, variables: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in variables.items() if k.startswith(self._prefixes) and k not in _LATER}

  def fork(
    self, request: dict[str, Any], stdout: IO[bytes] | int, stderr: IO[bytes] | int
  ) -> Interpreter:
    """A process that runs the request's program."""
    with (
      contextlib.ExitStack() as stack,
      tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file,
    ):
      json.dump(request, file)
      file.flush()
      ends: list[IO[str] | None] = []
      given: list[int] = []
      for output in (stdout, stderr):
        if output == subprocess.PIPE:
          mine, theirs = os.pipe()
          stack.callback(os.close, theirs)
          ends.append(os.fdopen(mine, "r"))
          given.append(theirs)
        else:
          ends.append(None)
          same = output == subprocess.STDOUT
          given.append(given[0] if same else output if isinstance(output, int) else output.fileno())
      null = stack.enter_context(open(os.devnull, encoding="utf-8"))
      with self._lock:
        socket.send_fds(self._socket, [file.name.encode()], [null.fileno(), *given])
        answer = self._socket.recv(64)
      assert answer, "the template of Python processes has ended (tests/python/support/template.py)"
      return Interpreter(int(answer), *ends)


@functools.cache
def _template(preload: str) -> _Template:
  return _Template(preload)
