# SPDX-License-Identifier: Apache-2.0
"""One program of each concept, in seconds: what `make quick` runs whatever has changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import callgate as cg

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def wave(x):
  return jnp.sin(x) * 2


@pytest.fixture
def gate():
  return cg.gate(lambda x: np.sin(x) * 2, like=wave)


def test_a_gate_agrees_with_jax_alone_mapped_differentiated_and_in_a_loop(gate):
  def programs(f):
    loop = lambda x: jax.lax.scan(lambda c, _: (f(c), c.sum()), x, length=3)
    return lambda x: (f(x), jax.vmap(f)(x), jax.grad(lambda x: f(x).sum())(x), loop(x))

  got, want = (jax.jit(programs(f))(X) for f in (gate, wave))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_an_ordered_gate_in_place_runs_once_a_step_in_order():
  seen = []

  @cg.gate(out=lambda x: x, style="inplace", effect="ordered")
  def double(out, x):
    np.multiply(x, 2, out=out)
    seen.append(float(x))

  body = lambda c, _: (double(c), None)
  assert jax.jit(lambda x: jax.lax.scan(body, x, length=4)[0])(1.0) == 16
  cg.barrier()
  assert seen == [1, 2, 4, 8]


def test_the_caller_gets_the_exception_of_a_gate_and_the_next_call_works():
  def root(x):
    if x < 0:
      raise ValueError(f"no root of {x}")
    return np.sqrt(x)

  program = jax.jit(cg.gate(root, out=lambda x: x))
  with pytest.raises(ValueError, match=r"no root of -1\.0"), cg.errors():
    program(-1.0).block_until_ready()
  assert program(4.0) == 2


def test_a_tap_streams_every_step_of_every_lane_through_a_channel():
  steps = []
  with cg.channel("smoke", to=lambda value: steps.append(float(value))):
    body = lambda i, x: cg.tap(x + i, "smoke")
    jax.block_until_ready(jax.jit(jax.vmap(lambda x: jax.lax.fori_loop(0, 3, body, x)))(X[0]))
  assert sorted(steps) == sorted(
    float(x) + total for x in X[0] for total in np.cumsum(np.arange(3))
  )


def test_a_check_that_fails_carries_its_message_and_values():
  program = jax.jit(lambda x: (cg.check(x > 0, "expected a positive x, got {x}", x=x), x)[1])
  assert program(1.0) == 1
  with pytest.raises(cg.CheckError, match=r"got -1\.0"), cg.errors():
    program(-1.0).block_until_ready()


def test_a_feed_is_read_once_a_step():
  with cg.feed(iter(X)) as feed:
    read = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=2)[1])
    np.testing.assert_array_equal(read(), X)


def test_kernels_of_c_plus_plus_and_of_an_expression_agree_with_numpy():
  saxpy = cg.cpp(
    """void saxpy(float a, cg::In<float, 2> x, cg::Out<float, 2> y) {
         for (int64_t i = 0; i < x.size(); ++i) y[i] = a * x[i] + 1;
       }""",
    out=lambda a, x: x,
    flags=("-O0",),
  )
  square = cg.elementwise("T x", "T z", "z = x * x", jvp="dz = 2 * x * dx")
  np.testing.assert_array_equal(jax.jit(saxpy)(2.0, X), 2 * X + 1)
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: square(x).sum()))(X), 2 * X)


def test_calls_run_on_the_shards_of_a_partitioned_program(gate):
  mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.device_put(X, jax.NamedSharding(mesh, P("i")))
  calls = []
  rows = cg.gate(
    lambda x: (calls.append(x.shape), x + 1)[1], out=lambda x: x, sharding="shard", effect="io"
  )
  np.testing.assert_array_equal(jax.jit(rows)(sharded), X + 1)
  assert calls == [(1, 3)] * 2


def test_jax_s_own_callbacks_run_on_callgate_after_install():
  seen = []

  def program(x):
    jax.debug.callback(lambda v: seen.append(float(v)), x)
    return jax.pure_callback(np.square, jax.ShapeDtypeStruct((), np.float32), x)

  cg.install()
  try:
    assert jax.jit(program)(3.0) == 9
    jax.effects_barrier()
  finally:
    cg.uninstall()
  assert seen == [3]


def test_an_exported_program_finds_its_gate_by_name():
  double = cg.gate(lambda x: 2 * x, out=lambda x: x, name="smoke.double")
  exported = export.export(jax.jit(double), disabled_checks=cg.export_checks())(X)
  loaded = export.deserialize(exported.serialize())
  np.testing.assert_array_equal(loaded.call(X), 2 * X)


def test_the_engine_made_of_jax_s_callbacks_gives_the_same(gate):
  want = jax.jit(gate)(X)
  with cg.config(engine="jax"):
    np.testing.assert_array_equal(jax.jit(gate)(X), want)
