# SPDX-License-Identifier: Apache-2.0
"""Each entry of callgate._jax.tracing does on this JAX what it says."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of
from jax.interpreters import mlir

import callgate as cg
from callgate._jax import tracing

P = jax.P
X = np.arange(4, dtype=np.float32)


def primitive(name: str, **options: Any) -> Any:
  """One whose result has its operand's type; XLA adds one to it."""
  made = tracing.Primitive(name)
  made.def_abstract_eval(lambda aval, **_: aval)
  mlir.register_lowering(made, mlir.lower_fun(lambda x, **_: x + 1, multiple_results=False))
  tracing.define_impl(made, **options)
  return made


def mesh(explicit: bool = False) -> jax.sharding.Mesh:
  kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
  return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])


def in_shard_map(look: Callable[[Any], Any], **options: Any) -> Any:
  """Returns `look` of a part of an array, as jax.shard_map is traced."""
  seen: list[Any] = []

  def on_part(x: Any) -> Any:
    seen.append(look(x))
    return x

  specs = {"in_specs": P("d"), "out_specs": P("d"), **options}
  jax.jit(jax.shard_map(on_part, mesh=mesh(), **specs)).trace(jax.ShapeDtypeStruct((4,), "float32"))
  return seen[0]


# -- programs and effects --------------------------------------------------------------------------
def test_a_primitive_is_an_equation_whose_jaxpr_runs() -> None:
  closed = jax.make_jaxpr(lambda x: primitive("test plus").bind(x) * 2.0)(X)
  plus, times = closed.eqns
  assert plus.primitive.name == "test plus"
  assert isinstance(times.invars[1], tracing.Literal)
  np.testing.assert_array_equal(tracing.jaxpr_as_fun(closed)(X)[0], 2 * (X + 1))


@pytest.mark.parametrize("ordered", [True, False])
def test_an_effect_that_is_allowed_goes_through_loops_branches_and_derivatives(
  ordered: bool,
) -> None:
  class Own(tracing.Effect):
    pass

  effect = Own()
  made = tracing.Primitive("test effect")
  made.def_effectful_abstract_eval(lambda aval: (aval, {effect}))
  loop = lambda x: jax.lax.scan(lambda c, _: (made.bind(c), None), x, None, length=2)[0]
  with pytest.raises(NotImplementedError, match="Effects not supported"):
    jax.make_jaxpr(loop)(X)
  tracing.allow_effect(Own, ordered=ordered, kept=True)
  branch = lambda x: jax.lax.cond(x[0] > 0, made.bind, lambda y: y, x)
  for program in (loop, branch, jax.checkpoint(made.bind), jax.jit(made.bind)):
    assert jax.make_jaxpr(program)(X).effects == {effect}
  assert tracing.is_ordered_effect(effect) == ordered


def test_the_ordered_effects_of_jax_are_those_of_its_callbacks() -> None:
  def calls(x: Any) -> Any:
    jax.debug.callback(lambda x: None, x, ordered=True)
    return jax.experimental.io_callback(lambda x: x, x, x, ordered=True)

  import jax.experimental

  both = {tracing.ordered_io_effect, tracing.ordered_debug_effect}
  assert jax.make_jaxpr(calls)(X).effects == both
  assert all(map(tracing.is_ordered_effect, both))


def test_options_are_in_the_key_of_jit() -> None:
  flag = tracing.define_bool("callgate_test_flag", False, "Of a test.")
  kind = tracing.define_enum("callgate_test_kind", ["a", "b"], "a", "Of a test.")
  number = tracing.define_int("callgate_test_number", -1, "Of a test.")
  seen: list[Any] = []

  @jax.jit
  def program(x: Any) -> Any:
    seen.append((flag.value, kind.value, number.value))
    return x

  key = tracing.trace_key()
  program(X)
  with flag(True):
    assert tracing.trace_key() != key
    program(X)
  with kind("b"):
    program(X)
  with number(3):
    program(X)
  program(X)
  tracing.update_option("callgate_test_flag", True)
  program(X)
  tracing.update_option("callgate_test_flag", False)
  assert seen == [(False, "a", -1), (True, "a", -1), (False, "b", -1), (False, "a", 3)]
  assert tracing.trace_key() == key


def test_a_trace_on_this_thread_is_told() -> None:
  def here() -> list[bool]:
    none = tracing.current_trace() is None
    return [tracing.in_no_trace(), none, tracing.in_vmap(), tracing.is_staged()]

  seen: list[list[bool]] = []
  look = lambda x: seen.append(here()) or x
  look(X)
  jax.vmap(look)(X)
  jax.jit(look).trace(X)
  jax.jit(jax.vmap(look)).trace(X)
  assert seen == [
    [True, True, False, False],
    [False, False, True, False],
    [False, False, False, True],
    [False, False, True, True],
  ]


