# SPDX-License-Identifier: Apache-2.0
"""`callgate.errors(all=True)`: an ExceptionGroup of what all calls raised."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import callgate as cg

SPEC = PartitionSpec("d")


@pytest.fixture
def mesh() -> Mesh:
  return Mesh(np.array(jax.devices()[:4]), ("d",))


def strict(x: Any) -> Any:
  if x[0] != 2:
    raise ValueError(f"{x[0]:g}")
  return x


@pytest.fixture
def gate() -> Any:
  return cg.gate(strict, out=lambda x: x, sharding="i -> i", effect="io")


def said(group: BaseExceptionGroup[Any]) -> list[str]:
  return sorted(map(str, group.exceptions))


@pytest.mark.parametrize("manual", [False, True])
def test_of_all_shards(gate: Any, mesh: Mesh, manual: bool) -> None:
  x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, SPEC))
  mapped = jax.shard_map(gate, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
  program = jax.jit(mapped if manual else gate)
  for _ in range(2):
    failed = pytest.raises(ExceptionGroup, match="callgate: 3 calls failed")
    with failed as caught, cg.errors(all=True):
      jax.block_until_ready(program(x))
    assert said(caught.value) == ["0", "4", "6"]
    assert all(isinstance(one, ValueError) for one in caught.value.exceptions)
    for one in caught.value.exceptions:
      (note,) = [note for note in one.__notes__ if "raised in gate" in note]
      assert manual or f"shard {int(str(one)) // 2} of 4" in note
  cg.barrier()  # nothing is left


def test_of_one_call(gate: Any) -> None:
  for wait in (lambda x: x, jax.block_until_ready):
    failed = pytest.raises(ExceptionGroup, match="callgate: 1 call failed")
    with failed as caught, cg.errors(all=True):
      wait(jax.jit(gate)(jnp.zeros(3)))
    assert said(caught.value) == ["0"]
  with pytest.raises(ValueError, match="0"), cg.errors():
    jax.jit(gate)(jnp.zeros(3))


def test_of_none_and_of_errors_that_are_no_calls(gate: Any) -> None:
  with cg.errors(all=True):
    jax.jit(gate)(jnp.full(3, 2.0))
  with pytest.raises(ZeroDivisionError), cg.errors(all=True):
    raise ZeroDivisionError
  with pytest.raises(cg.GateDefinitionError, match="errors: all: expected a bool, got 1"):
    cg.errors(all=1)  # type: ignore[arg-type]


def test_an_exception_that_is_no_error_makes_a_base_group(mesh: Mesh) -> None:
  def ends(x: Any) -> Any:
    raise (SystemExit if x[0] == 0 else ValueError)(str(x[0]))

  gate = cg.gate(ends, out=lambda x: x, sharding="i -> i", effect="io")
  x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, SPEC))
  with pytest.raises(BaseExceptionGroup) as caught, cg.errors(all=True):
    jax.jit(gate)(x)
  assert not isinstance(caught.value, ExceptionGroup)
  assert caught.value.split(SystemExit)[0] is not None


def test_a_group_is_freed() -> None:
  class Mine(Exception):
    pass

  def fail(x: Any) -> Any:
    raise Mine

  with pytest.raises(ExceptionGroup) as caught, cg.errors(all=True):
    jax.jit(cg.gate(fail, out=lambda x: x))(1.0)
  alive = weakref.ref(caught.value)
  del caught
  cg.last_error()
  gc.collect()
  assert alive() is None


def test_of_several_programs_and_of_a_barrier_in_the_block(mesh: Mesh) -> None:
  def fails(name: str) -> Any:
    def fail(x: Any) -> Any:
      raise ValueError(f"{name}{x[0]:g}")

    return jax.jit(cg.gate(fail, out=lambda x: x, sharding="i -> i", effect="io"))

  x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, SPEC))
  first, second = fails("a"), fails("b")

  def both() -> None:
    jax.block_until_ready(first(x))
    jax.block_until_ready(second(x))  # a call that would raise what the first one left

  def with_a_barrier() -> None:
    first(x)
    cg.barrier()

  for run, names in ((both, "ab"), (both, "ab"), (with_a_barrier, "a")):
    with pytest.raises(ExceptionGroup) as caught, cg.errors(all=True):
      run()
    assert said(caught.value) == [f"{name}{n}" for name in names for n in range(4)]
  with pytest.raises(ValueError, match="a"), cg.errors():
    first(x)
