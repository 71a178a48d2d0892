# SPDX-License-Identifier: Apache-2.0
"""Objects of the host in programs: what uses give, under every transformation, and errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of, printed_by
from transformation_table import PAIRS, F, assert_chains_agree, groups, on_host, reference

import callgate as cg
from callgate._core.public import core

ZERO = jnp.float32(0)


class Box:
  """An object that knows a number."""

  def __init__(self, value: Any) -> None:
    self.value = np.array(value)


boxes = cg.hold(Box, name="test boxes")


def value_of(box: Box) -> Any:
  return box.value


def used(handle: cg.Handle) -> Any:
  return cg.use(value_of, handle, out=ZERO)


def by_objects(effect: Any) -> F:
  """The table's function, by an object that is made of one array and used with another."""
  del effect
  make = cg.hold(lambda x: {"sum": np.sum(x, dtype=np.float32)})
  call = jax.custom_jvp(
    lambda x: cg.use(lambda held, x: np.sin(x) * (1 + held["sum"]), make(x), x, out=x)
  )
  call.defjvp(lambda primals, tangents: (call(*primals), jax.jvp(reference, primals, tangents)[1]))
  return call


@pytest.mark.parametrize("chains", groups(0, 7))
def test_pairs_of_transformations_agree_with_jax(chains: Any) -> None:
  assert_chains_agree(chains, make=by_objects)
  assert "by_objects" not in str(cg.held())


def by_residual(effect: Any) -> F:
  """The table's function, whose backward pass uses the object of the forward pass."""
  del effect
  make = cg.hold(lambda x: np.array(x))
  call = jax.custom_vjp(lambda x: cg.call(on_host, x, x))

  def forward(x: Any) -> Any:
    return call(x), make(x)

  def backward(handle: cg.Handle, ct: Any) -> Any:
    x = cg.use(lambda x: x, handle, out=ct)
    return jax.vjp(reference, x)[1](ct)

  call.defvjp(forward, backward)
  return call


def test_a_residual_of_a_vjp_is_an_object() -> None:
  twice = {("grad", "grad")}  # differentiates the backward pass, in which the object is constant
  chains = [
    pair
    for pair in PAIRS
    if "grad" in pair and pair not in twice and not {"jvp", "linearize", "custom_jvp"} & set(pair)
    if not {"custom_vjp", "while", "while with lanes apart"} & set(pair)
  ]
  assert_chains_agree(chains, make=by_residual)


# -- uses ----------------------------------------------------------------------------------------
def test_an_object_is_made_once_and_used_in_and_outside_of_programs(engine: str) -> None:
  handle = boxes(3.0)
  assert used(handle) == 3
  assert jax.jit(used)(handle) == 3
  assert jax.jit(lambda: used(handle))() == 3
  made = jax.jit(lambda x: boxes(x))(4.0)
  assert used(made) == 4


def test_branches_choose_between_objects(engine: str) -> None:
  @jax.jit
  def program(flag: Any, x: Any) -> Any:
    return used(jax.lax.cond(flag, boxes, lambda x: boxes(10 * x), x))

  assert (program(True, 2.0), program(False, 2.0)) == (2, 20)


def test_vmap_makes_an_object_a_lane(engine: str) -> None:
  handles = jax.vmap(boxes)(jnp.arange(4.0))
  assert repr(handles) == "Handle([4])"
  np.testing.assert_array_equal(jax.vmap(used)(handles), np.arange(4.0))
  chosen = jax.jit(lambda h, i: used(jax.tree.map(lambda x: x[i], h)))(handles, 2)
  assert chosen == 2
  nested = jax.jit(jax.vmap(jax.vmap(lambda x: used(boxes(x)))))
  np.testing.assert_array_equal(nested(jnp.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3))


def test_a_whole_batch_arrives_as_a_list_of_objects() -> None:
  def total(objects: list[Box], x: Any) -> Any:
    return np.array([sum(o.value for o in objects) + v for v in x], np.float32)

  handles = jax.vmap(boxes)(jnp.arange(3.0))
  got = jax.vmap(lambda h, x: cg.use(total, h, x, out=ZERO, vmap="whole"))(handles, jnp.arange(3.0))
  np.testing.assert_array_equal(got, [3, 4, 5])


def test_objects_go_to_makers_in_and_out_of_pytrees(engine: str) -> None:
  pair = cg.hold(lambda tree: (tree["a"].value, tree["b"]))
  handle = pair({"a": boxes(1.0), "b": jnp.arange(2)})
  got = cg.use(lambda p, k: p[0] + p[1][k], handle, out=ZERO, k=1, cast=True)
  assert got == 2


