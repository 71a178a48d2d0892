# SPDX-License-Identifier: Apache-2.0
"""`callgate.compat.host_callback_2023.call`: the program waits for the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from callgate.compat import host_callback_2023 as hcb

both = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])


def empty(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


@both
def test_any_pytree_goes_both_ways(jit):
  def host(arg):
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(arg))
    x, (y,) = arg["x"], arg["y"]
    return [{"sum": x + y}, (y, x)]

  @jit
  def f(x):
    shape = [{"sum": x}, (x, x)]
    return hcb.call(host, {"x": x, "y": (2 * x,)}, result_shape=shape)

  x = jnp.arange(24, dtype=jnp.int32).reshape(2, 3, 4)
  out = f(x)
  np.testing.assert_array_equal(out[0]["sum"], 3 * x)
  np.testing.assert_array_equal(out[1][0], 2 * x)
  np.testing.assert_array_equal(out[1][1], x)


@both
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "bfloat16", "complex64"])
def test_dtypes_go_both_ways(jit, dtype):
  x = jnp.arange(6).reshape(2, 3).astype(dtype)
  out = jit(lambda x: hcb.call(lambda x: x[::-1], x, result_shape=x))(x)
  assert out.dtype == x.dtype
  np.testing.assert_array_equal(out, x[::-1])


@both
def test_empty_arrays_no_argument_and_no_result(jit):
  seen = []
  assert jit(lambda: hcb.call(lambda a: np.float32(len(a)), (), result_shape=empty()))() == 0
  out = jit(
    lambda x: hcb.call(
      lambda x: (x, np.ones(1, np.float32), np.ones(0, np.float32)),
      x,
      result_shape=(empty(2, 0), empty(1), empty(0)),
    )
  )(jnp.ones((2, 0)))
  assert [one.shape for one in out] == [(2, 0), (1,), (0,)]
  assert jit(lambda x: hcb.call(lambda x: seen.append(int(x)), x))(7) is None
  hcb.barrier_wait()
  assert seen == [7]


def test_scalars_describe_a_result_and_python_numbers_are_results():
  shape = {"a": 0.0, "b": 0}
  out = jax.jit(lambda x: hcb.call(lambda x: {"a": 2.5, "b": 3}, x, result_shape=shape))(1)
  assert out == {"a": 2.5, "b": 3}


def test_it_runs_in_loops_and_in_the_taken_branch():
  def host(args):
    x, i = args
    return x * i.astype(np.float32)

  def loop(x, multiply):
    def body(i, acc):
      return jax.lax.cond(i % 2 == 1, lambda: multiply((acc, i)), lambda: acc)

    return jax.lax.fori_loop(0, 9, body, x)

  want = loop(1.5, lambda args: args[0] * args[1].astype(jnp.float32))
  assert jax.jit(lambda x: loop(x, lambda args: hcb.call(host, args, result_shape=x)))(1.5) == want


def test_the_argument_may_be_kept():
  kept = []
  f = jax.jit(lambda x: hcb.call(lambda x: (kept.append(x), x)[1], x * 2, result_shape=x))
  for n in range(5):
    f(jnp.full(100, n, jnp.float32)).block_until_ready()
  assert [array[0] for array in kept] == [0, 2, 4, 6, 8]


def test_three_eager_calls_compile_once():
  counted = []

  def count(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
      counted.append(event)

  def host(x):
    return 2 * x

  x = np.arange(26, dtype=np.int32).reshape(2, 13)  # a shape of this test's own
  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    for _ in range(3):
      np.testing.assert_array_equal(hcb.call(host, x, result_shape=x), 2 * x)
  finally:
    jax.monitoring.unregister_event_duration_listener(count)
  assert len(counted) == 1


def test_a_numpy_array_may_change_after_an_eager_call():
  x = np.arange(4096, dtype=np.float64)
  result = hcb.call(lambda x: x, x, result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
  x += 1
  np.testing.assert_array_equal(result, x - 1)


def test_the_device_comes_on_request():
  seen = []

  def host(x, *, device):
    seen.append(device)
    return x

  f = jax.jit(lambda x: hcb.call(host, x, result_shape=x, call_with_device=True))
  f(1.0).block_until_ready()
  assert seen == [jax.devices()[0]]


# -- errors ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
  ("shape", "leaf"), [("text", ""), (lambda x: x, ""), ({"a": 1.0, "b": ["text"]}, r"\['b'\]\[0\]")]
)
def test_a_bad_result_shape_is_an_error_that_names_the_leaf(shape, leaf):
  with pytest.raises(ValueError, match=rf"result_shape{leaf}: .*must have 'shape' and 'dtype'"):
    hcb.call(lambda x: x, 3.0, result_shape=shape)


@pytest.mark.parametrize(
  ("result", "message"),
  [
    ((1.0,), r"expected a result of structure .*'a'.*got PyTreeDef\(\(\*,\)\)"),
    (
      {"a": 1.0, "b": [np.zeros(3, np.float32)]},
      r"result\['b'\]\[0\]: expected float32\[2\], got float32\[3\]",
    ),
    (
      {"a": 1, "b": [np.zeros(2, np.float32)]},
      r"result\['a'\]: expected float32\[\], got int32\[\]",
    ),
  ],
)
def test_another_result_is_an_error_that_names_the_leaf(result, message, caplog):
  caplog.set_level("CRITICAL", logger="callgate")
  shape = {"a": 1.0, "b": [empty(2)]}
  with pytest.raises(jax.errors.JaxRuntimeError, match=message):
    jax.block_until_ready(jax.jit(lambda x: hcb.call(lambda _: result, x, result_shape=shape))(1.0))
  with pytest.raises(hcb.CallbackException, match=message):
    hcb.barrier_wait()


def test_another_structure_is_said_in_the_old_words(caplog):
  caplog.set_level("CRITICAL", logger="callgate")
  words = r"(?s)Callback func .* should have returned a result with pytree"
  with pytest.raises(jax.errors.JaxRuntimeError, match=words):
    jax.block_until_ready(jax.jit(lambda x: hcb.call(lambda x: (x, x), x, result_shape=x))(3.0))
  begins = r"(?s)^There were exceptions during callback processing\. Last one was:.*Callback func "
  with pytest.raises(hcb.CallbackException, match=begins):
    hcb.barrier_wait(logging_name="error")


@both
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_packed_types_go_both_ways_unpacked(jit, dtype):
  x = jnp.array([1, -3 if dtype == "int4" else 13, 7, 5, 0], dtype)

  def host(x):
    assert x.dtype == np.dtype(dtype)
    return {"back": x[::-1], "wide": x.astype(np.int32)}

  shape = {"back": x, "wide": jax.ShapeDtypeStruct(x.shape, jnp.int32)}
  out = jit(lambda x: hcb.call(host, x, result_shape=shape))(x)
  assert out["back"].dtype == x.dtype
  np.testing.assert_array_equal(np.asarray(out["back"]), np.asarray(x)[::-1])
  np.testing.assert_array_equal(out["wide"], np.asarray(x).astype(np.int32))


def test_the_exception_has_its_name_of_2020_too():
  assert hcb.TapFunctionException is hcb.CallbackException


def test_the_functions_exception_fails_the_program_and_reaches_the_barrier(caplog):
  caplog.set_level("CRITICAL", logger="callgate")

  def host(x):
    raise KeyError("lost")

  with pytest.raises(jax.errors.JaxRuntimeError, match="lost"):
    jax.block_until_ready(jax.jit(lambda x: hcb.call(host, x, result_shape=x))(1.0))
  with pytest.raises(hcb.CallbackException, match="KeyError: 'lost'") as caught:
    hcb.barrier_wait()
  assert isinstance(caught.value.__cause__, KeyError)


def test_vmap_and_differentiation_are_not_implemented():
  f = lambda x: hcb.call(lambda x: x, x, result_shape=x)
  with pytest.raises(NotImplementedError, match=r"batching .* only for id_tap, not for call"):
    jax.vmap(f)(jnp.ones(3))
  with pytest.raises(NotImplementedError, match=r"derivatives .* only for id_tap, not for call"):
    jax.grad(f)(1.0)
