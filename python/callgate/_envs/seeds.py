# SPDX-License-Identifier: Apache-2.0
"""Seeds of environments: a key's or a number's words in programs, integers on the host.

A key's integer consists of its data's words, the most significant first: `jax.random.key(7)` is 7.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from callgate._core.errors import GateDefinitionError

How = Literal["none", "words", "number", "lanes"]
_WORD = 2**32


def operand(label: str, key: Any, count: int) -> tuple[How, Any]:
  """Returns how a program's call passes its seeds, and the array with them.

  Args:
    label: the beginning of messages.
    key: None, a PRNG key, an integer, or a seed for each of `count` environments.
    count: the number of environments.

  Returns:
    "none" and None; "words" and uint32[words], the most significant first; "number" and an integer
    array of shape (); "lanes" and integers of shape (count,), or uint32[count, 2] for larger ones.
  """
  if key is None:
    return "none", None
  if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
    return "words", _words(label, int(key))
  if isinstance(key, (list, tuple)):
    return "lanes", _of_list(label, key, count)
  if hasattr(key, "dtype") and hasattr(key, "shape"):
    return _of_array(label, key, count)
  raise _wrong(label, count, repr(key))


def _of_array(label: str, key: Any, count: int) -> tuple[How, Any]:
  if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    if key.shape == ():
      return "words", jax.random.key_data(key).reshape(-1)
  elif jnp.issubdtype(key.dtype, jnp.integer):
    if isinstance(key, np.ndarray):
      return "lanes", _of_list(label, key.tolist(), count)
    known = key.shape in ((), (count,)) and not isinstance(key, jax.core.Tracer)
    if known and not jnp.issubdtype(key.dtype, jnp.unsignedinteger):
      _check_sign(label, key)
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    if key.dtype == np.uint32 and key.shape == raw:
      return "words", key
    if key.shape == ():
      return "number", key
    if key.shape == (count,):
      return "lanes", key
  raise _wrong(label, count, f"{key.dtype}{list(key.shape)}")


def _wrong(label: str, count: int, got: str) -> GateDefinitionError:
  return GateDefinitionError(
    f"{label}: key: expected a PRNG key, an integer of at least 0, a list of {count} integers, "
    f"or None, got {got}"
  )


def _check_sign(label: str, key: Any) -> None:
  """Raises for a negative seed in a concrete array of this process."""
  known = getattr(key, "is_fully_addressable", False) and key.size
  if known and (least := np.asarray(key).min()) < 0:
    raise GateDefinitionError(f"{label}: key: expected a seed of at least 0, got {least}")


def _words(label: str, seed: int) -> Any:
  if seed < 0:
    raise GateDefinitionError(f"{label}: key: expected a seed of at least 0, got {seed}")
  count = max(1, -(-seed.bit_length() // 32))
  words = np.frombuffer(seed.to_bytes(4 * count, "big"), ">u4")
  return jnp.asarray(words.astype(np.uint32))


def _of_list(label: str, given: Any, count: int) -> Any:
  if any(isinstance(one, jax.core.Tracer) for one in given):
    seeds = jnp.stack([jnp.asarray(one) for one in given])
    if seeds.shape == (count,) and jnp.issubdtype(seeds.dtype, jnp.integer):
      return seeds
    raise _wrong(label, count, f"{len(given)} of {seeds.dtype}{list(seeds.shape[1:])}")
  if any(isinstance(one, bool) or getattr(one, "dtype", None) == np.bool_ for one in given):
    raise _wrong(label, count, repr(given))
  try:
    seeds = [operator.index(one) for one in given]
  except TypeError:
    raise _wrong(label, count, repr(given)) from None
  if len(seeds) != count or not all(0 <= one < _WORD**2 for one in seeds):
    what = f"{count} seeds, from 0 to 2**64 - 1"
    raise GateDefinitionError(f"{label}: key: expected {what}, got {given!r}")
  return jnp.asarray(np.array([divmod(one, _WORD) for one in seeds], np.uint32).reshape(count, 2))


def of_lanes(how: How, seeds: Any, lanes: Sequence[int], count: int) -> list[int | None]:
  """Returns the seed of each lane, on the host.

  `seeds` has a row for each lane; `count` is the number of all environments.
  """
  if how == "none" or not lanes:
    return [None] * len(lanes)
  if how == "lanes":
    return [_joined(row) if seeds.ndim > 1 else _positive(row) for row in seeds]
  states: dict[int, list[int]] = {}  # by lane of `jax.vmap`
  found: list[int | None] = []
  for row, lane in zip(seeds, lanes, strict=True):
    entropy = integer_of(row)
    if entropy not in states:
      states[entropy] = np.random.SeedSequence(entropy).generate_state(count).tolist()
    found.append(states[entropy][lane])
  return found


def integer_of(seed: Any) -> int:
  """Returns the integer of a key's words, or of a number."""
  return _joined(seed) if np.ndim(seed) else _positive(seed)


def _joined(words: Any) -> int:
  return int.from_bytes(words.astype(">u4").tobytes(), "big")


def _positive(seed: Any) -> int:
  if seed < 0:
    raise ValueError(f"key: expected a seed of at least 0, got {seed}")
  return int(seed)
