# SPDX-License-Identifier: Apache-2.0
"""JAX's callbacks on JAX's engine, the oracle, and on callgate's in its two forms."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import callgate as cg
from callgate.compat import callbacks


class Api(NamedTuple):
  pure_callback: Callable[..., Any]
  io_callback: Callable[..., Any]

  def call(self, flavor: str, *args: Any, **kwargs: Any) -> Any:
    if flavor == "pure":
      return self.pure_callback(*args, **kwargs)
    return self.io_callback(*args, ordered=flavor == "ordered", **kwargs)


JAX = Api(jax.pure_callback, io_callback)
OURS = Api(callbacks.pure_callback, callbacks.io_callback)
Engine = Callable[[], contextlib.AbstractContextManager[Api]]
Program = Callable[[Api], Any]


@contextlib.contextmanager
def installed() -> Iterator[Api]:
  cg.install()
  try:
    yield JAX
  finally:
    jax.effects_barrier()
    cg.uninstall()


@contextlib.contextmanager
def functions() -> Iterator[Api]:
  yield OURS


ENGINES = pytest.mark.parametrize("engine", [installed, functions], ids=["installed", "functions"])
FLAVORS = pytest.mark.parametrize("flavor", ["pure", "unordered", "ordered"])


def assert_same(engine: Engine, program: Program) -> Any:
  expected = jax.block_until_ready(program(JAX))
  jax.effects_barrier()
  with engine() as api:
    actual = jax.block_until_ready(program(api))
    jax.effects_barrier()
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert (np.shape(got), np.asarray(got).dtype) == (np.shape(want), np.asarray(want).dtype)
    np.testing.assert_array_equal(got, want)
  return actual


def failure(program: Program, api: Api) -> BaseException:
  logging.disable(logging.CRITICAL)
  try:
    with pytest.raises(Exception) as info:  # noqa: PT012
      jax.block_until_ready(program(api))
      jax.effects_barrier()
  finally:
    logging.disable(logging.NOTSET)
    with contextlib.suppress(Exception):
      jax.effects_barrier()
  return info.value


def assert_same_failure(engine: Engine, program: Program) -> tuple[str, str]:
  expected = failure(program, JAX)
  with engine() as api:
    actual = failure(program, api)
  assert type(actual) is type(expected)
  return str(actual), str(expected)


def like(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
