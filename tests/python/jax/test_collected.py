# SPDX-License-Identifier: Apache-2.0
"""JAX's arrays as the collector knows them, which free-threaded Python 3.13 needs."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from free_threaded import FREE

from callgate._jax import collected, dispatch


def is_listed(array: Any) -> bool:
  return any(one is array for one in collected.live_arrays())


def test_the_collector_knows_the_arrays_that_jax_lists() -> None:
  arrays = [jax.device_put(np.arange(n)) for n in range(5)]
  collected.start()  # a second time: frozen arrays are listed, once more
  assert all(map(is_listed, arrays))
  arrays[0].delete()
  assert not is_listed(arrays[0])
  assert all(map(is_listed, arrays[1:]))


def test_frozen_arrays_are_listed_until_they_die(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(collected, "NEEDED", True)
  monkeypatch.setattr(collected, "_frozen", [])
  monkeypatch.setattr(gc, "freeze", gc.freeze)  # restored afterwards
  collected.start()
  array = jax.device_put(np.arange(3))
  for _ in range(2):
    gc.freeze()
    assert is_listed(array)
  reference = weakref.ref(array)
  del array
  assert reference() is None
  assert None not in collected.live_arrays()


def test_the_dispatch_asks_the_collector_where_jaxs_list_is_not_safe() -> None:
  assert (FREE and sys.version_info < (3, 14)) == collected.NEEDED
  array = jax.device_put(np.arange(3))
  assert any(one is array for one in dispatch.live_arrays())
