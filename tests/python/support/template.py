# SPDX-License-Identifier: Apache-2.0
"""A process that has imported JAX and forks itself on request; run by interpreters.py, not by hand.

    python template.py SOCKET [MODULE]

Most of what a new interpreter costs a test is the import of JAX. The template pays it once. A
message on the socket names a file with a request, and brings descriptors for stdin, stdout and
stderr; it becomes a process that goes on as `python -c SOURCE`, `python SCRIPT` or `python -m
MODULE` would after that import, atexit handlers, exit status and signals included. callgate itself
is not imported here, and no backend is made: whatever they do, they do in the new process.

The process is forked twice, so that it becomes a child of the test's process, which made itself the
reaper of its descendants; the answer is its number.
"""

from __future__ import annotations

import builtins
import fractions  # noqa: F401  the first gate imports it, and the one below
import gc
import importlib
import json
import os
import queue  # noqa: F401
import runpy
import signal
import socket
import sys
import types
import warnings
from typing import Any

import jax
import jax.numpy  # noqa: F401
import numpy as np  # noqa: F401  imported for the processes to come
from jax._src.lib.mlir.dialects import builtin, mhlo  # noqa: F401  a first program imports them

_MOST = 1 << 16  # bytes of a message: a request lies in a file, whose name the message is


def serve(server: socket.socket) -> dict[str, Any]:
  """Answers requests for ever; in a new process, returns its request."""
  gc.collect()
  gc.freeze()  # so that the collector of a new process writes to none of the shared pages
  while True:
    message, descriptors, _, _ = socket.recv_fds(server, _MOST, 3)
    if not message:
      os._exit(0)  # the test's process has ended
    with open(message, encoding="utf-8") as file:
      request = json.load(file)
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
      grandchild = os.fork()
      if grandchild == 0:
        for descriptor in (server.detach(), mine, theirs):
          os.close(descriptor)
        for target, descriptor in enumerate(descriptors):
          os.dup2(descriptor, target)
          os.close(descriptor)
        return request
      os.write(theirs, str(grandchild).encode())
      os._exit(0)
    os.waitpid(child, 0)  # only then has the grandchild another parent
    server.send(os.read(mine, 64))
    for descriptor in (*descriptors, mine, theirs):
      os.close(descriptor)


def become(request: dict[str, Any]) -> None:
  """Runs the request's program as this process's main module."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  if request["new_session"]:
    os.setsid()
  os.chdir(request["cwd"])
  os.environ.clear()
  os.environ.update(request["environment"])
  for name, value in os.environ.items():
    if name.startswith("JAX_") and _at_start.get(name) != value:
      set_option(name.lower(), value)
  if request["errors"]:
    warnings.simplefilter("error")
    sys.warnoptions.append("error")
  kind, program = request["kind"], request["program"]
  first = os.path.dirname(program) if kind == "script" else ""
  own = [path for path in sys.path[1:] if path not in _inherited]
  sys.path[:] = [first, *python_path(), *own]
  sys.argv[:] = [program if kind == "script" else "-c", *request["arguments"]]
  if kind == "module":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    return
  main = types.ModuleType("__main__")
  main.__dict__["__builtins__"] = builtins
  sys.modules["__main__"] = main
  file = "<string>"
  if kind == "script":
    main.__file__ = file = program
    with open(program, encoding="utf-8") as script:
      program = script.read()
  exec(compile(program, file, "exec"), main.__dict__)


def python_path() -> list[str]:
  """The folders that PYTHONPATH names now."""
  return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def set_option(name: str, text: str) -> None:
  """Gives an option of JAX the value that its environment variable would have given it."""
  now = jax.config.values[name]
  if isinstance(now, bool):
    jax.config.update(name, text.lower() in ("1", "true", "yes", "on", "y", "t"))
  else:
    jax.config.update(name, type(now)(text) if isinstance(now, (int, float)) else text)


_at_start = dict(os.environ)
_inherited = python_path()

if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' to see
  for _name in sys.argv[2:]:
    importlib.import_module(_name)
  become(serve(socket.socket(fileno=int(sys.argv[1]))))
