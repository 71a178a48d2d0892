# SPDX-License-Identifier: Apache-2.0
"""Entries of callgate._jax: loops, batching, refs and remat do on this JAX what they say."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of
from jax.interpreters import batching as jax_batching

import callgate
from callgate._jax import batching, loops, refs, remat, sources, tracing, walk

P = jax.P
X = np.arange(4, dtype=np.float32)


def equation(name: str, function: Callable[..., Any], *args: Any) -> Any:
  return next(e for e in jax.make_jaxpr(function)(*args).eqns if e.primitive.name == name)


def in_rule(look: Callable[..., Any], x: Any = X, **options: Any) -> list[Any]:
  """A look at the batching of an operation shows: (axis's data, operand, its axis)."""
  seen: list[Any] = []
  p = tracing.Primitive("test batching")
  p.def_abstract_eval(lambda aval: aval)

  def rule(axis_data: Any, args: Any, dims: Any, **_: Any) -> Any:
    seen.append(look(axis_data, args[0], dims[0]))
    return args[0], dims[0]

  jax_batching.fancy_primitive_batchers[p] = rule
  jax.make_jaxpr(jax.vmap(p.bind, **options))(x)
  return seen


# -- loops -----------------------------------------------------------------------------------------
def test_the_parts_of_a_scan_are_told_and_it_runs_as_a_while_loop() -> None:
  constant = jnp.ones(3)
  step = lambda c, x: ((c[0] + x * constant.sum(), c[1] * 2), c[0])
  function = lambda x: jax.lax.scan(step, (0.0, 1.0), x)
  eqn = equation("scan", function, X)
  consts, carry = loops.scan_counts(eqn.params)
  assert carry == 2
  assert consts + carry + 1 == len(eqn.invars)
  parts = loops.split_scan(eqn.params, eqn.invars)
  assert [*map(len, parts)] == [consts, carry, 1]
  assert [v for part in parts for v in part] == list(eqn.invars)
  closed = jax.make_jaxpr(function)(X)
  text = str(jax.make_jaxpr(lambda *values: loops.scan_impl(*values, **eqn.params))(
    *[jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.invars]
  ))  # fmt: skip
  assert "while" in text
  assert closed.eqns


def test_lanes_of_a_while_loop_go_on_until_the_last_has_ended() -> None:
  flags = np.array([True, False, True, False])
  assert [bool(loops.any_lane(jnp.asarray(x))) for x in (flags, ~flags[:0], np.True_)] == [1, 0, 1]
  rows, numbers = loops.chosen(flags, [jnp.ones((4, 3)), X + 1], [jnp.zeros((4, 3)), X])
  np.testing.assert_array_equal(rows, [[1] * 3, [0] * 3, [1] * 3, [0] * 3])
  np.testing.assert_array_equal(numbers, X + flags)


def test_the_operands_of_a_while_loop_are_split() -> None:
  limit, step = jnp.float32(3), jnp.float32(1)

  def function(x: Any, limit: Any, step: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + step, c[1] + 1), (x, x))

  eqn = equation("while", function, 0.0, limit, step)
  parts = loops.split_operands(eqn.params, eqn.invars)
  assert [*map(len, parts)] == [1, 1, 2]
  assert [v for part in parts for v in part] == list(eqn.invars)
  kinds: list[loops.T] = [1, 2]  # pyright: ignore[reportGeneralTypeIssues]
  assert kinds


def test_some_arguments_of_a_jaxpr_move_to_its_front() -> None:
  closed = jax.make_jaxpr(lambda x, y: x - y)(1.0, 2.0)
  moved = loops.move_binders_to_front(closed, [False, True])
  assert tracing.jaxpr_as_fun(moved)(2.0, 1.0) == [-1.0]


def test_types_are_weak_as_loops_have_them() -> None:
  weak = loops.weakly_typed(jnp.float32(1))
  assert jax.typeof(weak).weak_type
  strong = jnp.float32(1)
  assert loops.weakly_typed(strong, weak=False) is strong


