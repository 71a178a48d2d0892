# SPDX-License-Identifier: Apache-2.0
"""`callgate.compat.host_callback_2023`: taps, printing, barriers; no transformations."""

from __future__ import annotations

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hcb_streams import lines

from callgate.compat import host_callback_2023 as hcb

both = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])


def quiet(caplog):
  """Exceptions of functions are logged, too; they are expected here."""
  caplog.set_level("CRITICAL", logger="callgate")


# -- taps ------------------------------------------------------------------------------------------
@both
def test_the_function_gets_the_pytree_and_no_transforms(jit):
  seen = []
  value = {"b": jnp.arange(3), "a": (jnp.float32(1), [jnp.ones((2, 0))])}
  out = jit(lambda x: hcb.id_tap(lambda *args: seen.append(args), x))(value)
  hcb.barrier_wait()
  assert jax.tree.structure(out) == jax.tree.structure(value)
  ((arg, transforms),) = seen
  assert transforms == ()
  assert jax.tree.structure(arg) == jax.tree.structure(value)
  jax.tree.map(np.testing.assert_array_equal, arg, jax.tree.map(np.asarray, value))


@both
@pytest.mark.parametrize("arg", [None, (), {}])
def test_a_tap_of_nothing_is_called_too(jit, arg):
  seen = []

  def f(x):
    hcb.id_tap(lambda arg, _: seen.append(arg), arg)
    return hcb.id_tap(lambda arg, _: seen.append(arg), arg, result=x)

  assert jit(f)(3.0) == 3.0
  hcb.barrier_wait()
  assert seen == [arg, arg]


@both
def test_taps_run_in_order_even_if_nothing_uses_them(jit):
  seen = []

  def f(x):
    for i in range(20):
      hcb.id_tap(functools.partial(lambda i, v, _: seen.append((i, int(v))), i), x)
    return x

  jit(f)(1)
  jit(f)(2)
  hcb.barrier_wait()
  assert seen == [(i, n) for n in (1, 2) for i in range(20)]


@both
def test_keywords_are_an_error_that_says_what_stands_for_them(jit):
  with pytest.raises(TypeError, match=r"Support for \*\*kwargs in ``id_tap``.*partial\(.*y=\.\.\."):
    jit(lambda x: hcb.id_tap(print, x, y=2))(1)


@pytest.mark.parametrize(
  "dtype",
  ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32",
   "complex64", "int4", "float8_e4m3fn"],
)  # fmt: skip
def test_every_dtype_passes(dtype):
  seen = []
  value = [np.arange(n).reshape(-1, 2).astype(jnp.dtype(dtype)) for n in (0, 2, 6)]
  out = jax.jit(lambda x: hcb.id_tap(lambda v, _: seen.append(v), x))(value)
  hcb.barrier_wait()
  for got, back, want in zip(seen[0], out, value, strict=True):
    assert got.dtype == back.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.astype("complex64"), want.astype("complex64"))


def test_random_keys_pass():
  seen = []
  key = jax.random.key(3)
  out = jax.jit(lambda k: hcb.id_tap(lambda v, _: seen.append(v), k))(key)
  hcb.barrier_wait()
  assert jax.random.key_data(out).tolist() == jax.random.key_data(key).tolist() == seen[0].tolist()


def test_the_device_comes_on_request(show, stream):
  seen = []
  f = lambda x: hcb.id_tap(lambda v, t, *, device: seen.append(device), x, tap_with_device=True)
  jax.jit(f)(1)
  show(1, tap_with_device=True, what="x")
  hcb.barrier_wait()
  assert seen == [jax.devices()[0]]
  assert stream.taken() == [f"device: {jax.devices()[0]} what: x", "1"]


