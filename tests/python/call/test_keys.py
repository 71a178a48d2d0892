# SPDX-License-Identifier: Apache-2.0
"""Typed PRNG keys: arguments and results of gates, and what taps give of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import callgate as cg

F32 = jax.ShapeDtypeStruct((), jnp.float32)
KINDS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.fixture(params=["callgate", "jax"])
def engine(request: pytest.FixtureRequest) -> Any:
  with cg.config(engine=request.param):
    yield request.param


@pytest.fixture(params=KINDS)
def key(request: pytest.FixtureRequest) -> Any:
  return jax.random.key(7, impl=request.param)


def draw(key: Any) -> Any:
  """The function of a gate that takes a key."""
  assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  return jax.random.uniform(key)


def same(one: Any, other: Any) -> None:
  assert one.dtype == other.dtype
  np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))


def test_a_key_arrives_as_a_key_with_jax_arrays(key: Any, engine: str) -> None:
  gate = cg.gate(draw, out=F32, arrays="jax")
  expected = jax.random.uniform(key)
  for _ in range(3):  # the second call is JAX's C++ dispatch's
    assert jax.jit(gate)(key) == expected
    assert gate(key) == expected


@pytest.mark.parametrize("arrays", ["numpy", "buffer"])
def test_a_key_arrives_as_its_data_otherwise(key: Any, engine: str, arrays: Any) -> None:
  def words(data: Any) -> Any:
    return np.asarray(data)

  expected = jax.random.key_data(key)
  gate = cg.gate(words, out=jax.typeof(expected), arrays=arrays)
  np.testing.assert_array_equal(jax.jit(gate)(key), expected)
  np.testing.assert_array_equal(gate(key), expected)


def test_keys_beside_other_content_of_a_pytree(engine: str) -> None:
  def fn(state: Any, *, scale: Any) -> Any:
    assert state["name"] == "lane"
    return np.float32(scale * jax.random.normal(state["rng"]) + state["x"])

  gate = cg.gate(fn, out=F32, arrays="jax")
  key = jax.random.key(1)
  run = jax.jit(lambda key, x: gate({"name": "lane", "rng": key, "x": x}, scale=x))
  expected = 2 * jax.random.normal(key) + 2
  np.testing.assert_allclose(run(key, np.float32(2)), expected, rtol=1e-6)


def test_a_key_by_keyword(engine: str) -> None:
  gate = cg.gate(lambda *, key: draw(key), out=F32, arrays="jax")
  key = jax.random.key(5)
  assert jax.jit(lambda key: gate(key=key))(key) == jax.random.uniform(key)


def split_one(key: Any) -> Any:
  return jax.random.split(key, 3)[1]


@pytest.mark.parametrize("out", ["function", "type", "like"])
def test_a_result_is_a_key_where_its_type_is(key: Any, engine: str, out: str) -> None:
  if out == "like":
    gate = cg.gate(split_one, like=split_one, arrays="jax")
  else:
    given = (lambda key: key) if out == "function" else jax.ShapeDtypeStruct((), key.dtype)
    gate = cg.gate(split_one, out=given, arrays="jax")
  for call in (jax.jit(gate), gate):
    same(call(key), split_one(key))
    same(call(key), split_one(key))


def test_a_result_key_may_be_returned_as_its_data(key: Any, engine: str) -> None:
  data = np.array(jax.random.key_data(split_one(key)))
  gate = cg.gate(
    lambda _: {"rng": data, "n": np.int32(3)}, out=lambda k: {"rng": k, "n": jnp.int32(0)}
  )
  got = jax.jit(gate)(key)
  same(got["rng"], split_one(key))
  assert got["n"] == 3


def test_a_key_is_written_in_place_as_its_data(key: Any, engine: str) -> None:
  @cg.gate(out=lambda key: key, style="inplace")
  def copy(out: Any, data: Any) -> None:
    out[...] = data

  same(jax.jit(copy)(key), key)


def test_many_keys(key: Any, engine: str) -> None:
  gate = cg.gate(lambda keys: keys[::-1], out=lambda keys: keys, arrays="jax")
  keys = jax.random.split(key, (2, 3))
  same(jax.jit(gate)(keys), keys[::-1])


def test_a_key_of_another_kind_is_refused() -> None:
  gate = cg.gate(lambda _: jax.random.key(0, impl="rbg"), out=lambda key: key, arrays="jax")
  with (
    pytest.raises(
      cg.ResultError, match="result 0: expected a key of threefry2x32, got a key of rbg"
    ),
    cg.errors(),
  ):
    gate(jax.random.key(0))
  gate = cg.gate(lambda _: {"x": jax.random.key(0)}, out={"x": F32}, arrays="jax")
  expected = "result 0: expected an array of numbers, got a key of"
  with pytest.raises(cg.ResultError, match=expected), cg.errors():
    gate(1.0)


# -- under transformations -------------------------------------------------------------------------
def pairs(key: Any, x: Any) -> Any:
  """A key and a number from a key and a number, in JAX."""
  return jax.random.fold_in(key, 3), x * jax.random.uniform(key)


def gates() -> dict[str, Any]:
  """Gates of the same function, with each kind of rule."""
  fn = lambda key, x: pairs(key, jnp.asarray(x))
  out = lambda key, x: (key, x)
  by_jvp = cg.gate(fn, out=out, arrays="jax")

  @by_jvp.defjvp
  def _(primals: Any, tangents: Any) -> Any:
    (key, x), (zero, t) = primals, tangents
    assert (zero.dtype, zero.shape) == (jax.dtypes.float0, key.shape)
    made, y = by_jvp(key, x)
    return (made, y), (np.zeros(key.shape, jax.dtypes.float0), t * jax.random.uniform(key))

  by_vjp = cg.gate(fn, out=out, arrays="jax")
  by_vjp.defvjp(
    lambda key, x: (by_vjp(key, x), key),
    lambda key, cotangent: (None, cotangent[1] * jax.random.uniform(key)),
  )
  ruled = cg.gate(fn, like=pairs, arrays="jax")

  @ruled.defvmap
  def _(size: int, in_batched: Any, key: Any, x: Any) -> Any:
    assert in_batched == [True, True]
    return jax.vmap(pairs)(key, x), (True, True)

  return {
    "like": cg.gate(fn, like=pairs, arrays="jax"), "jvp": by_jvp, "vjp": by_vjp, "vmap": ruled,
    "differences": cg.gate(fn, out=out, arrays="jax", gradient="finite-difference"),
  }  # fmt: skip


@pytest.mark.parametrize("kind", ["like", "jvp", "vjp", "vmap", "differences"])
def test_transformations_of_a_gate_with_keys(kind: str) -> None:
  gate, key, x = gates()[kind], jax.random.key(2), jnp.float32(0.5)

  def compare(of: Any) -> None:
    want, got = of(pairs), jax.jit(lambda: of(gate))()
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
      if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        same(a, b)
      else:
        np.testing.assert_allclose(a, b, rtol=1e-3)

  keys, xs = jax.random.split(key, 3), jnp.arange(3, dtype=np.float32)
  compare(lambda f: f(key, x))
  compare(lambda f: jax.vmap(f)(keys, xs))
  compare(lambda f: jax.grad(lambda x: f(key, x)[1])(x))
  compare(lambda f: jax.vmap(jax.grad(lambda x, k: f(k, x)[1]))(xs, keys))
  compare(lambda f: jax.grad(lambda x: jax.checkpoint(f)(key, x)[1])(x))
  compare(lambda f: jax.lax.scan(lambda c, x: f(c, x), key, xs))
  compare(lambda f: jax.lax.cond(x > 0, f, lambda k, x: (k, x), key, x))


def test_over_devices() -> None:
  gate = cg.gate(draw, out=F32, arrays="jax", effect="io")
  keys = jax.random.split(jax.random.key(0), 4)
  mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
  spec = PartitionSpec("d")
  run = jax.shard_map(jax.vmap(gate), mesh=mesh, in_specs=spec, out_specs=spec)
  expected = jax.vmap(jax.random.uniform)(keys)
  np.testing.assert_array_equal(jax.jit(run)(keys), expected)
  placed = jax.device_put(keys, jax.NamedSharding(mesh, spec))
  np.testing.assert_array_equal(jax.jit(jax.vmap(gate))(placed), expected)


def test_an_exported_program_has_keys() -> None:
  gate = cg.gate(split_one, out=lambda key: key, arrays="jax", name="test_keys.exported")
  key = jax.random.key(3)
  exported = jax.export.export(jax.jit(gate), disabled_checks=cg.export_checks())(key)
  same(jax.export.deserialize(exported.serialize()).call(key), split_one(key))


def test_in_a_worker() -> None:
  import worker_functions

  gate = cg.gate(
    worker_functions.key_of, out=lambda key: (key, F32), arrays="jax", run_on=cg.workers(1)
  )
  key = jax.random.key(4)
  made, number = jax.jit(gate)(key)
  same(made, split_one(key))
  assert number == jax.random.uniform(key)


def test_started_calls() -> None:
  gate = cg.gate(
    lambda key: (split_one(key), jax.random.uniform(key)), out=lambda k: (k, F32), arrays="jax"
  )

  @jax.jit
  def run(key: Any) -> Any:
    return gate.result(gate.start(key))

  made, number = run(jax.random.key(4))
  same(made, split_one(jax.random.key(4)))
  assert number == jax.random.uniform(jax.random.key(4))


def test_call_takes_keys() -> None:
  key = jax.random.key(9)
  got = jax.jit(lambda key: cg.call(split_one, key, key, arrays="jax"))(key)
  same(got, split_one(key))


def test_check_compares_keys() -> None:
  cg.gate(split_one, like=split_one, arrays="jax").check(jax.random.key(1))
  wrong = cg.gate(lambda key: key, like=split_one, arrays="jax")
  with pytest.raises(AssertionError):
    wrong.check(jax.random.key(1))


def test_verify_takes_keys() -> None:
  report = cg.gate(split_one, like=split_one, arrays="jax", name="test_keys.verified").verify(
    jax.random.key(1), seconds=60
  )
  assert not report.failed, str(report)


# -- taps ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["io", "ordered", "dataflow"])
def test_a_taps_function_gets_keys(key: Any, engine: str, kind: str) -> None:
  seen: list[Any] = []
  options: Any = {"ordered": True} if kind == "ordered" else {"effect": kind}

  def f(key: Any) -> Any:
    return cg.tap({"rng": key, "n": 1}, seen.append, **options)["rng"]

  same(jax.jit(f)(key), key)
  cg.barrier()
  same(seen[0]["rng"], key)
  keys = jax.random.split(key, 3)
  jax.jit(jax.vmap(f))(keys)
  cg.barrier()
  assert len(seen) == 4
  got = sorted(jax.random.key_data(one["rng"]).tolist() for one in seen[1:])
  assert got == sorted(jax.random.key_data(keys).tolist())


def test_a_batch_of_records_has_keys() -> None:
  seen: list[Any] = []
  key = jax.random.key(0)
  with cg.channel("test_keys.batch", to=seen.append, batch=True):
    jax.jit(jax.vmap(lambda key: cg.tap(key, "test_keys.batch")))(jax.random.split(key, 5))
    cg.barrier()
  got = jnp.concatenate([jax.random.key_data(one) for one in seen])
  assert sorted(got.tolist()) == sorted(jax.random.key_data(jax.random.split(key, 5)).tolist())


def test_sinks_get_the_data_of_keys(tmp_path: Any) -> None:
  with cg.channel("test_keys.sink", to=cg.sinks.JSONL(tmp_path / "keys.jsonl")):
    jax.jit(lambda key: cg.tap(key, "test_keys.sink"))(jax.random.key(6))
    cg.barrier()
  assert "[0,6]" in (tmp_path / "keys.jsonl").read_text()


def test_print_shows_a_key(capfd: pytest.CaptureFixture[str]) -> None:
  jax.jit(lambda key: cg.print("{} {k}", 1, k=key))(jax.random.key(6))
  cg.barrier()
  assert capfd.readouterr().out.split() == ["1", *str(jax.random.key(6)).split()]
