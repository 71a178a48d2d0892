# SPDX-License-Identifier: Apache-2.0
"""`callgate.compat.host_callback`, the API of 2020: calls, layouts, receivers, errors."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hcb_streams import Stream, lines
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples

import callgate as cg
from callgate import _callgate
from callgate.compat import host_callback as hcb


def run(function, *args):
  """`jax.jit(function)(*args)` with a receiver."""
  with hcb.outfeed_receiver(receiver_name="test"):
    return jax.tree.map(np.asarray, jax.jit(function)(*args))


def eager(function, *args):
  return function(*args)


both = pytest.mark.parametrize("apply", [run, eager])


# -- what is called --------------------------------------------------------------------------------
@both
def test_the_function_gets_the_pytree_and_its_keywords(apply):
  seen = []
  value = {"w": jnp.arange(3.0), "b": (jnp.int32(1), [jnp.ones((2, 0))])}

  def note(arg, **kwargs):
    seen.append((arg, kwargs))

  out = apply(lambda x: hcb.id_tap(note, x, what="a", n=3), value)
  assert jax.tree.structure(out) == jax.tree.structure(value)
  ((arg, kwargs),) = seen
  assert kwargs == {"what": "a", "n": 3}
  assert jax.tree.structure(arg) == jax.tree.structure(value)
  for got, want in zip(jax.tree.leaves(arg), jax.tree.leaves(value), strict=True):
    assert type(got) is np.ndarray
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@both
def test_the_result_stands_for_the_argument(apply):
  seen = []
  out = apply(lambda x: hcb.id_tap(seen.append, (x, 2 * x), result={"r": x + 1}), jnp.float32(3))
  assert out == {"r": 4.0}
  assert seen == [(3.0, 6.0)]


def test_outside_jit_it_calls_at_once_in_the_callers_thread():
  threads = []
  hcb.id_tap(lambda _: threads.append(threading.current_thread()), 1)
  assert threads == [threading.current_thread()]


def test_a_tap_whose_result_is_unused_is_left_out():
  seen = []

  def f(x):
    hcb.id_tap(seen.append, x)
    return x + 1

  assert run(f, 1) == 2
  assert seen == []


def test_keywords_never_enter_the_program():
  def take(_, **kwargs):
    pass

  def text(what):
    return jax.jit(lambda x: hcb.id_tap(take, x, what=what)).lower(1.0).as_text()

  assert "needle" not in text("needle")


def test_keywords_that_are_equal_but_not_the_same_are_told_apart():
  seen = []

  def take(_, k):
    seen.append(repr(k))

  values = [1, 1.0, True, 0.0, -0.0, (1,), (1.0,), [1], {"a": np.float32(1)}]
  for k in values:
    run(lambda x, k=k: hcb.id_tap(take, x, k=k), 0)
  assert seen == [repr(k) for k in values]


def test_order_is_that_of_the_data():
  seen = []

  def f(x):
    for i in range(20):
      x = hcb.id_tap(lambda v, i: seen.append((i, int(v))), x + 1, i=i)
    return x

  assert run(f, 0) == 20
  assert seen == [(i, i + 1) for i in range(20)]


@pytest.mark.parametrize(
  "dtype",
  ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32",
   "complex64", "int4", "uint4", "float8_e4m3fn"],
)  # fmt: skip
def test_every_dtype_passes(dtype):
  seen = []
  shapes = [(), (2,), (2, 3), (2, 0, 4)]
  value = [np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype)) for shape in shapes]
  out = run(lambda x: hcb.id_tap(seen.append, x), value)
  for got, back, want in zip(seen[0], out, value, strict=True):
    assert got.dtype == back.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.astype("complex64"), want.astype("complex64"))


@examples(6)
@given(
  st.recursive(
    st.integers(0, 3).map(lambda n: np.arange(n, dtype=np.float32)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=5,
  )
)
def test_any_pytree_comes_back_as_it_was(value):
  seen = []
  out = run(lambda x: hcb.id_tap(seen.append, value, result=x), 1)
  assert out == 1
  assert jax.tree.structure(seen[0]) == jax.tree.structure(value)
  jax.tree.map(np.testing.assert_array_equal, seen[0], value)


def test_a_leaf_that_is_no_array_is_an_error_that_names_it():
  with pytest.raises(TypeError, match=r"id_tap: arg: leaf 1: expected an array, got str"):
    hcb.id_tap(print, (1, "x"))
  with pytest.raises(TypeError, match="func: expected a callable, got 3"):
    hcb.id_tap(3, 1)


# -- printing --------------------------------------------------------------------------------------
@both
def test_printing_lays_pytrees_out_in_the_form_of_2020(apply):
  stream = Stream()
  show = functools.partial(hcb.id_print, output_stream=stream)
  x = jnp.float32(3)
  apply(lambda x: show((x * 2, x * 3)), x)
  assert stream.taken() == ["[ 6.", "  9. ]"]
  apply(lambda x: show({"b": x, "a": [x, {"c": x}]}, what="w", nr=1), x)
  assert stream.taken() == lines(
    """
    nr: 1 what: w
    { a=[ 3.
          { c=3. } ]
      b=3. }
    """
  )
  apply(lambda x: show(jnp.arange(4).reshape(2, 2), result=x), x)
  assert stream.taken() == ["[[0 1]", " [2 3]]"]
  apply(lambda x: show([jnp.arange(4).reshape(2, 2), x]), x)
  assert stream.taken() == ["[ [[0 1]", "   [2 3]]", "  3. ]"]


def test_printing_summarises_above_the_threshold():
  stream = Stream()
  hcb.id_print(jnp.arange(100), threshold=10, output_stream=stream)
  assert stream.taken() == [np.array2string(np.arange(100), threshold=10)]


def test_printing_goes_to_standard_output(capsys):
  hcb.id_print(jnp.int32(7), what="x")
  assert capsys.readouterr().out == "what: x\n7\n"


# -- receivers -------------------------------------------------------------------------------------
def test_without_a_receiver_every_execution_is_an_error_and_compiling_is_none():
  seen = []
  f = jax.jit(lambda x: hcb.id_tap(seen.append, x))
  compiled = f.lower(1.0).compile()
  for _ in range(2):
    with pytest.raises(ValueError, match="outfeed_receiver is not started"):
      f(1.0)
    with pytest.raises(ValueError, match="outfeed receiver is not started"):
      compiled(1.0)
  with hcb.outfeed_receiver():
    assert f(1.0) == 1.0
    assert compiled(2.0) == 2.0
  with pytest.raises(ValueError, match="not started"):
    f(1.0)
  assert seen == [1.0, 2.0]


def test_a_missing_receiver_is_said_in_both_of_the_old_words():
  for words in ("outfeed_receiver is not started", "outfeed_consumer is not started"):
    with pytest.raises(ValueError, match=words):
      jax.jit(lambda x: hcb.id_print(x))(0)


def test_control_flow_outside_jit_needs_the_receiver_too():
  def f(x):
    return jax.lax.while_loop(lambda c: c < 3, lambda c: hcb.id_tap(lambda _: None, c) + 1, x)

  with pytest.raises(ValueError, match="outfeed_receiver is not started"):
    f(0)
  with hcb.outfeed_receiver():
    assert f(0) == 3


def test_backends_and_devices_together_are_an_error():
  with pytest.raises(ValueError, match="at most one of `backends` and `devices`"):
    hcb.outfeed_receiver(backends=["cpu"], devices=jax.devices())
  with hcb.outfeed_receiver(backends=["cpu"]):
    assert jax.jit(lambda x: hcb.id_tap(lambda _: None, x))(1) == 1


def test_a_second_receiver_for_a_device_is_an_error_and_the_first_stays():
  seen = []
  with hcb.outfeed_receiver(receiver_name="first"):
    with pytest.raises(ValueError, match="'first'"), hcb.outfeed_receiver():
      raise AssertionError("not reached")
    jax.jit(lambda x: hcb.id_tap(seen.append, x))(1)
  assert seen == [1]


def test_the_end_waits_for_the_time_given_and_says_what_is_outstanding():
  entered, go_on, seen = threading.Event(), threading.Event(), []

  def slow(value):
    entered.set()
    go_on.wait(60)
    seen.append(value)

  def held_up(x):
    with hcb.outfeed_receiver(receiver_name="mine", timeout_sec=0.2):
      jax.jit(lambda x: hcb.id_tap(slow, x))(x)
      entered.wait(60)

  try:
    with pytest.raises(TimeoutError, match=r"'mine'.*1 record\(s\) still waited.*slow"):
      held_up(1)
  finally:
    go_on.set()
  with hcb.outfeed_receiver():  # the device is free again, and nothing was lost
    jax.jit(lambda x: hcb.id_tap(seen.append, x))(2)
  assert seen == [1, 2]


def test_a_receiver_ends_cleanly_when_the_program_fails():
  @cg.gate(out=lambda x: x, effect="io")
  def fail(x):
    raise RuntimeError("broken")

  seen = []
  with pytest.raises(jax.errors.JaxRuntimeError, match="broken"), hcb.outfeed_receiver():
    jax.block_until_ready(jax.jit(lambda x: fail(hcb.id_tap(seen.append, x)))(1.0))
  with hcb.outfeed_receiver():
    jax.jit(lambda x: hcb.id_tap(seen.append, x))(2.0)
  assert seen == [1.0, 2.0]


def test_the_blocks_own_exception_comes_first_with_the_others_noted():
  def bad(_):
    raise ValueError("of the tap")

  def block():
    with hcb.outfeed_receiver():
      jax.jit(lambda x: hcb.id_tap(bad, x))(1.0)
      raise KeyError("of the block")

  with pytest.raises(KeyError, match="of the block") as caught:
    block()
  assert any("of the tap" in note for note in caught.value.__notes__)


# -- exceptions ------------------------------------------------------------------------------------
def _chain(stream, bad):
  def f(x):
    x = hcb.id_print(x + 1, what="x1", output_stream=stream)
    x = hcb.id_tap(bad, x + 1, what="err")
    return hcb.id_print(x + 1, what="x3", output_stream=stream)

  return f


def test_compiled_exceptions_are_postponed_and_all_of_them_attached():
  stream = Stream()

  def bad(x, what):
    raise NotImplementedError(what, int(x))

  results = []

  def block():
    with hcb.outfeed_receiver():
      f = jax.jit(_chain(stream, bad))
      results.extend([f(0), f(10)])

  with pytest.raises(hcb.TapFunctionException, match=r"2 tap\(s\)") as caught:
    block()
  assert results == [3, 13]
  assert stream.taken() == lines("what: x1\n1\nwhat: x3\n3\nwhat: x1\n11\nwhat: x3\n13")
  assert [e.args for e in caught.value.exceptions] == [("err", 2), ("err", 12)]
  assert caught.value.__cause__ is caught.value.exceptions[0]


def test_an_eager_exception_stops_at_that_call():
  stream = Stream()
  error = KeyError("no")

  def bad(*_, **__):
    raise error

  with pytest.raises(hcb.TapFunctionException, match="bad") as caught:
    _chain(stream, bad)(0)
  assert caught.value.__cause__ is error
  assert stream.taken() == ["what: x1", "1"]


@pytest.mark.parametrize("name", ["_unknown_testing_consumer", "_unknown_consumer"])
def test_an_unknown_consumer_is_postponed_too(name):
  stream = Stream()
  results = []

  def block():
    with hcb.outfeed_receiver():
      results.append(jax.jit(_chain(stream, getattr(hcb, name)))(0))

  with pytest.raises(hcb.TapFunctionException, match="not known here"):
    block()
  assert results == [3]
  assert stream.taken() == lines("what: x1\n1\nwhat: x3\n3")


def test_a_tap_may_run_programs_with_taps():
  seen = []
  inner = jax.jit(lambda x: hcb.id_tap(lambda v: seen.append(("inner", int(v))), x * 2))

  def outer(value):
    seen.append(("outer", int(value)))
    inner(value)

  with hcb.outfeed_receiver():
    jax.jit(lambda x: hcb.id_tap(outer, x))(3)
  assert seen == [("outer", 3), ("inner", 6)]


# -- the wire --------------------------------------------------------------------------------------
@pytest.mark.skipif(not hasattr(_callgate, "outfeed_2020_sink"), reason="no codec in this build")
def test_the_wire_has_what_was_tapped(tmp_path):
  path = tmp_path / "outfeed"
  x = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
  with hcb.outfeed_receiver(), hcb.outfeed_stream(path):
    f = jax.jit(lambda x: hcb.id_tap(lambda _: None, (x, x.astype(jnp.float32) / 2)))
    jax.block_until_ready([f(x), f(x + 1)])
    jax.block_until_ready(jax.jit(jax.vmap(lambda x: hcb.id_tap(lambda _, **__: None, x)))(x))
  messages = [m for m in _callgate.read_outfeed_2020(str(path)) if m[0] != 0]
  assert len(messages) == 3
  for (_, (a, b)), want in zip(messages, [x, x + 1], strict=False):
    np.testing.assert_array_equal(a, want)
    np.testing.assert_array_equal(b, want / 2)
  np.testing.assert_array_equal(messages[2][1][0], x)
  assert messages[0][0] == messages[1][0] != messages[2][0]


@pytest.mark.parametrize(
  ("option", "value"),
  [("timeout_sec", "x"), ("devices", [3]), ("backends", 3), ("backends", "cpu")],
)
def test_a_wrong_option_of_a_receiver_is_refused_and_the_next_one_starts(
  option: str, value: Any
) -> None:
  with pytest.raises(cg.GateDefinitionError, match=f"outfeed_receiver: {option}: expected"):
    hcb.outfeed_receiver(**{option: value})
  with hcb.outfeed_receiver():
    pass