def test_equal_prints_share_a_program(show):
  counted = []

  def count(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
      counted.append(event)

  jax.monitoring.register_event_duration_secs_listener(count)
  try:
    for _ in range(3):
      show(jnp.arange(13), what="same")
    hcb.barrier_wait()
  finally:
    jax.monitoring.unregister_event_duration_listener(count)
  assert len(counted) <= 2  # of jnp.arange, and of the print


# -- printing --------------------------------------------------------------------------------------
@both
def test_printing_fills_a_line_where_it_fits(jit, show, stream):
  jit(lambda x: show((x, [x, x]), b=1, a="x"))(jnp.float32(3))
  jit(lambda x: show({"b": x, "a": ()}))(jnp.float32(3))
  jit(lambda x: show({"b": jnp.zeros(20, int), "a": (x, jnp.zeros(20, int))}))(jnp.float32(3))
  jit(lambda x: show([jnp.arange(4).reshape(2, 2), x]))(jnp.float32(3))
  hcb.barrier_wait()
  zeros = str(np.zeros(20, int))
  assert stream.taken() == lines(
    f"""
    a: x b: 1
    ( 3. [ 3. 3. ] )
    {{ a=(  ) b=3. }}
    {{ a=( 3. {zeros} )
      b={zeros} }}
    [ [[0 1]
       [2 3]]
      3. ]
    """
  )


def test_printing_goes_to_standard_output(capfd):
  hcb.id_print(jnp.arange(5), threshold=3)
  hcb.barrier_wait()
  assert np.array2string(np.arange(5), threshold=3) in capfd.readouterr().out


# -- barriers --------------------------------------------------------------------------------------
def test_the_barrier_raises_with_the_last_traceback(caplog):
  quiet(caplog)

  def bad(value, _):
    raise ValueError(f"number {int(value)}")

  f = jax.jit(lambda x: hcb.id_tap(bad, x) + 1)
  assert (f(1), f(2)) == (2, 3)  # the programs are not held up
  with pytest.raises(hcb.CallbackException, match=r"(?s)'mine'.*\(2\).*bad.*ValueError: number 2"):
    hcb.barrier_wait("mine")
  hcb.barrier_wait()  # once


def test_the_barrier_waits_for_programs_of_other_threads_and_several_may_wait():
  seen = []
  started, go_on = threading.Event(), threading.Event()

  def slow(value, _):
    started.set()
    go_on.wait(60)
    seen.append(int(value))

  program = threading.Thread(target=lambda: jax.jit(lambda x: hcb.id_tap(slow, x))(7))
  program.start()
  assert started.wait(60)
  ends = []
  waiting = [
    threading.Thread(target=lambda: (hcb.barrier_wait(), ends.append(list(seen)))) for _ in range(3)
  ]
  for thread in waiting:
    thread.start()
  go_on.set()
  for thread in [program, *waiting]:
    thread.join(60)
  assert ends == [[7]] * 3


def test_a_tap_may_run_programs_with_taps():
  seen = []
  inner = jax.jit(lambda x: hcb.id_tap(lambda v, _: seen.append(("inner", int(v))), x * 2))

  def outer(value, _):
    seen.append(("outer", int(value)))
    inner(value)

  jax.jit(lambda x: hcb.id_tap(outer, x))(3)
  hcb.barrier_wait()
  assert seen == [("outer", 3), ("inner", 6)]


# -- the names and the waiting of programs written for the last form -------------------------------
@both
def test_jaxs_own_barrier_waits_for_taps_and_leaves_what_they_raised(jit, caplog):
  quiet(caplog)
  seen = []

  def slow(value, _):
    time.sleep(0.05)
    seen.append(int(value))
    raise KeyError("for barrier_wait")

  f = jit(lambda x: hcb.id_tap(slow, x) * 2)
  for i in range(3):
    f(i)
  jax.effects_barrier()
  assert seen == [0, 1, 2]
  with pytest.raises(hcb.CallbackException, match="for barrier_wait"):
    hcb.barrier_wait()


@both
@pytest.mark.parametrize("flavor", hcb.CallbackFlavor)
def test_all_flavors_are_served_alike(jit, flavor, show, stream):
  def f(x):
    seen = hcb.id_tap(lambda *_: None, x, callback_flavor=flavor)
    show(seen, callback_flavor=flavor)
    return hcb.call(np.sin, seen, result_shape=seen, callback_flavor=flavor)

  np.testing.assert_allclose(jit(f)(jnp.float32(1)), np.sin(1), rtol=1e-6)
  hcb.barrier_wait()
  assert stream.taken() == ["1."]


@pytest.mark.parametrize("function", ["id_tap", "id_print", "call"])
def test_a_flavor_that_is_none_is_an_error(function):
  given = {"id_tap": (print, 1), "id_print": (1,), "call": (np.sin, 1)}[function]
  with pytest.raises(TypeError, match="callback_flavor: expected a CallbackFlavor, got 'pure'"):
    getattr(hcb, function)(*given, callback_flavor="pure")