def test_layers_are_around_jaxs_rules_in_their_order() -> None:
  source = """
    import jax, jax.numpy as jnp
    import callgate
    from callgate._jax import loop_rules
    seen = []

    def around(name):
      def rule(original, *args, **kwargs):
        seen.append(name)
        return original(*args, **kwargs)
      return rule

    loop_rules.wrap_hoisting(around("hoist"))
    loop_rules.wrap_evaluation(around("evaluate"))
    while_p = jax.lax.while_p
    for rule in ("lowering", "vmap", "linearize", "checkpoint"):
      loop_rules.wrap(rule, while_p, around("outer " + rule), around("inner " + rule))
    loop = lambda x, y: jax.lax.scan(lambda c, _: (c * jnp.sin(y), None), x, None, length=3)[0]
    jax.linearize(lambda x: loop(x, 2.0), 1.0)
    jax.grad(jax.checkpoint(lambda x: loop(x, 2.0)))(1.0)
    print(sorted({"hoist", "evaluate"} & set(seen)))
    loop = lambda x: jax.lax.while_loop(lambda c: c < 9.0, lambda c: c + 1.0, x)
    jax.vmap(loop)(jnp.ones(2))
    jax.linearize(lambda x: loop(x) * x, 1.0)
    jax.linearize(jax.checkpoint(lambda x: loop(jnp.sin(x)) * x), 1.0)
    for rule in ("lowering", "vmap", "linearize", "checkpoint"):
      first = seen.index("outer " + rule)
      print(seen[first : first + 2])
  """
  expected = [["evaluate", "hoist"]]
  for rule in ("lowering", "vmap", "linearize", "checkpoint"):
    expected.append([f"outer {rule}", f"inner {rule}"])
  assert output_of(source) == "".join(f"{line}\n" for line in expected)


# -- lanes -----------------------------------------------------------------------------------------
def test_names_of_mapped_axes_are_found_in_jaxprs() -> None:
  def names(f: Callable[[Any], Any]) -> bool:
    closed = jax.make_jaxpr(f, axis_env=[("d", 2)])(X)
    return batching.names_axis(closed)

  assert names(lambda x: jax.lax.psum(x, "d"))
  assert names(lambda x: jax.lax.ppermute(x, "d", [(0, 1)]))
  assert names(jax.jit(lambda x: jax.lax.ppermute(x, "d", [(0, 1)])))
  assert not names(jax.jit(jnp.sin))


def test_lanes_have_their_type_and_a_value_goes_to_each() -> None:
  def look(axis_data: Any, value: Any, dim: Any) -> Any:
    lanes = batching.to_lanes(axis_data, jnp.zeros(2))
    whole = batching.lane_aval(axis_data, value, None).shape
    return batching.lane_aval(axis_data, value, dim).shape, whole, lanes.shape

  x = np.zeros((5, 3), np.float32)
  assert in_rule(look, x) == [((3,), (5, 3), (5, 2))]
  assert in_rule(look, x, in_axes=1) == [((5,), (5, 3), (3, 2))]


def test_a_lane_names_its_axis_here_and_later() -> None:
  def look(axis_data: Any, value: Any, dim: Any) -> Any:
    del value, dim
    with batching.in_lane(axis_data):
      here = batching.axes_here()
      inside = jax.make_jaxpr(lambda x: jax.lax.psum(x, "lanes"))(1.0)
    with here():
      later = jax.make_jaxpr(lambda x: jax.lax.psum(x, "lanes"))(1.0)
    return [str(inside) == str(later), batching.names_axis(inside)]

  assert in_rule(look, axis_name="lanes") == [[True, True]]


def test_a_jaxpr_of_lanes_has_them_on_the_axes_that_are_said() -> None:
  closed = jax.make_jaxpr(lambda x, y: (x + y, y))(np.zeros(3, np.float32), np.float32(0))

  def look(axis_data: Any, value: Any, dim: Any) -> Any:
    del value, dim
    made = batching.batched_at(closed, axis_data, [1, None], [1, 0])
    return [v.aval.shape for v in (*made.jaxpr.invars, *made.jaxpr.outvars)]

  assert in_rule(look) == [[(3, 4), (), (3, 4), (4,)]]


def test_values_lie_along_an_axis_of_an_explicit_mesh() -> None:
  kind = jax.sharding.AxisType.Explicit
  mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    x = jax.reshard(jnp.zeros((4, 2)), P())
    assert jax.typeof(batching.split_along("d", x)).sharding.spec == P("d", None)
  assert batching.split_along("d", X) is X


def test_results_of_operations_of_lanes_are_marked_where_they_are() -> None:
  marked: list[Any] = []

  def mark(value: Any, dim: int) -> Any:
    marked.append(dim)
    return value + 100

  kind: batching.Mark = mark
  program = jax.vmap(lambda x: jax.lax.neg(x), in_axes=1, out_axes=1)
  assert not batching.is_marking()
  with batching.marking(kind):
    assert batching.is_marking()
    found = program(np.ones((2, 3), np.float32))
  assert set(marked) <= {0, 1}
  assert (np.asarray(found) == 99).all()
  assert (np.asarray(program(np.ones((2, 3), np.float32))) == -1).all()


