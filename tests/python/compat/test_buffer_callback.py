# SPDX-License-Identifier: Apache-2.0
"""`callgate.compat.buffer_callback` does what JAX's does, errors included.

Every program takes the module as an argument and runs on JAX's first: that is the oracle.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.experimental import buffer_callback as jaxs

import callgate as cg
from callgate._jax import callbacks
from callgate.compat import buffer_callback as ours

Program = Callable[[Any], Any]
F32 = np.float32


def assert_same(program: Program) -> Any:
  expected = jax.block_until_ready(program(jaxs))
  actual = jax.block_until_ready(program(ours))
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert np.asarray(got).dtype == np.asarray(want).dtype
    np.testing.assert_array_equal(got, want)
  return actual


def failure(program: Program, module: Any) -> BaseException:
  with pytest.raises(Exception) as info:  # noqa: PT012
    jax.block_until_ready(program(module))
    jax.effects_barrier()
  with contextlib.suppress(Exception):
    jax.effects_barrier()
  return info.value


def like(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def copy(_context: Any, out: Any, x: Any) -> None:
  np.copyto(np.asarray(out), np.asarray(x))


def test_the_program_holds_a_name_and_no_callback_of_jaxs() -> None:
  text = jax.jit(ours.buffer_callback(copy, like(1.0))).lower(1.0).as_text()
  assert "callgate.gate" in text
  assert "xla_buffer_python_cpu_callback" not in text


DTYPES = [
  *(bool, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32),
  *(np.float16, np.float32, np.complex64),
  *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


@pytest.mark.parametrize(
  ("dtype", "shape"),
  [*((dtype, (2, 3)) for dtype in DTYPES), *((np.int16, shape) for shape in [(), (3,), (0, 4)])],
  ids=str,
)
def test_every_dtype_and_shape_is_read_and_written_in_place(dtype: Any, shape: Any) -> None:
  x = np.ones(shape).astype(dtype)

  def program(module: Any) -> Any:
    seen: list[Any] = []

    def callback(context: Any, out: Any, x: Any) -> None:
      for buffer in (out, x):
        assert isinstance(buffer, module.Buffer)
        seen.append((buffer.shape, buffer.dtype, buffer.ndim, buffer.writeable))
      assert isinstance(context, module.ExecutionContext)
      assert context.stage == module.ExecutionStage.EXECUTE
      copy(context, out, x)

    out = module.buffer_callback(callback, like(x))(x)
    return out.block_until_ready(), [str(s) for s in seen]

  expected, actual = program(jaxs), program(ours)
  assert actual[1] == expected[1]
  np.testing.assert_array_equal(actual[0], expected[0])


def test_stages_are_jaxs_by_name() -> None:
  assert [s.name for s in ours.ExecutionStage] == [s.name for s in jaxs.ExecutionStage]


def test_the_stream_is_the_same_error_on_the_cpu() -> None:
  def program(module: Any) -> Any:
    texts: list[str] = []

    def callback(context: Any, out: Any, x: Any) -> None:
      with pytest.raises(jax.errors.JaxRuntimeError) as info:
        _ = context.stream
      texts.append(str(info.value))
      copy(context, out, x)

    module.buffer_callback(callback, like(1.0))(1.0).block_until_ready()
    return texts

  assert program(ours) == program(jaxs)


def test_inputs_are_seen_without_a_copy_and_dlpack_sees_them_too() -> None:
  def program(module: Any) -> Any:
    def callback(_context: Any, out: Any, x: Any) -> None:
      assert x.__dlpack_device__() == (1, 0)
      assert np.from_dlpack(x).ctypes.data == np.asarray(x).ctypes.data
      np.multiply(np.from_dlpack(x), 2, out=np.asarray(out))

    return module.buffer_callback(callback, like(np.zeros(5, F32)))(jnp.arange(5.0))

  assert_same(program)


@pytest.mark.parametrize("jit", [False, True])
def test_pytrees_and_keywords_keep_their_structure(jit: bool) -> None:
  x = {"a": jnp.arange(3.0), "b": (jnp.ones((2, 2)),)}

  def program(module: Any) -> Any:
    def callback(_context: Any, out: Any, tree: Any, *, scale: Any) -> None:
      np.multiply(np.asarray(tree["a"]), np.asarray(scale), out=np.asarray(out["double"]))
      np.copyto(np.asarray(out["rest"][0]), np.asarray(tree["b"][0]))

    results = {"double": like(x["a"]), "rest": [like(x["b"][0])]}
    call = module.buffer_callback(callback, results)
    return (jax.jit(call) if jit else call)(x, scale=np.float32(2))

  assert_same(program)


def test_a_callback_without_results_runs_for_its_side_effect() -> None:
  calls: list[int] = []
  call = ours.buffer_callback(
    lambda _context, out, x: calls.append(len(out) + int(np.asarray(x))), (), has_side_effect=True
  )
  assert jax.jit(call)(5) == ()
  jax.effects_barrier()
  assert calls == [5]


@pytest.mark.parametrize("has_side_effect", [False, True])
def test_an_unused_call_runs_only_with_a_side_effect(has_side_effect: bool) -> None:
  def program(module: Any) -> Any:
    calls: list[int] = []

    def callback(context: Any, out: Any, x: Any) -> None:
      calls.append(1)
      copy(context, out, x)

    call = module.buffer_callback(callback, like(1.0), has_side_effect=has_side_effect)

    @jax.jit
    def f(x: Any) -> Any:
      call(x)
      return x

    f(1.0).block_until_ready()
    jax.effects_barrier()
    return calls

  assert program(ours) == program(jaxs) == [1] * has_side_effect


# -- aliases ---------------------------------------------------------------------------------------
def test_aliased_buffers_are_one() -> None:
  def program(module: Any) -> Any:
    def callback(_context: Any, out: Any, x: Any, y: Any) -> None:
      assert np.asarray(out[1]).ctypes.data == np.asarray(x).ctypes.data
      np.asarray(out[1])[...] += 1
      copy(None, out[0], y)

    x, y = jnp.arange(4.0), jnp.ones(3)
    call = module.buffer_callback(callback, [like(y), like(x)], input_output_aliases={0: 1})
    return jax.jit(call)(x, y), x

  assert_same(program)


@pytest.mark.parametrize(
  "aliases", [{1: 0}, {0: 1}, {0: 0}], ids=["input range", "output range", "mismatch"]
)
def test_impossible_aliases_are_the_same_error(aliases: dict[int, int]) -> None:
  def program(module: Any) -> Any:
    result = jax.ShapeDtypeStruct((3,), np.int32)
    return module.buffer_callback(copy, result, input_output_aliases=aliases)(jnp.ones(2))

  expected, actual = failure(program, jaxs), failure(program, ours)
  assert (type(actual), str(actual)) == (type(expected), str(expected))


@pytest.mark.parametrize(
  ("aliases", "message"),
  [
    ({-1: 0}, "'-1:0' with input index -1 outside the range"),
    ({0: -1}, "'0:-1' with output index -1 outside the range"),
    ({0: 0, 1: 0}, "'1:0' referring to an output that another input has"),
  ],
)
def test_aliases_that_jax_lets_pass_are_refused(aliases: dict[int, int], message: str) -> None:
  call = ours.buffer_callback(copy, like(jnp.ones(2)), input_output_aliases=aliases)
  with pytest.raises(ValueError, match=message):
    call(jnp.ones(2), jnp.ones(2))


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all", "sequential"])
def test_an_aliased_input_that_lanes_share_is_theirs_each(method: str) -> None:
  """JAX's own can't lower "expand_dims" here."""

  def add(_context: Any, out: Any, _total: Any, x: Any) -> None:
    np.asarray(out)[...] += np.asarray(x)

  total, rows = np.array([1, 2], F32), np.arange(6, dtype=F32).reshape(3, 2)
  call = ours.buffer_callback(add, like(total), vmap_method=method, input_output_aliases={0: 0})
  np.testing.assert_array_equal(jax.vmap(call, (None, 0))(total, rows), total + rows)
  np.testing.assert_array_equal(jax.vmap(call, (0, None))(rows, total), total + rows)


# -- several devices -------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", [False, True])
@pytest.mark.parametrize(
  ("sharding", "shapes"),
  [
    (None, [(16, 2)]),
    ("gather", [(16, 2)]),
    ("shard", [(2, 2)] * 8),
    ("i j -> i j", [(2, 2)] * 8),
  ],
)
def test_in_a_partitioned_program_each_device_gets_its_part_or_one_gets_all(
  sharding: Any, shapes: Any, effect: bool
) -> None:
  seen: list[tuple[int, ...]] = []

  def double(_context: Any, out: Any, x: Any) -> None:
    seen.append(np.asarray(x).shape)
    np.multiply(np.asarray(x), 2, out=np.asarray(out))

  mesh = jax.sharding.Mesh(jax.devices(), "x")
  x = np.arange(32, dtype=F32).reshape(16, 2)
  split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
  call = ours.buffer_callback(double, like(x), has_side_effect=effect, sharding=sharding)
  np.testing.assert_array_equal(jax.jit(call)(split), x * 2)
  assert seen == shapes


@pytest.mark.parametrize("effect", [False, True])
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_in_a_shard_map_each_device_calls_with_its_part(kind: Any, effect: bool) -> None:
  mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
  x = jnp.arange(16.0)

  def add_one(_context: Any, out: Any, x: Any) -> None:
    np.add(np.asarray(x), 1, out=np.asarray(out))

  def steps(x: Any) -> Any:
    one = ours.buffer_callback(add_one, like(x), has_side_effect=effect)
    each = ours.buffer_callback(add_one, like(x[0]), vmap_method="sequential")
    return jax.vmap(each)(jax.lax.scan(lambda c, _: (one(c), None), x, None, length=2)[0])

  mapped = jax.shard_map(steps, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
  np.testing.assert_array_equal(
    jax.jit(mapped)(jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))), x + 3
  )


def test_a_sharding_that_is_none_is_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="'copy': sharding: expected None, 'shard'"):
    ours.buffer_callback(copy, like(1.0), sharding="rows")


# -- transformations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "method",
  ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized"],
)
@pytest.mark.parametrize("in_axes", [(0, 0), (1, 0), (0, None)], ids=str)
def test_vmap_shows_the_same_shapes(method: str, in_axes: tuple[Any, ...]) -> None:
  x = jnp.arange(9.0).reshape(3, 3)
  y = jnp.arange(9.0, 18.0).reshape(3, 3) if in_axes[1] is not None else jnp.arange(3.0)

  def program(module: Any) -> Any:
    shapes: list[Any] = []

    def callback(_context: Any, out: Any, x: Any, y: Any) -> None:
      shapes.append((out.shape, x.shape, y.shape))
      np.add(np.asarray(x), np.asarray(y), out=np.asarray(out))

    call = module.buffer_callback(callback, like(np.zeros(3, F32)), vmap_method=method)
    return jax.jit(jax.vmap(call, in_axes=in_axes))(x, y).block_until_ready(), shapes

  assert_same(program)


@pytest.mark.parametrize(
  "program",
  [
    lambda module: jax.vmap(module.buffer_callback(copy, like(1.0)))(jnp.ones(3)),
    lambda module: jax.grad(module.buffer_callback(copy, like(1.0)))(1.0),
    lambda module: jax.jvp(module.buffer_callback(copy, like(1.0)), (1.0,), (1.0,)),
    lambda module: jax.linear_transpose(module.buffer_callback(copy, like(1.0)), 1.0)(1.0),
  ],
  ids=["vmap", "grad", "jvp", "transpose"],
)
def test_an_unsupported_option_is_the_same_error(program: Program) -> None:
  expected, actual = failure(program, jaxs), failure(program, ours)
  assert (type(actual), str(actual)) == (type(expected), str(expected))


def test_control_flow_and_custom_derivatives_work_around_a_call() -> None:
  def program(module: Any) -> Any:
    def sine(_context: Any, out: Any, x: Any) -> None:
      np.sin(np.asarray(x), out=np.asarray(out))

    @jax.custom_jvp
    def sin(x: Any) -> Any:
      return module.buffer_callback(sine, like(x), vmap_method="expand_dims")(x)

    @sin.defjvp
    def _(primals: Any, tangents: Any) -> Any:
      return sin(*primals), tangents[0] * jnp.cos(primals[0])

    @jax.jit
    def f(x: Any) -> Any:
      y, _ = jax.lax.scan(lambda c, _: (sin(c), None), x, None, length=3)
      y = jax.lax.cond(y > 0, sin, lambda c: c, y)
      return jax.lax.while_loop(lambda c: c > 0.5, sin, y)

    return jax.vmap(jax.grad(sin))(jnp.arange(3.0)), f(1.0)

  assert_same(program)


# -- failures and lifetimes ------------------------------------------------------------------------
def returns_a_value(_context: Any, _out: Any, _x: Any) -> Any:
  return 1


def raises(_context: Any, _out: Any, _x: Any) -> None:
  raise KeyError("the reason")


@pytest.mark.parametrize("has_side_effect", [False, True])
@pytest.mark.parametrize(
  ("callback", "text"),
  [
    (returns_a_value, "ValueError: buffer_callback callback must not return any values."),
    (raises, "KeyError: 'the reason'"),
    (lambda: None, "takes 0 positional arguments but 3 were given"),
  ],
  ids=["returns", "raises", "arguments"],
)
def test_failures_have_jaxs_type_and_text(callback: Any, text: str, has_side_effect: bool) -> None:
  def program(module: Any) -> Any:
    return module.buffer_callback(callback, like(1.0), has_side_effect=has_side_effect)(1.0)

  expected, actual = failure(program, jaxs), failure(program, ours)
  assert type(actual) is type(expected)
  assert text in str(expected)
  assert text in str(actual)
  assert "Traceback (most recent call last)" in str(actual)


def test_inputs_can_not_be_written_and_results_can() -> None:
  flags: list[bool] = []

  def callback(context: Any, out: Any, x: Any) -> None:
    array = np.asarray(x)
    with pytest.raises(ValueError, match="read-only"):
      array[...] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
      array.setflags(write=True)
    flags.append(np.asarray(out).flags.writeable)
    copy(context, out, x)

  call = ours.buffer_callback(callback, like(np.zeros(4, F32)))
  np.testing.assert_array_equal(call(jnp.arange(4.0)), np.arange(4.0))
  assert flags == [True]


def test_equal_calls_share_one_compiled_program() -> None:
  call = ours.buffer_callback(copy, like(1.0))
  f = jax.jit(lambda x: call(call(x)))
  assert f(1.0) == 1
  assert f.lower(1.0).as_text().count("stablehlo.custom_call @callgate.gate") == 2


def test_the_platforms_without_a_lowering_are_named(monkeypatch: pytest.MonkeyPatch) -> None:

  monkeypatch.setattr(callbacks, "buffer_callback_lowering", lambda: None)
  with pytest.raises(ValueError, match="`buffer_callback` not supported on tpu backend"):
    jax.jit(ours.buffer_callback(copy, like(1.0))).trace(1.0).lower(lowering_platforms=("tpu",))


# -- programs that are exported -------------------------------------------------------------------
def test_an_exported_program_finds_a_callback_without_a_name_in_its_own_process() -> None:
  def double(context: Any, out: Any, x: Any) -> None:
    np.multiply(x, 2, out=np.asarray(out))

  def exported() -> export.Exported:
    program = jax.jit(ours.buffer_callback(double, like(np.zeros(3, F32))))
    made = export.export(program, disabled_checks=cg.export_checks())(jnp.ones(3))
    return export.deserialize(made.serialize())

  program = exported()
  jax.clear_caches()
  gc.collect()
  assert program.call(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_name_is_that_of_one_callback() -> None:
  calls = [ours.buffer_callback(copy, like(1.0), name="one callback") for _ in range(2)]
  assert jax.jit(lambda x: calls[0](calls[1](x)))(2.0) == 2
  with pytest.raises(ValueError, match="'one callback' is taken"):
    ours.buffer_callback(lambda *_: None, like(1.0), name="one callback")
  with pytest.raises(TypeError, match="name: expected a line of text"):
    ours.buffer_callback(copy, like(1.0), name=5)  # pyright: ignore[reportArgumentType]
  calls.clear()
  jax.clear_caches()
  gc.collect()
  ours.buffer_callback(lambda *_: None, like(1.0), name="one callback")


def test_a_program_that_is_lowered_again_has_the_same_text() -> None:
  def text() -> str:
    return jax.jit(ours.buffer_callback(copy, like(1.0))).lower(1.0).as_text()

  first = text()
  jax.clear_caches()
  gc.collect()
  assert text() == first
