# SPDX-License-Identifier: Apache-2.0
"""The process in which programs run: it gets their text, and answers what came of each."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import linecache
import pathlib
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from multiprocessing.connection import Connection
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python" / "support"))


def run(source: str, number: int, keeps: bool) -> dict[str, Any]:
  """Runs a program's text: its calls, or what it raised.

  `keeps`: afterwards it looks for functions that outlive their program.
  """
  name = f"<program {number}>"
  linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
  namespace: dict[str, Any] = {"__name__": f"program_{number}", "NAMES": f"p{number}."}
  namespace["SOURCE"] = source  # for ways that run it elsewhere
  threads = threading.active_count()
  try:
    exec(compile(source, name, "exec"), namespace)
    answer: dict[str, Any] = {"calls": namespace["calls"]}
  except BaseException as error:  # noqa: BLE001  (Ctrl-C and exits are answers, too)
    lines = traceback.format_exception(error)
    answer = {
      "raised": type(error).__name__,
      "message": str(error),
      "traceback": "".join(lines)[-6000:],
    }
    with contextlib.suppress(BaseException):  # what was left of the failure
      namespace["armed"].clear()
      namespace["settled"]()
  sys.setswitchinterval(0.005)  # a way changes it
  linecache.cache.pop(name, None)
  if keeps and "calls" in answer and not _NEVER_FREES:
    answer["kept"] = _kept(namespace)
  answer["threads"] = threading.active_count() - threads
  return answer


# Python 3.13t keeps functions once a second thread has started.
_NEVER_FREES = sys.version_info < (3, 14) and not getattr(sys, "_is_gil_enabled", lambda: True)()


def _kept(namespace: dict[str, Any]) -> list[str]:
  """The names of the program's functions that are alive when nobody names the program."""
  import jax

  functions = {
    name: weakref.ref(value)
    for name, value in namespace.items()
    if isinstance(value, types.FunctionType) and value.__module__ == namespace["__name__"]
  }
  for channel in [name for name in namespace if name.endswith("_channel")]:
    namespace[channel].close()
  if "executor" in namespace:
    namespace["executor"].shutdown()
  namespace.clear()
  for _ in range(100):  # threads may be about to let go of what they ran
    jax.clear_caches()
    gc.collect()
    kept = [name for name, ref in functions.items() if ref() is not None]
    if not kept:
      return []
    time.sleep(0.01)
  return kept


def main() -> None:
  import quick_xla

  connection = Connection(int(sys.argv[1]))
  faulthandler.register(signal.SIGUSR1, all_threads=True)
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
  quick_xla.use()
  importlib.import_module("callgate")
  gc.freeze()
  while True:
    try:
      source, number, keeps = connection.recv()
    except EOFError:
      return
    connection.send(run(source, number, keeps))


if __name__ == "__main__":
  main()