def test_a_lane_of_a_scan_is_itself_in_every_transformation() -> None:
  f = jax.vmap(jax.value_and_grad(lambda x: batching.lane_p.bind(x) * 2))
  for program in (f, jax.jit(f)):
    values, slopes = program(X)
    np.testing.assert_array_equal(values, 2 * X)
    np.testing.assert_array_equal(slopes, np.full(4, 2))


# -- mutable arrays --------------------------------------------------------------------------------
@pytest.mark.parametrize("add", [False, True])
def test_refs_are_told_and_changed_where_a_mask_is_true(add: bool) -> None:
  def change(ref: Any, value: Any) -> None:
    if add:
      jax.ref.addupdate(ref, ..., value)
    else:
      ref[...] = value

  def masked(mask: Any) -> Any:
    def program(mask: Any) -> Any:
      ref = jax.new_ref(jnp.float32(1))
      closed = jax.make_jaxpr(change)(ref, jnp.float32(2))
      assert refs.touches(closed.effects)
      assert [refs.is_ref(v.aval) for v in closed.jaxpr.invars] == [True, False]
      assert not closed.consts
      eqn = next(eqn for eqn in closed.eqns if refs.touches(eqn.effects))
      refs.bind_masked(eqn, mask, [ref, jnp.float32(2)])
      return ref[...]

    return jax.jit(program)(mask)

  assert [float(masked(mask)) for mask in (True, False)] == [3.0 if add else 2.0, 1.0]
  assert not refs.touches(jax.make_jaxpr(jnp.sin)(1.0).effects)


def test_a_function_of_the_host_gets_what_refs_hold() -> None:
  def program(x: Any) -> Any:
    ref = jax.new_ref(x)
    held = refs.read({"all": ref, "part": ref.at[1:], "value": x})
    return held["all"] + held["part"].sum() + held["value"]

  np.testing.assert_array_equal(jax.jit(program)(X), 2 * X + 6)
  tree = {"value": X}
  assert refs.read(tree) is tree


# -- parts of programs -----------------------------------------------------------------------------
def test_an_equation_that_is_lowered_to_a_jaxpr_tells_it() -> None:
  eqn = equation("jit", jax.jit(lambda x, y: x + y), X, X)
  found = loops.runs(eqn)
  assert found is not None
  np.testing.assert_array_equal(tracing.jaxpr_as_fun(found[0])(X, X)[0], 2 * X)
  assert found == (loops.called(eqn), [0, 1])
  scan = equation("scan", lambda x: jax.lax.scan(lambda c, x: (c + x, c), 0.0, x), X)
  halve = lambda _, x: x / 2
  solved = lambda x: jax.lax.custom_linear_solve(lambda x: 2 * x, x, halve, symmetric=True)
  solve = equation("custom_linear_solve", solved, X)
  assert loops.runs(scan) is None
  assert loops.runs(solve) is not None
  assert [*map(loops.called, (scan, solve))] == [None, None]
  twice = jax.custom_batching.custom_vmap(lambda x: 2 * x)
  twice.def_vmap(lambda size, batched, x: (2 * x, True))
  mapped = equation("custom_vmap_call", twice, X)
  np.testing.assert_array_equal(tracing.jaxpr_as_fun(loops.called(mapped))(X)[0], 2 * X)


def test_a_function_that_is_traced_once_keeps_the_users_lines() -> None:
  traced = list[bool]()

  def step(x: Any) -> Any:
    traced.append(True)
    return jnp.sin(x)

  once = loops.traced_once(step)
  closed = jax.make_jaxpr(lambda x: once(once(x)))(0.5)
  assert traced == [True]
  (sine, _) = (eqn for eqn in walk.equations(closed.jaxpr) if eqn.primitive.name == "sin")
  assert "step" in sources.source_of(sine)


def test_some_programs_take_the_old_checkpoint() -> None:
  source = """
    import jax, jax.numpy as jnp
    import callgate
    from callgate._jax import remat
    seen = []
    remat.use_old_for(lambda jaxpr: seen.append(jaxpr) or True)
    if "jax_remat3" in jax.config.values:
      jax.config.update("jax_remat3", True)
    print(jax.grad(jax.checkpoint(lambda x: jnp.sin(x) * 2))(0.0), len(seen) > 0)
  """
  printed = output_of(source).split()
  assert printed[0] == "2.0"
  assert printed[1] == str("jax_remat3" in jax.config.values)
  assert callable(remat.use_old_for)


