# SPDX-License-Identifier: Apache-2.0
"""`aliases=`: input and result are one memory, with donation the caller's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

SHAPE = (256, 256)
seen: dict[str, int] = {}


def add_one(out: Any, x: Any) -> None:
  seen.update(input=x.ctypes.data, result=out.ctypes.data)
  np.add(x, 1, out=out)


GATE = cg.gate(add_one, out=lambda x: x, style="inplace", aliases={0: 0})


def fresh() -> jax.Array:
  return jnp.arange(SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(SHAPE) + 0


def test_with_donation_input_result_and_the_callers_buffer_are_one() -> None:
  x = fresh()
  expected = np.array(x) + 1
  address = x.unsafe_buffer_pointer()
  y = jax.jit(GATE, donate_argnums=0)(x).block_until_ready()
  assert x.is_deleted()
  assert {seen["input"], seen["result"], y.unsafe_buffer_pointer()} == {address}
  np.testing.assert_array_equal(y, expected)


def test_without_donation_the_callers_array_is_left_alone() -> None:
  x = fresh()
  before = np.array(x)
  y = jax.jit(GATE)(x).block_until_ready()
  assert seen["input"] == seen["result"] != x.unsafe_buffer_pointer()
  np.testing.assert_array_equal(x, before)
  np.testing.assert_array_equal(y, before + 1)


def test_an_intermediate_is_updated_in_place() -> None:
  x = fresh()
  y = jax.jit(lambda x: GATE(x * 2) * 2)(x)
  assert seen["input"] == seen["result"]
  np.testing.assert_array_equal(y, (np.array(x) * 2 + 1) * 2)


def test_an_input_that_is_used_again_is_copied_first() -> None:
  x = fresh()

  @jax.jit
  def both(x: Any) -> Any:
    z = x * 2
    return GATE(z), z

  y, z = both(x)
  np.testing.assert_array_equal(z, np.array(x) * 2)
  np.testing.assert_array_equal(y, np.array(x) * 2 + 1)


def test_the_carry_of_a_scan_stays_where_it_is() -> None:
  addresses: set[int] = set()

  @cg.gate(out=lambda x: x, style="inplace", aliases={0: 0})
  def step(out: Any, x: Any) -> None:
    addresses.add(x.ctypes.data)
    np.add(x, 1, out=out)

  total = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: step(x), x))(fresh())
  np.testing.assert_array_equal(total, np.array(fresh()) + 50)
  assert len(addresses) <= 2


def test_lanes_of_vmap_alias_lane_by_lane() -> None:
  x = fresh()
  y = jax.jit(jax.vmap(GATE), donate_argnums=0)(x)
  np.testing.assert_array_equal(y, np.array(fresh()) + 1)


def test_one_of_several_arguments_is_aliased_by_flat_position() -> None:
  @cg.gate(out=lambda scale, tree: (scale, tree["b"]), style="inplace", aliases={2: 1})
  def update(out: Any, scale: Any, tree: Any) -> None:
    seen.update(input=tree["b"].ctypes.data, result=out[1].ctypes.data)
    out[0][...] = scale
    np.multiply(tree["b"], scale, out=out[1])

  _, b = jax.jit(update)(jnp.float32(3), {"a": fresh(), "b": fresh()})
  assert seen["input"] == seen["result"]
  np.testing.assert_array_equal(b, np.array(fresh()) * 3)


@pytest.mark.parametrize(
  ("aliases", "message"),
  [
    ({1: 0}, r"input 1 is outside the range \[0, 1\)"),
    ({0: 1}, r"output 1 is outside the range \[0, 1\)"),
  ],
)
def test_positions_outside_the_call_are_refused(aliases: dict[int, int], message: str) -> None:
  gate = cg.gate(add_one, out=lambda x: x, style="inplace", aliases=aliases)
  with pytest.raises(cg.GateDefinitionError, match=message):
    jax.jit(gate)(fresh())


@pytest.mark.parametrize(
  "out", [jax.ShapeDtypeStruct(SHAPE, np.int32), jax.ShapeDtypeStruct((3,), np.float32)]
)
def test_another_shape_or_dtype_cannot_share_memory(out: Any) -> None:
  gate = cg.gate(add_one, out=out, style="inplace", aliases={0: 0})
  with pytest.raises(cg.GateDefinitionError, match=r"input 0 is float32\[256, 256\].*same shape"):
    jax.jit(gate)(fresh())


@pytest.mark.parametrize("vmap", ["each", "whole", "broadcast"])
@pytest.mark.parametrize("engine", ["callgate", "jax"])
@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
def test_under_vmap_every_lane_finds_its_input_in_the_aliased_result(
  vmap: str, engine: str, axes: tuple[int | None, int | None]
) -> None:
  def add(out: np.ndarray, table: np.ndarray, row: np.ndarray) -> None:
    out += row

  gate = cg.gate(add, out=lambda table, row: table, style="inplace", aliases={0: 0}, vmap=vmap)
  table = jnp.arange(12.0).reshape(3, 4) if axes[0] == 0 else jnp.arange(4.0)
  row = jnp.arange(12.0, 24.0).reshape(3, 4) if axes[1] == 0 else jnp.ones(4)
  with cg.config(engine=engine):
    got = jax.jit(jax.vmap(gate, axes))(table, row)
  np.testing.assert_array_equal(got, jax.vmap(jnp.add, axes)(table, row))