def test_plain_arrays_are_told_from_tracers_keys_and_numpys() -> None:
  inside: list[bool] = []
  jax.jit(lambda x: inside.append(tracing.is_plain_array(x)) or x).trace(X)
  values = jnp.ones(2), jax.random.key(0), X
  assert [*map(tracing.is_plain_array, values), *inside] == [True, False, False, False]


def test_caches_end_with_jaxs() -> None:
  made: list[int] = []
  cached = tracing.clearable_cache(8)(lambda x: made.append(x) or x)
  programs = tracing.eager_programs(8)
  own = functools.lru_cache(lambda x: x)
  tracing.clear_with_caches(own, "a test's")
  own(1)
  p = primitive("test cached", programs=lambda **_: programs)
  for _ in range(2):
    assert cached(3) == 3
    np.testing.assert_array_equal(p.bind(X), X + 1)
  assert (made, programs.cache_info().currsize) == ([3], 1)
  jax.clear_caches()
  assert cached(3) == 3
  assert (made, programs.cache_info().currsize) == ([3, 3], 0)
  assert own.cache_info().currsize == 0


# -- types in jax.shard_map ------------------------------------------------------------------------
def test_types_name_the_axes_over_which_values_vary() -> None:
  def look(x: Any) -> Any:
    axes = tracing.varying_axes([x])
    made = tracing.shaped_array((2,), np.float32, [x], weak_type=True)
    whole = jnp.zeros(2)
    cast = tracing.vary_over(axes, whole)
    both = tracing.vary_alike("test", [x, jnp.zeros(1)])
    assert tracing.varying_axes([whole, jax.typeof(whole)]) == frozenset()
    assert tracing.varying_aval(jax.typeof(whole), axes) == jax.typeof(cast)
    assert (made.shape, made.dtype, made.weak_type) == ((2,), np.float32, True)
    assert tracing.varying_axes([tracing.zeros_of(made)]) == axes
    return [axes, *(tracing.varying_axes([y]) for y in (made, cast, *both))]

  assert in_shard_map(look) == [frozenset("d")] * 5
  assert in_shard_map(lambda x: tracing.varying_axes([tracing.unvaried(x)])) == frozenset()
  assert in_shard_map(lambda x: tracing.unvaried(x).aval == tracing.unvaried_p.bind(x).aval)
  assert in_shard_map(lambda x: tracing.vary_as(jax.typeof(jnp.sum(X)), x).aval) == (
    in_shard_map(lambda x: tracing.unvaried(x).aval)
  )


@pytest.mark.parametrize("check", [True, False])
def test_the_axes_of_a_region_are_told(check: bool) -> None:
  look = lambda x: (tracing.region_axes(), tracing.manual_axes(), tracing.in_manual_region())
  checked = frozenset("d") if check else frozenset()
  assert in_shard_map(look, check_vma=check) == (frozenset("d"), checked, True)
  assert look(X) == (frozenset(), frozenset(), False)


def test_a_pmap_is_told_from_a_shard_map() -> None:
  seen: list[bool] = []

  def look(x: Any) -> Any:
    seen.append(tracing.in_pmap())
    return x

  in_shard_map(look)
  jax.pmap(jax.jit(look))(jnp.zeros((2, 3)))
  look(X)
  assert seen == [False, True, False]


def test_types_of_explicitly_sharded_programs_say_where_values_lie() -> None:
  with jax.set_mesh(mesh(explicit=True)):
    x = jax.reshard(jnp.zeros((4, 2)), P("d"))
    aval = jax.typeof(x)
    assert tracing.is_explicit([aval])
    assert tracing.are_explicit([X, x])
    assert tracing.spec_of(aval) == ["d", None]
    turned = tracing.with_spec(aval, [aval], [None, None])
    assert tracing.spec_of(turned) == [None, None]
    assert jax.typeof(tracing.reshard_as(turned, x)) == turned
    assert [tracing.spec_of(jax.typeof(y)) for y in tracing.replicate([x])] == [[None, None]]
    assert tracing.types_of_results(lambda x: (x, x[:, 0]), [x])[0] == aval
    assert tracing.result_avals(lambda x: {"y": x}, x) == {"y": aval}
    assert jax.typeof(tracing.zeros_of(aval)) == aval
  assert not tracing.is_explicit([jax.typeof(X)])
  assert tracing.with_spec(jax.typeof(X), [jax.typeof(X)], ["d"]) == jax.typeof(X)