def test_a_checkpoint_of_constants_keeps_its_effects() -> None:
  seen = list[float]()
  note = lambda _: jax.debug.callback(lambda x: seen.append(float(x)), np.float32(2))
  jax.block_until_ready(jax.jit(lambda x: (jax.checkpoint(note)(x), x)[1])(X))
  jax.effects_barrier()
  assert seen == [2]
  assert callable(remat.keep_effects)


def test_tracers_stand_for_values() -> None:
  seen: list[Any] = []

  def f(x: Any) -> Any:
    seen.append(tracing.behind(x))
    return x * x

  value = jnp.float32(3)
  jax.grad(f)(value)
  jax.jvp(jax.grad(f), (value,), (value,))
  assert [x is value for x in seen] == [True, True]
  lanes = jnp.asarray(X)
  jax.vmap(f)(lanes)
  assert seen[-1] is lanes
  assert tracing.behind(1.0) == 1.0


def test_a_jaxpr_runs_on_other_constants() -> None:
  constant = jnp.asarray(X)
  closed = jax.make_jaxpr(lambda x: x + constant)(X)
  (found,) = tracing.eval_jaxpr(closed.jaxpr, [2 * X], X)
  np.testing.assert_array_equal(found, 3 * X)


def test_a_rule_for_vmap_is_asked_without_lanes_among_the_operands() -> None:
  primitive, seen = tracing.Primitive("test_lanes"), []
  primitive.def_abstract_eval(lambda x: x)

  def rule(operands: Any, dims: Any, *, size: int) -> Any:
    seen.append((size, dims))
    return operands[0], dims[0]

  batching.always_batched(primitive, rule)
  constant = jnp.asarray(X)
  jax.make_jaxpr(jax.vmap(lambda x: (primitive.bind(constant), primitive.bind(x))))(
    np.zeros((3, 2))
  )
  assert [(size, dims[0]) for size, dims in seen] == [(3, None), (3, 0)]


def test_a_functions_layer_gets_the_calls_of_users() -> None:
  cell = jax.lax.fori_loop.__closure__[jax.lax.fori_loop.__code__.co_freevars.index("fun")]
  before, seen = cell.cell_contents, []

  def layer(original: Any, args: Any, kwargs: Any) -> Any:
    seen.append((args[:2], sorted(kwargs)))
    return original(*args, **kwargs)

  try:
    loops.wrap_function("fori_loop", layer)
    assert jax.lax.fori_loop(0, 3, lambda i, x: x + i, 0) == 3
    assert jax.named_call(jax.lax.fori_loop, name="n")(1, 4, init_val=0, body_fun=jnp.maximum) == 3
    jax.block_until_ready(jax.random.permutation(jax.random.key(0), 5))  # its own loops
  finally:
    cell.cell_contents = before
  assert seen == [((0, 3), []), ((1, 4), ["body_fun", "init_val"])]


# -- all of them -----------------------------------------------------------------------------------
def entries(path: pathlib.Path) -> set[str]:
  """The public names that a module of callgate._jax defines."""
  found: set[str] = set()
  for node in ast.parse(path.read_text(encoding="utf-8")).body:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      found.add(node.name)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      found |= {target.id for target in targets if isinstance(target, ast.Name)}
  return {f"{path.stem}.{name}" for name in found if not name.startswith("_")}


def test_a_block_with_marks_has_traces_of_its_own() -> None:
  traced = list[bool]()
  program = jax.jit(lambda x: traced.append(tracing.marked.value) or x)
  for marked in (False, True, True, False):
    with tracing.marked(marked):
      program(1.0)
  assert traced == [False, True]


def test_each_entry_has_a_test() -> None:
  folder = pathlib.Path(callgate.__file__).parent / "_jax"
  defined = set[str]().union(*map(entries, folder.glob("*.py")))
  modules = "|".join(path.stem for path in folder.glob("*.py"))
  used = set[str]()
  for file in pathlib.Path(__file__).parent.glob("test_*.py"):
    used |= {f"{a}.{b}" for a, b in re.findall(rf"\b({modules})\.(\w+)", file.read_text("utf-8"))}
  assert len(defined) > 100
  assert sorted(defined - used) == []
