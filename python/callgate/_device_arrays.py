"""Records of taps with `on_device=True` as jax.Arrays where their program ran.

From a GPU the runtime hands over Buffers that own a copy on the device: JAX takes them by DLPack,
without another copy. From the CPU it hands over NumPy arrays of the record's own. Runs on a
channel's thread, under the GIL.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Converter:
  """Makes jax.Arrays of the arrays of rows; those of one record's lanes share its array."""

  def __init__(self) -> None:
    # Of each leaf: the Buffer that was converted last, and its array.
    self._whole: dict[int, tuple[Any, Any]] = {}

  def __call__(self, row: Any) -> Any:
    """The row, with jax.Arrays in place of what the runtime handed over."""
    *about, arrays = row
    device = row[3]
    return (*about, tuple(self._array(i, array, device) for i, array in enumerate(arrays)))

  def _array(self, index: int, array: Any, device: int) -> jax.Array:
    if isinstance(array, np.ndarray):
      return jax.device_put(array, _cpu(device))
    buffer, start, shape = array
    known = self._whole.get(index)
    if known is None or known[0] is not buffer:
      known = self._whole[index] = (buffer, import_buffer(buffer))
    whole = known[1]
    if whole.shape == shape:
      return whole
    size = math.prod(shape)
    return _sliced(whole, start // size if size else 0, shape)


def import_buffer(buffer: Any) -> jax.Array:
  """A runtime's Buffer that owns its memory, as a jax.Array over the same memory."""
  return jax.dlpack.from_dlpack(buffer)


@functools.partial(jax.jit, static_argnums=2)
def _sliced(whole: Any, lane: Any, shape: tuple[int, ...]) -> Any:
  if 0 in shape:
    return jnp.zeros(shape, whole.dtype)
  return jax.lax.dynamic_index_in_dim(whole.reshape(-1, *shape), lane, keepdims=False)


@functools.cache
def _cpu(device: int) -> Any:
  """The CPU device of an id; the default one where a record names none."""
  devices = jax.local_devices(backend="cpu")
  return next((one for one in devices if one.id == device), devices[0])