# -- dtypes ----------------------------------------------------------------------------------------
def test_dtypes_shrink_as_those_of_arrays_do() -> None:
  assert tracing.canonical_dtype(np.float64) == jnp.asarray(np.float64(1)).dtype == np.float32
  value = tracing.canonicalize_value(np.arange(3))
  assert value.dtype == np.int32
  assert not isinstance(value, jax.Array)
  with pytest.raises(TypeError):
    tracing.canonicalize_value(object())
  key = jax.typeof(jax.random.key(0))
  assert tracing.physical_aval(key).shape == jax.random.key_data(jax.random.key(0)).shape
  assert tracing.physical_aval(jax.typeof(X)) == jax.typeof(X)
  zero = tracing.zeros_of(key)
  assert not jax.random.key_data(zero).any()


# -- running and lowering --------------------------------------------------------------------------
def test_a_primitive_runs_by_itself_and_has_its_name_in_errors() -> None:
  p = primitive("test labelled", label=lambda **params: f"call {params['of']}")
  np.testing.assert_array_equal(p.bind(X, of="one"), X + 1)
  with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in the results of call two"):
    p.bind(np.float32(np.nan), of="two")


def test_entries_by_weak_types_end_with_their_values() -> None:
  from jax._src.util import multi_weakref_lru_cache

  class Held:
    pass

  cached = multi_weakref_lru_cache(lambda held: 1)
  tracing.weakly_cached.add(Held)
  for _ in range(2):
    held = Held()
    assert cached(held) == 1
    watch = weakref.ref(held)
    del held
    assert (watch() is None) == (Held in tracing.weakly_cached)
    tracing.weakly_cached.discard(Held)


def test_lowerings_are_told_of_the_mesh() -> None:
  seen: list[Any] = []
  p = primitive("test mesh")

  def rule(context: Any, x: Any) -> Any:
    seen.append(context.module_context.axis_context.device_assignment)
    return [x]

  mlir.register_lowering(p, rule)
  tracing.needs_devices(p)
  jax.jit(p.bind).lower(X)
  assert seen == [tuple(jax.devices()[:1])]


def test_forward_mode_of_a_rule_of_reverse_mode_is_refused_by_name() -> None:
  gate = cg.gate(lambda x: x, out=lambda x: x)
  gate.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
  with pytest.raises(cg.GateError, match="forward"):
    jax.jvp(gate, (X,), (X,))
  other = jax.custom_vjp(lambda x: x)
  other.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
  with pytest.raises(TypeError, match="custom_vjp"):
    jax.jvp(other, (X,), (X,))
  assert callable(tracing.refuse_forward_mode)


# -- jaxprs ----------------------------------------------------------------------------------------
def test_jaxprs_are_batched() -> None:
  seen: list[Any] = []
  p = primitive("test batched")
  closed = jax.make_jaxpr(lambda x, y: (x + y, y))(1.0, 1.0)

  def batch(axis_data: Any, args: Any, dims: Any, **_: Any) -> Any:
    made, flags = tracing.batched(closed, axis_data, [True, False], False)
    seen.append((flags, [v.aval.shape for v in made.jaxpr.outvars]))
    return args[0], dims[0]

  from jax.interpreters import batching

  batching.fancy_primitive_batchers[p] = batch
  jax.vmap(p.bind)(X)
  assert seen == [([True, False], [(4,), ()])]


def test_policies_of_checkpoints_are_asked() -> None:
  eqn = jax.make_jaxpr(lambda x: x @ x)(X).eqns[0]
  policies = jax.checkpoint_policies
  assert tracing.is_saveable(policies.everything_saveable, eqn)
  assert not tracing.is_saveable(policies.nothing_saveable, eqn)
  offload = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
  assert tracing.is_saveable(offload, eqn)


def test_loops_keep_the_results_that_hold_something() -> None:
  source = """
    import jax, jax.numpy as jnp
    from callgate._jax import loop_rules
    step = lambda c, _: ((c[0] + 1, jnp.sin(c[1])), None)
    loop = lambda x: jax.lax.scan(step, (x, x), None, length=2)[0]
    program = lambda x: jax.checkpoint(lambda x: loop(x)[0])(x).sum()
    count = lambda: str(jax.make_jaxpr(jax.grad(program))(jnp.ones(2))).count("sin")
    before = count()
    loop_rules.keep_results(lambda eqn: eqn.primitive.name == "scan")
    jax.clear_caches()
    print(before, count() > 0)
  """
  assert output_of(source).split() == ["0", "True"]


def test_values_that_a_function_closes_over_are_found() -> None:
  def around(value: Any) -> Any:
    return lambda: value

  assert tracing.closes_over(around(jax), types.ModuleType)
  assert not tracing.closes_over(around(1), types.ModuleType)
  assert not tracing.closes_over(print, str)