def test_each_device_has_objects_of_its_own(engine: str) -> None:
  mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("i")
  x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, spec))
  make = cg.hold(lambda x: Box(x.sum()))
  sums = jax.jit(
    jax.shard_map(
      lambda x: jax.tree.map(lambda w: w[None], make(x)), mesh=mesh, in_specs=spec, out_specs=spec
    )
  )
  handles = sums(x)
  np.testing.assert_array_equal(jax.vmap(used)(handles), [1, 5, 9, 13])
  lanes = jax.jit(jax.vmap(lambda x: used(boxes(x))))(x)
  np.testing.assert_array_equal(lanes, np.arange(8.0))


@pytest.mark.parametrize("kind", ["handles", "started calls", "waits"])
def test_lanes_of_devices_make_objects_in_branches(kind: str, engine: str) -> None:
  twice = cg.gate(lambda x: x * 2, out=lambda x: x)
  lane: Any = {
    "handles": lambda x: used(jax.lax.cond(x > 1, lambda: boxes(x), lambda: boxes(-x))),
    "started calls": lambda x: jax.lax.cond(
      x > 1, lambda: twice.start(x), lambda: twice.start(-x)
    ).result(),
    "waits": lambda x: jax.lax.cond(x > 1, lambda: twice.start(x).result(), lambda: x),
  }[kind]
  mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  x = np.arange(8, dtype=np.float32)
  mapped = jax.shard_map(jax.vmap(lane), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
  expected = jax.jit(jax.vmap(lane))(x)
  np.testing.assert_array_equal(jax.jit(mapped)(x), expected)
  factor = 1 if kind == "handles" else 2
  np.testing.assert_array_equal(expected[2:], factor * x[2:])


def test_the_tangent_of_a_handle_is_float0() -> None:
  handle, tangent = jax.jvp(boxes, (1.0,), (1.0,))
  assert core(tangent).words.dtype == jax.dtypes.float0
  assert used(handle) == 1
  gradient = jax.grad(lambda x: x * used(boxes(jax.lax.stop_gradient(x))))(2.0)
  assert gradient == 2


def test_a_linear_argument_has_a_tangent_beside_an_object() -> None:
  make = cg.hold(np.array)

  def times(handle: cg.Handle, x: Any) -> Any:
    return cg.use(lambda m, x: m @ x, handle, x, out=x, linear=1)

  a, x = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1.0, -1.0])
  tangent = jax.jit(lambda a, x: jax.jvp(lambda x: times(make(a), x), (x,), (x,))[1])(a, x)
  np.testing.assert_allclose(tangent, a @ x)


# -- errors --------------------------------------------------------------------------------------
def test_a_use_without_a_derivative_says_how_to_define_one() -> None:
  def twice(x: Any, **linear: Any) -> Any:
    return cg.use(lambda box, x: 2 * x, boxes(1.0), x, out=x, **linear)

  with pytest.raises(cg.GateDefinitionError, match=r"no transpose.* a jax\.custom_vjp around"):
    jax.grad(lambda x: twice(x, linear=1))(1.0)
  with pytest.raises(cg.GateDefinitionError, match=r"no derivative\. .* jax\.custom_jvp or"):
    jax.grad(twice)(1.0)


def test_a_name_is_kept_in_what_a_wrong_object_raises() -> None:
  missing = "'int' object has no attribute 'value'"
  with pytest.raises(AttributeError, match=missing) as caught, cg.errors():
    jax.block_until_ready(jax.jit(lambda: used(cg.hold(lambda: 5, name="fives")()))())
  (note,) = [n for n in caught.value.__notes__ if "called with" in n]
  assert all(part in note for part in ("int #", "made by fives", "test_hold.py"))


def test_a_dead_object_is_an_error_that_names_its_maker() -> None:
  words = np.array(core(boxes(1.0)).words)  # NumPy's copy is no array of JAX's, and keeps nothing
  cg.held()
  dead = r"use of value_of: expected the handle of a live obj"
  with pytest.raises(cg.HandleError, match=dead) as caught, cg.errors():
    jax.block_until_ready(used(cg.Handle(jnp.asarray(words))))
  assert all(part in str(caught.value) for part in ("made by test boxes", "test_hold.py"))


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (np.zeros(2, np.uint32), "got an empty handle"),
    (np.array([5 << 12, 7], np.uint32), "got one of another process"),
    (np.zeros(3, np.uint32), r"expected a handle's words, uint32\[2\], got uint32\[3\]"),
    (np.zeros(2, np.float32), r"got float32\[2\]"),
  ],
)
def test_a_value_that_is_no_handle_is_an_error(words: Any, message: str) -> None:
  with pytest.raises(cg.HandleError, match=message), cg.errors():
    jax.block_until_ready(used(cg.Handle(jnp.asarray(words))))


