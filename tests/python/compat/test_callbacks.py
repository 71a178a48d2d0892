# SPDX-License-Identifier: Apache-2.0
"""JAX's callbacks on callgate's engine take and give what they do on JAX's own.

The same program runs on both; it takes the two functions as an argument.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from callback_engines import ENGINES, FLAVORS, JAX, Api, Engine, assert_same, failure, like
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples

pytestmark = ENGINES


def test_programs_hold_a_name_of_callgates_and_no_callback_of_jaxs(engine: Engine) -> None:
  with engine() as api:
    lowered = jax.jit(lambda x: api.pure_callback(np.sin, like(x), x)).lower(1.0)
    assert "callgate.gate" in lowered.as_text()
    assert "xla_ffi_python_cpu_callback" not in lowered.as_text()


# -- values ----------------------------------------------------------------------------------------

DTYPES = [
  *(bool, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32),
  *(np.float16, np.float32, np.complex64, ml_dtypes.bfloat16),
  *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
  *(ml_dtypes.int2, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn),
]
DTYPES_X64 = [np.int64, np.uint64, np.float64, np.complex128]


@FLAVORS
def test_every_dtype_goes_in_and_out_unchanged(engine: Engine, flavor: str) -> None:
  values = np.array([[1, 1, 0.5], [1, 0.5, 1]])  # 0 is no float8_e8m0fnu
  xs = {np.dtype(dtype).name: values.astype(dtype) for dtype in DTYPES}

  def program(api: Api) -> Any:
    seen: dict[str, str] = {}

    def call(name: str, x: Any) -> Any:
      def callback(x: jax.Array) -> jax.Array:
        seen[name] = str(x.dtype)
        return x

      return api.call(flavor, callback, like(x), x)

    out = jax.jit(lambda xs: {name: call(name, x) for name, x in xs.items()})(xs)
    jax.block_until_ready(out)
    assert seen == {name: name for name in xs}
    return out

  for name, out in assert_same(engine, program).items():
    np.testing.assert_array_equal(out, xs[name], err_msg=name)


@FLAVORS
def test_64_bit_types_pass_when_x64_is_enabled(engine: Engine, flavor: str) -> None:
  with jax.enable_x64(True):
    xs = [np.array([1, 2**40 + 1, 3]).astype(dtype) for dtype in DTYPES_X64]
    call = lambda api, x: api.call(flavor, lambda x: x + x, like(x), x)
    found = assert_same(engine, lambda api: jax.jit(lambda xs: [call(api, x) for x in xs])(xs))
    for x, out in zip(xs, found, strict=True):
      np.testing.assert_array_equal(out, x + x, err_msg=str(x.dtype))


def test_every_value_of_a_sub_byte_type_survives(engine: Engine) -> None:
  x = np.arange(-8, 8).astype(ml_dtypes.int4)
  y = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)

  def program(api: Api) -> Any:
    return jax.jit(lambda *a: api.pure_callback(lambda *a: a, jax.tree.map(like, a), *a))(x, y)

  got_x, got_y = assert_same(engine, program)
  np.testing.assert_array_equal(got_x, x)
  np.testing.assert_array_equal(
    np.signbit(np.asarray(got_y).astype("f4")), np.signbit(y.astype("f4"))
  )


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (5,), (2, 3, 4)], ids=str)
def test_every_shape_goes_in_and_out(engine: Engine, shape: tuple[int, ...]) -> None:
  x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

  def program(api: Api) -> Any:
    shapes: list[Any] = []

    def callback(x: jax.Array) -> Any:
      shapes.append(x.shape)
      return np.asarray(x), np.float32(x.size)

    out = jax.jit(lambda x: api.pure_callback(callback, (like(x), like(np.float32(0))), x))(x)
    return *out, shapes

  assert_same(engine, program)


@FLAVORS
def test_pytrees_and_keyword_arguments_keep_their_structure(engine: Engine, flavor: str) -> None:
  def callback(a: Any, *, b: Any, c: Any = None) -> Any:
    assert c is None
    assert isinstance(a, dict)
    assert isinstance(b, tuple)
    return {"sum": a["x"] + b[0], "rest": [b[1], None]}

  def program(api: Api) -> Any:
    def f(x: Any, y: Any) -> Any:
      out = {"sum": like(x), "rest": [like(y), None]}
      return api.call(flavor, callback, out, {"x": x}, b=(x, y), c=None)

    return jax.jit(f)(jnp.arange(3.0), jnp.arange(2))

  assert_same(engine, program)


class Foreign:
  """An array of another library: all it has is __array__."""

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
    return np.full((2,), 7, np.float32)


@FLAVORS
def test_results_are_canonicalised_as_jax_does(engine: Engine, flavor: str) -> None:
  values: dict[str, Any] = {
    "python": (1.0, 2.0),
    "numpy64": [np.float64(1), np.int64(2)],
    "ints": [3, True],
    "foreign": (Foreign(), np.ones((2,))),
    "strided": [np.asfortranarray(np.ones((2, 3))), np.arange(12.0).reshape(2, 3, 2)[:, ::-1, 1]],
  }

  def of(value: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(value).dtype)
    return jax.ShapeDtypeStruct(np.shape(value), dtype)

  def program(api: Api) -> Any:
    call = lambda value: api.call(flavor, lambda: value, jax.tree.map(of, value))
    return jax.jit(lambda: {name: call(value) for name, value in values.items()})()

  assert_same(engine, program)


@given(
  shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4),
  flavor=st.sampled_from(["pure", "unordered", "ordered"]),
)
@examples(6)
def test_any_number_of_arguments_and_results_works(
  engine: Engine, shapes: list[list[int]], flavor: str
) -> None:
  arrays = [np.arange(np.prod(shape), dtype=np.int32).reshape(shape) for shape in shapes]

  def program(api: Api) -> Any:
    def f(*xs: Any) -> Any:
      return api.call(
        flavor, lambda *xs: [x + 1 for x in reversed(xs)], [like(x) for x in xs[::-1]], *xs
      )

    return jax.jit(f)(*arrays)

  assert_same(engine, program)


# -- what the callback sees ------------------------------------------------------------------------


@FLAVORS
@pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])
def test_callbacks_receive_the_arrays_that_jax_gives(
  engine: Engine, flavor: str, eager: bool
) -> None:
  values = [1.5, 3, True, np.float32(2), np.arange(6).reshape(2, 3)]

  def program(api: Api) -> Any:
    seen: list[list[Any]] = [[] for _ in values]

    def call(index: int, x: Any) -> Any:
      def callback(x: jax.Array) -> np.float32:
        kinds = x.weak_type, x.committed, x.sharding, x.aval, x.aval.sharding
        seen[index].append((type(x), x.dtype, x.shape, *kinds))
        return np.float32(x.sum())

      return api.call(flavor, callback, like(np.float32(0)), x)

    f = lambda *values: [call(index, value) for index, value in enumerate(values)]
    f = f if eager else jax.jit(f)
    jax.block_until_ready([f(*values) for _ in range(3)])
    jax.effects_barrier()
    assert [len(calls) for calls in seen] == [3] * len(values)
    assert all(calls[0] == calls[1] == calls[2] for calls in seen)
    return [calls[0] for calls in seen]

  expected = program(JAX)
  with engine() as api:
    assert program(api) == expected


def test_a_prng_key_arrives_as_its_words(engine: Engine) -> None:
  def program(api: Api) -> Any:
    return jax.jit(
      lambda k: api.pure_callback(lambda k: k, jax.ShapeDtypeStruct((2,), np.uint32), k)
    )(jax.random.key(7))

  np.testing.assert_array_equal(
    assert_same(engine, program), jax.random.key_data(jax.random.key(7))
  )


@FLAVORS
def test_arrays_may_be_kept_for_ever(engine: Engine, flavor: str) -> None:
  kept: list[jax.Array] = []

  def callback(small: jax.Array, large: jax.Array) -> jax.Array:
    kept.extend([small, large])
    return small

  with engine() as api:

    @jax.jit
    def f(i: Any) -> Any:
      large = jnp.full((1 << 20,), i, jnp.float32)
      return api.call(flavor, callback, like(i), i, large)

    for i in range(8):
      f(np.float32(i)).block_until_ready()
    jax.effects_barrier()
  for i in range(8):
    assert float(kept[2 * i]) == i
    np.testing.assert_array_equal(kept[2 * i + 1], np.full((1 << 20,), i, np.float32))


def test_the_result_may_be_the_argument_itself(engine: Engine) -> None:
  def program(api: Api) -> Any:
    return jax.jit(lambda x: api.pure_callback(lambda x: x, like(x), x) + x)(jnp.arange(1000.0))

  assert_same(engine, program)


def test_the_default_device_is_the_cpu_inside_and_what_it_was_outside(engine: Engine) -> None:
  cpu = jax.local_devices(backend="cpu")[0]
  inside: list[Any] = []

  def callback(x: jax.Array) -> jax.Array:
    inside.append(jax.config.jax_default_device)
    inside.append(jnp.zeros(()).devices())
    if x > 0:
      raise ValueError("stop")
    return x

  with engine() as api:
    f = jax.jit(lambda x: api.pure_callback(callback, like(x), x))
    f(-1.0).block_until_ready()
    assert inside == [cpu, {cpu}]
    failure(lambda _: f(1.0), api)
  assert jax.config.jax_default_device is None


def test_a_callback_may_run_jax_programs(engine: Engine) -> None:
  inner = jax.jit(lambda x: jnp.linalg.norm(x @ x.T))

  def program(api: Api) -> Any:
    x = jnp.arange(16.0).reshape(4, 4)
    return jax.jit(lambda x: api.pure_callback(inner, like(np.float32(0)), x))(x)

  assert_same(engine, program)


# -- transfers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("flavor", ["pure", "unordered"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_arguments_are_explicit_transfers_as_in_jax(
  engine: Engine, flavor: str, everywhere: bool, level: str
) -> None:
  """Under "disallow" callbacks run, in first and later calls; under the other none does."""
  x = jax.block_until_ready(jnp.arange(3.0))

  def outcomes(api: Api) -> list[str]:
    def add(*arrays: Any) -> Any:
      return sum(map(np.asarray, arrays))

    def program(x: Any) -> Any:
      return api.call(flavor, add, like(x), x) + api.call(flavor, add, like(x), x, x)

    call = jax.jit(program)
    jax.block_until_ready(call(x))
    before = jax.config.jax_transfer_guard
    found: list[str] = []
    for _ in range(3):
      try:
        if everywhere:
          jax.config.update("jax_transfer_guard", level)
          jax.block_until_ready(call(x))
        else:
          with jax.transfer_guard(level):
            jax.block_until_ready(call(x))
        found.append("runs")
      except (jax.errors.JaxRuntimeError, ValueError) as error:
        found.append("disallowed" if "Disallowed host-to-device" in str(error) else str(error))
      finally:
        if everywhere:
          jax.config.update("jax_transfer_guard", before or "allow")
    return found

  expected = outcomes(JAX)
  with engine() as api:
    assert outcomes(api) == expected
  assert expected == ["runs" if level == "disallow" else "disallowed"] * 3
