# SPDX-License-Identifier: Apache-2.0
"""JAX's part in Python's garbage collection, as callgate leaves it."""

from __future__ import annotations

import gc
import types

from interpreters import output_of

from callgate._jax import garbage


def test_no_function_in_python_runs_for_jax_within_a_collection() -> None:
  garbage.start()  # twice is as once
  names = [one.__name__ for one in gc.callbacks if isinstance(one, types.FunctionType)]
  assert "_xla_gc_callback" not in names


IN_COLLECTION = """
import ctypes, functools, gc, os, signal
import jax
import callgate as cg
from callgate import _callgate

class Mine(Exception): pass
def raises(*_): raise Mine
signal.signal(signal.SIGUSR1, raises)
cg.gate(lambda x: x, out=lambda x: x)
comes = functools.partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGUSR1)
gc.callbacks.insert(0, _callgate.without_signals(comes))  # as a collection begins
try:
  gc.collect()
except Mine:
  print("raised")
finally:
  del gc.callbacks[0]
"""


def test_what_a_signals_handler_raises_is_not_lost_in_a_collection() -> None:
  assert output_of(IN_COLLECTION).split() == ["raised"]
