# SPDX-License-Identifier: Apache-2.0
"""JAX's callbacks on callgate's engine under transformations, when they fail, and from threads.

The same program runs on JAX's own engine; it takes the two functions as an argument.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from callback_engines import (
  ENGINES,
  FLAVORS,
  JAX,
  Api,
  Engine,
  Program,
  assert_same,
  assert_same_failure,
  failure,
  like,
)

pytestmark = ENGINES


# -- transformations -------------------------------------------------------------------------------

METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized"]


@pytest.mark.parametrize("method", METHODS)
def test_vmap_shows_the_callback_the_same_shapes(engine: Engine, method: str) -> None:
  def program(api: Api) -> Any:
    def called(*in_axes: int | None) -> tuple[Any, list[Any]]:
      # Lanes of 3: an unbatched argument has no lane axis.
      x, y = (np.arange(3.0 if axis is None else 9.0, dtype="f4") for axis in in_axes)
      x, y = (a.reshape(-1, 3) if a.size == 9 else a for a in (x, y))
      shapes: list[Any] = []

      def callback(x: jax.Array, y: jax.Array) -> Any:
        shapes.append((x.shape, y.shape))
        shape = max(x.shape, y.shape, key=lambda shape: (len(shape), shape))
        return np.broadcast_to(np.asarray(x) * 2 + np.asarray(y), shape)

      def f(x: Any, y: Any) -> Any:
        return api.pure_callback(callback, like(x), x, y, vmap_method=method)

      return jax.vmap(f, in_axes=in_axes)(x, y), shapes

    seen: list[list[Any]] = []

    @jax.jit
    def all_axes() -> list[Any]:
      cases = [called(*axes) for axes in ((0, 0), (1, 0), (0, None), (None, 1))]
      seen.extend(shapes for _, shapes in cases)
      return [out for out, _ in cases]

    return jax.block_until_ready(all_axes()), seen

  assert_same(engine, program)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_nested_vmap_composes(engine: Engine, method: str) -> None:
  def program(api: Api) -> Any:
    def f(x: Any, y: Any) -> Any:
      return api.pure_callback(lambda x, y: x * y, like(x), x, y, vmap_method=method)

    return jax.vmap(jax.vmap(f, (0, None)), (None, 0))(jnp.arange(3.0), jnp.arange(4.0))

  assert_same(engine, program)


def test_vmap_without_a_method_is_the_same_error(engine: Engine) -> None:
  def program(api: Api) -> Any:
    return jax.vmap(lambda x: api.pure_callback(np.sin, like(x), x))(jnp.arange(3.0))

  actual, expected = assert_same_failure(engine, program)
  assert actual == expected


@pytest.mark.parametrize(
  "transform", [jax.grad, jax.jacfwd, lambda f: jax.linear_transpose(f, 1.0)]
)
@FLAVORS
def test_differentiating_is_the_same_error(engine: Engine, flavor: str, transform: Any) -> None:
  def program(api: Api) -> Any:
    return transform(lambda x: api.call(flavor, np.sin, like(x), x))(1.0)

  actual, expected = assert_same_failure(engine, program)
  assert actual == expected


@pytest.mark.parametrize(
  "program",
  [
    lambda api: api.pure_callback(np.sin, like(1.0), 1.0, vmap_method="loop"),
    lambda api: api.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float64), 1.0),
    lambda api: api.io_callback(np.sin, jax.ShapeDtypeStruct((), np.float64), 1.0),
    lambda api: jax.vmap(lambda x: api.io_callback(np.sin, like(x), x, ordered=True))(jnp.ones(2)),
  ],
  ids=["unknown method", "pure float64", "io float64", "vmap of ordered"],
)
def test_misuse_is_the_same_error(engine: Engine, program: Program) -> None:
  actual, expected = assert_same_failure(engine, program)
  assert actual == expected


@FLAVORS
def test_control_flow_calls_once_per_execution_of_the_place(engine: Engine, flavor: str) -> None:
  def program(api: Api) -> Any:
    calls: list[float] = []

    def note(x: jax.Array) -> jax.Array:
      calls.append(float(x))
      return x + 1

    def call(x: Any) -> Any:
      return api.call(flavor, note, like(x), x)

    @jax.jit
    def f(x: Any) -> Any:
      x, _ = jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)
      x = jax.lax.while_loop(lambda c: c < 6, call, x)
      x = jax.lax.cond(x > 0, call, lambda c: c, x)
      return jax.lax.switch(1, [call, lambda c: c * 2, call], x)

    out = f(0.0).block_until_ready()
    jax.effects_barrier()
    return out, calls

  _, calls = assert_same(engine, program)
  assert calls == [0, 1, 2, 3, 4, 5, 6]


def test_an_unused_pure_callback_never_runs_and_an_unused_io_callback_does(engine: Engine) -> None:
  def program(api: Api) -> Any:
    calls: list[str] = []

    @jax.jit
    def f(x: Any) -> Any:
      api.pure_callback(lambda x: calls.append("pure") or x, like(x), x)
      api.io_callback(lambda x: calls.append("io") or x, like(x), x)
      api.io_callback(lambda: calls.append("bare"), None)
      return x

    f(1.0).block_until_ready()
    jax.effects_barrier()
    return sorted(calls)

  with engine() as api:
    assert program(api) == ["bare", "io"]


def test_ordered_callbacks_keep_program_order_within_and_across_programs(engine: Engine) -> None:
  calls: list[tuple[str, int]] = []

  def note(name: str) -> Callable[..., None]:
    return lambda i: calls.append((name, int(i)))

  with engine() as api:

    @jax.jit
    def f(i: Any) -> Any:
      api.io_callback(note("first"), None, i, ordered=True)
      jax.lax.fori_loop(
        0, 3, lambda k, _: api.io_callback(note("loop"), None, k, ordered=True), None
      )
      api.io_callback(note("last"), None, i, ordered=True)

    for i in range(20):
      f(i)
    jax.effects_barrier()
  loop = [("loop", 0), ("loop", 1), ("loop", 2)]
  assert calls == [call for i in range(20) for call in (("first", i), *loop, ("last", i))]


@pytest.mark.parametrize("in_axes", [0, 1])
def test_vmap_of_an_unordered_io_callback_runs_each_lane_once(engine: Engine, in_axes: int) -> None:
  def program(api: Api) -> Any:
    calls: list[Any] = []
    f = jax.vmap(
      lambda x: api.io_callback(lambda x: calls.append(x.tolist()) or x, like(x), x),
      in_axes=in_axes,
    )
    out = jax.jit(f)(jnp.arange(6.0).reshape(2, 3)).block_until_ready()
    jax.effects_barrier()
    return out, calls

  assert_same(engine, program)


def test_custom_derivatives_around_a_callback_work(engine: Engine) -> None:
  def program(api: Api) -> Any:
    @jax.custom_jvp
    def sin(x: Any) -> Any:
      return api.pure_callback(np.sin, like(x), x, vmap_method="expand_dims")

    @sin.defjvp
    def _(primals: Any, tangents: Any) -> Any:
      (x,), (dx,) = primals, tangents
      cos = api.pure_callback(np.cos, like(x), x, vmap_method="expand_dims")
      return sin(x), dx * cos

    return jax.jit(jax.vmap(jax.value_and_grad(jax.checkpoint(sin))))(jnp.arange(5.0))

  assert_same(engine, program)


# -- failures --------------------------------------------------------------------------------------


SHAPE = "Incorrect output shape for return value #0:"
DTYPE = "Incorrect output dtype for return value #0:"
NUMBER = "Mismatched number of outputs from callback."


def raises(x: jax.Array) -> Any:
  raise KeyError("the reason")


@FLAVORS
@pytest.mark.parametrize(
  ("callback", "text"),
  [
    (raises, "KeyError: 'the reason'"),
    (lambda x: np.zeros((3,), np.float32), f"{SHAPE} Expected: (2,), Actual: (3,)"),
    (lambda x: np.zeros((2,), np.int32), f"{DTYPE} Expected: float32, Actual: int32"),
    (lambda x: (x, x), f"{NUMBER} Expected: 1, Actual: 2"),
    (lambda x: None, f"{NUMBER} Expected: 1, Actual: 0"),
    (lambda x: object(), "is not a valid JAX array type"),
    (lambda: 0, "takes 0 positional arguments but 1 was given"),
  ],
  ids=["raises", "shape", "dtype", "too many", "none", "object", "arguments"],
)
def test_failures_have_jaxs_type_and_text(
  engine: Engine, flavor: str, callback: Callable[..., Any], text: str
) -> None:
  def program(api: Api) -> Any:
    x = jnp.arange(2.0)
    return jax.jit(lambda x: api.call(flavor, callback, like(x), x))(x)

  actual, expected = assert_same_failure(engine, program)
  assert text in expected
  assert text in actual
  assert "Traceback (most recent call last)" in actual


@FLAVORS
def test_a_failure_is_logged_as_jax_logs_it(
  engine: Engine, flavor: str, caplog: pytest.LogCaptureFixture
) -> None:
  def record(api: Api) -> Any:
    caplog.clear()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      jax.jit(lambda x: api.call(flavor, raises, like(x), x))(1.0).block_until_ready()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      jax.effects_barrier()
    return [
      (r.name, r.levelname, r.getMessage(), r.exc_info is not None and r.exc_info[0])
      for r in caplog.records
    ]

  expected = record(JAX)
  with engine() as api:
    assert record(api) == expected
  assert len(expected) == 1


@FLAVORS
def test_programs_run_again_after_a_failure(engine: Engine, flavor: str) -> None:
  def callback(x: jax.Array) -> jax.Array:
    if x < 0:
      raise ValueError("negative")
    return x

  with engine() as api:
    f = jax.jit(lambda x: api.call(flavor, callback, like(x), x))
    assert f(1.0) == 1
    assert "negative" in str(failure(lambda _: f(-1.0), api))
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      f(2.0).block_until_ready()  # an ordered one finds the failed token first
    assert f(3.0) == 3


# -- threads and lifetimes -------------------------------------------------------------------------


@FLAVORS
def test_many_threads_call_at_once(engine: Engine, flavor: str) -> None:
  with engine() as api:
    f = jax.jit(lambda x: api.call(flavor, lambda x: x * 2, like(x), x))
    f(jnp.zeros(3)).block_until_ready()
    wrong: list[Any] = []

    def work(seed: int) -> None:
      for i in range(50):
        x = np.full((3,), seed * 1000 + i, np.float32)
        out = np.asarray(f(x))
        if not np.array_equal(out, 2 * x):
          wrong.append((x, out))
      jax.effects_barrier()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert wrong == []


def test_equal_callbacks_compile_once(engine: Engine) -> None:
  def callback(x: jax.Array) -> jax.Array:
    return 2 * x

  with engine() as api:
    events: list[str] = []

    def listener(event: str, *_: Any, **__: Any) -> None:
      events.append(event)

    api.pure_callback(callback, like(1.0), 1.0)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
      for _ in range(3):
        api.pure_callback(callback, like(1.0), 1.0)
    finally:
      jax.monitoring.unregister_event_duration_listener(listener)
    assert not [event for event in events if "compile" in event]