def test_a_maker_that_fails_raises_its_own_error() -> None:
  with pytest.raises(ZeroDivisionError), cg.errors():
    jax.block_until_ready(jax.jit(lambda x: used(cg.hold(lambda x: 1 // 0)(x)))(1.0))


def test_options_that_can_not_be_are_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="make: expected a callable"):
    cg.hold(5)  # type: ignore[arg-type]
  with pytest.raises(TypeError, match="out"):
    cg.hold(Box, out=ZERO)  # type: ignore[call-arg]
  with pytest.raises(cg.GateDefinitionError, match="fn: expected a callable"):
    cg.use(5, boxes(1.0), out=ZERO)  # type: ignore[arg-type]
  with pytest.raises(cg.GateDefinitionError, match=r"use of .*: expected a handle .*, got none"):
    jax.eval_shape(lambda x: cg.use(lambda o: o.value, x, out=ZERO), 3.0)

  async def make() -> None: ...

  class Maker:
    async def __call__(self) -> None: ...

  for function in (make, Maker()):
    with pytest.raises(cg.GateDefinitionError, match=r"hold: make: .*, got an async function"):
      cg.hold(function)


def test_a_handle_of_another_process_is_an_error() -> None:
  code = f"""
import callgate as cg, jax, numpy as np
words = np.array({np.array(core(boxes(1.0)).words).tolist()}, np.uint32)
try:
  with cg.errors():
    handle = cg.Handle(jax.numpy.asarray(words))
    jax.block_until_ready(cg.use(lambda o: np.float32(0), handle, out=np.float32(0)))
except cg.HandleError as error:
  print(error)
"""
  assert "of another process" in output_of(code)


def test_an_object_is_used_where_it_lives() -> None:
  with pytest.raises(cg.GateDefinitionError, match="use of value_of: run_on: expected 'xla' or"):
    cg.use(value_of, boxes(1.0), out=jnp.float32(0), run_on="processes")


LOOP = """
import pathlib, sys
import jax, numpy as np
import callgate as cg

make = cg.hold(lambda n: [int(n)], name="lists")
first = lambda held: np.int32(held[0])
use = lambda n: cg.use(first, make(n), out=jax.ShapeDtypeStruct((), "int32"), name="first")
path = pathlib.Path(sys.argv[2])
if sys.argv[1] == "export":
  loop = jax.jit(lambda n: jax.lax.scan(lambda c, _: (c + use(c), None), n, length=3)[0])
  path.write_bytes(jax.export.export(loop, disabled_checks=cg.export_checks())(1).serialize())
else:
  use(1)  # defines both gates, and no scope
  print(jax.export.deserialize(bytearray(path.read_bytes())).call(1))
"""


def test_an_exported_loop_over_objects_runs_where_no_such_loop_was_traced(tmp_path: Any) -> None:
  path = str(tmp_path / "loop")
  assert printed_by(LOOP, "export", path) == ""
  assert printed_by(LOOP, "run", path).strip() == "8"


class Kept:
  def __init__(self) -> None:
    self.position = 0

  def first(self, held: Any) -> Any:
    return np.int32(held[self.position])


@pytest.mark.parametrize(
  "use", [functools.partial(lambda k, held: np.int32(held[k]), 0), Kept().first]
)
def test_export_refuses_a_use_that_no_other_process_could_make(use: Any) -> None:
  def program(n: Any, **options: Any) -> Any:
    return cg.use(use, cg.hold(lambda n: [int(n)])(n), out=n, **options)

  assert int(jax.jit(program)(3)) == 3
  with pytest.raises(cg.GateDefinitionError, match=r"use of .*: expected a callable that another"):
    jax.export.export(jax.jit(program), disabled_checks=cg.export_checks())(3)
  named = jax.jit(functools.partial(program, name=f"export.{type(use).__name__}"))
  exported = jax.export.export(named, disabled_checks=cg.export_checks())(3)
  assert int(exported.call(3)) == 3
