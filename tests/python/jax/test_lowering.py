# SPDX-License-Identifier: Apache-2.0
"""Each entry of callgate._jax.lowering, partitioner and callbacks does on this JAX what it says."""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.experimental
import jax.numpy as jnp
import jaxlib.mlir.ir as ir
import numpy as np
import pytest
from jax import export
from jax._src.lib import xla_client
from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo as hlo

import callgate as cg
from callgate._jax import callbacks, compiling, execution, lowering, partitioner, sources, tracing
from callgate._sharding.rules import Rule

P = jax.P
X = np.arange(4, dtype=np.float32)


def mesh(explicit: bool = False, names: tuple[str, ...] = ("d",)) -> jax.sharding.Mesh:
  kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
  shape = (4,) if len(names) == 1 else (2, 2)
  kinds = (kind,) * len(names)
  return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:4])


def primitive(rule: Callable[..., Any], effect: Any = None) -> Any:
  made = tracing.Primitive("test lowering")
  if effect is None:
    made.def_abstract_eval(lambda aval: aval)
  else:
    made.def_effectful_abstract_eval(lambda aval: (aval, {effect}))
  mlir.register_lowering(made, rule, cacheable=False)
  return made


def lowered(
  look: Callable[[Any], Any], wrap: Callable[[Any], Any] = lambda f: f, x: Any = X, **options: Any
) -> Any:
  """Returns `look` of the context of a primitive's lowering."""
  seen: list[Any] = []

  def rule(context: Any, value: Any) -> Any:
    seen.append(look(context))
    return [value]

  jax.jit(wrap(primitive(rule).bind), **options).lower(x)
  return seen[-1]


def over_devices(x: Any = X) -> Any:
  return jax.device_put(x, jax.NamedSharding(mesh(), P("d")))


def in_shard_map(names: tuple[str, ...] = ("d",)) -> Callable[[Any], Any]:
  specs = {"in_specs": P("d"), "out_specs": P("d"), "axis_names": {"d"}}
  return lambda f: jax.shard_map(f, mesh=mesh(names=names), **specs)


# -- where a program runs --------------------------------------------------------------------------
def test_a_lowering_tells_its_devices_platforms_and_partition() -> None:
  def look(context: Any) -> Any:
    devices = lowering.program_devices(context)
    return (
      lowering.device_count(context),
      None if devices is None else len(devices),
      lowering.is_partitioned(context),
      lowering.is_automatic(context),
      lowering.is_partly_manual(context),
      lowering.platforms_of(context),
    )

  assert lowered(look) == (1, 1, False, False, False, ("cpu",))
  assert lowered(look, x=over_devices()) == (4, 4, True, True, False, ("cpu",))
  assert lowered(look, in_shard_map()) == (4, None, False, False, False, ("cpu",))
  partly = in_shard_map(("d", "e"))
  assert lowered(look, partly)[2:5] == (False, True, True)


def test_a_manual_region_tells_its_devices() -> None:
  assert lowered(lowering.manual_devices) == ()
  assert lowered(lowering.manual_devices, in_shard_map()) == tuple(
    device.id for device in mesh().devices.flat
  )
  partly = in_shard_map(("d", "e"))
  assert lowered(lowering.manual_devices, partly) == ()
  assert (jax.__version_info__ >= (0, 11)) == lowering.TOKENS_IN_PARTLY_MANUAL


def test_a_lowering_tells_its_mesh() -> None:
  assert lowered(lowering.mesh_axes) == ()
  assert lowered(lowering.mesh_axes, in_shard_map()) == (("d", 4),)
  with jax.set_mesh(mesh(explicit=True)):
    x = jax.reshard(jnp.zeros(4), P("d"))
    assert lowered(lowering.mesh_axes, x=x) == (("d", 4),)


def test_a_lowering_and_an_equation_tell_the_users_line() -> None:
  file, line, function = lowered(sources.call_site)
  assert file == __file__
  assert function == "lowered"
  eqn = jax.make_jaxpr(lambda x: x * 2)(X).eqns[0]
  assert sources.source_of(eqn).startswith(f"{file}:")
  assert "<lambda>" in sources.source_of(eqn)
  assert line > 0


def test_a_function_with_rules_has_the_line_of_its_call() -> None:
  inner = jax.custom_jvp(lambda x: x * 2)  # JAX traces it by itself, once
  inner.defjvps(lambda t, *_: t * 2)
  seen: list[Any] = []

  def outer(x: Any) -> Any:
    seen.append(sources.users_line())
    with sources.traced_here():
      return inner(x)

  (call,) = jax.make_jaxpr(outer)(X).eqns
  (eqn,) = call.params["call_jaxpr"].eqns
  file, line, function = seen[0]
  assert (file, function) == (__file__, f"{_here()}.<locals>.outer")
  assert sources.source_of(eqn) == f"{file}:{line + 1} ({function})"

  def again(x: Any) -> Any:
    with sources.traced_as(eqn):
      return x * 3

  (same,) = jax.make_jaxpr(again)(X).eqns
  assert sources.source_of(same) == sources.source_of(eqn)


def test_a_shared_program_says_that_its_line_is_the_first() -> None:
  @sources.shared
  def double(x: Any) -> Any:
    return x * 2

  (eqn,) = jax.make_jaxpr(double)(X).eqns
  assert sources.source_of(eqn).endswith("double (the first such call outside of jax.jit))")


DIRECT: dict[str, Callable[[Any], Any]] = {
  "map": lambda gate: jax.lax.map(gate, X),
  "cond": lambda gate: jax.lax.cond(X[0] < 9, gate, jnp.sin, X),
  "while_loop": lambda gate: jax.lax.while_loop(lambda x: x[0] < 9, gate, X),
  "checkpoint": lambda gate: jax.jit(jax.checkpoint(gate))(X),
  "jit": lambda gate: jax.jit(gate)(X),
}


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("caller", DIRECT)
def test_a_gate_that_jax_calls_itself_has_the_users_line(caller: str, rules: bool) -> None:
  @cg.gate(out=lambda x: x)
  def failing(x: Any) -> Any:
    raise ValueError("no")

  if rules:
    failing.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
  call = DIRECT[caller]
  with pytest.raises(ValueError, match="no") as caught, cg.errors():
    jax.block_until_ready(call(failing))
  line = f'called at File "{__file__}", line {call.__code__.co_firstlineno}, in <lambda>'
  (note,) = (note for note in caught.value.__notes__ if "called at" in note)
  exact = caller == "jit" and not rules
  assert note.endswith(line if exact else f"{line} (the first such call)")


def test_a_line_that_jax_has_stays() -> None:
  def double(x: Any) -> Any:
    with sources.users_line_kept():
      return x * 2

  (eqn,) = jax.make_jaxpr(double)(X).eqns
  assert sources.source_of(eqn).endswith(".<locals>.double)")


def _here() -> str:
  return test_a_function_with_rules_has_the_line_of_its_call.__qualname__


def test_open_shapes_are_told() -> None:
  symbolic = export.symbolic_shape("n")[0]
  avals = [jax.core.ShapedArray((3,), np.float32), jax.core.ShapedArray((symbolic,), np.float32)]
  assert lowering.has_open_shapes(avals)
  assert not lowering.has_open_shapes(avals[:1])


def test_values_get_the_shardings_of_their_types() -> None:
  texts: list[str] = []

  def rule(context: Any, value: Any) -> Any:
    made = lowering.annotate(context, [value], context.avals_out)
    texts.append(str(made[0].owner))
    return made

  with jax.set_mesh(mesh(explicit=True)):
    jax.jit(primitive(rule).bind).lower(jax.reshard(jnp.zeros(4), P("d")))
  jax.jit(primitive(rule).bind).lower(X)
  assert ["sharding" in text for text in texts] == [True, False]


def test_a_device_tells_its_position_in_a_manual_program() -> None:
  made = tracing.Primitive("test position")
  made.def_abstract_eval(lambda aval: aval)

  def rule(context: Any, value: Any) -> Any:
    number = lowering.partition_id()
    number = hlo.convert(ir.RankedTensorType.get((), ir.F32Type.get()), number)
    return [hlo.broadcast_in_dim(value.type, number, ir.DenseI64ArrayAttr.get([]))]

  mlir.register_lowering(made, rule)
  program = jax.jit(in_shard_map()(made.bind))
  np.testing.assert_array_equal(program(over_devices()), np.arange(4))


# -- what a program holds --------------------------------------------------------------------------
def test_a_program_keeps_what_it_is_given() -> None:
  kept = [execution.Watcher(), execution.Watcher()]
  watches = [weakref.ref(one) for one in kept]

  def rule(context: Any, value: Any) -> Any:
    lowering.add_keepalive(context, kept[0])
    execution.watch(context, kept[1])
    execution.watch(context, None)
    return [value]

  compiled = jax.jit(primitive(rule).bind).lower(X).compile()
  kept.clear()
  assert [watch() is None for watch in watches] == [False, False]
  np.testing.assert_array_equal(compiled(X), X)


class Named:
  """A callee of the runtime's of which there may be several; the last one has claimed its name."""

  name = "test compiled"
  claims: ClassVar[list[Named]] = []

  def claim_name(self) -> None:
    self.claims.append(self)

  def release_name(self) -> None:
    assert self.claims[-1] is self


def program_of(*callees: Named) -> Any:
  def rule(context: Any, value: Any) -> Any:
    for callee in callees:
      compiling.keep_callee(context, callee)
    return [value]

  return jax.jit(primitive(rule).bind).lower(X)


def test_a_program_that_is_compiled_has_the_names_of_its_callees() -> None:
  assert callable(compiling.start)  # called before the first gate
  old, new = program_of(first := Named()), program_of(second := Named())
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    with compiling._claimed({"test compiled": first}):
      old.compile()
      waiting = thread.submit(new.compile)
      with pytest.raises(TimeoutError):
        waiting.result(0.2)
      assert set(Named.claims) == {first}
      old.compile()
    waiting.result(60)
  assert Named.claims[-1] is second
  assert compiling._claims == {}
  with pytest.raises(RuntimeError, match="'test compiled' was redefined while"):
    program_of(first, second)


def test_a_fork_s_child_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(compiling, "_claims", {"test compiled": [Named()]})
  monkeypatch.setattr(Named, "claims", list(*compiling._claims.values()))
  compiling.after_fork()  # as in a child of a process that compiled just then
  program_of(Named()).compile()


def test_a_program_for_export_asks_nobody() -> None:
  seen: list[bool] = []

  def rule(context: Any, value: Any) -> Any:
    seen.append(lowering.is_export(context))
    execution.watch(context, execution.Watcher())
    return [value]

  exported = export.export(
    jax.jit(primitive(rule).bind),
    disabled_checks=[export.DisabledSafetyCheck.custom_call("test")],
  )(X)
  assert seen == [True]
  assert exported.serialize()
  assert not lowered(lowering.is_export)


def test_each_platform_gets_its_rule() -> None:
  def rule(context: Any, value: Any) -> Any:
    doubled = lambda context, x: [hlo.add(x, x)]
    tripled = lambda context, x: [hlo.multiply(x, x)]
    rules = {"cpu": doubled, "cuda": tripled}
    return lowering.lower_each_platform(context, rules, frozenset(), [value])

  program = jax.jit(primitive(rule).bind)
  np.testing.assert_array_equal(program(X), 2 * X)
  both = program.trace(X).lower(lowering_platforms=("cpu", "cuda")).as_text()
  assert "stablehlo.add" in both
  assert "stablehlo.multiply" in both


@pytest.mark.parametrize("gives_token", [True, False])
def test_a_foreign_call_has_its_attributes_order_aliases_and_name(gives_token: bool) -> None:
  class Own(tracing.Effect):
    pass

  effect = Own()
  tracing.allow_effect(Own, ordered=True)
  options: dict[str, Any] = {"has_side_effect": True, "aliases": {0: 0}, "named": "spoken"}

  def rule(context: Any, value: Any) -> Any:
    if not gives_token:
      context.set_tokens_out(context.tokens_in)
    return lowering.emit_ffi_call(
      context, "test_target", [value], context.avals_in, context.avals_out,
      {"number": np.int64(7)}, order=effect, gives_token=gives_token, **options,
    )  # fmt: skip

  made = jax.jit(primitive(rule, effect).bind).lower(X)
  call = next(line for line in made.as_text().splitlines() if "test_target" in line)
  assert "number = 7 : i64" in call
  assert "has_side_effect = true" in call
  assert call.count("!stablehlo.token") == 1 + gives_token
  assert "output_operand_alias" in call
  assert "callgate/spoken" in made.as_text(debug_info=True)


def test_an_ordered_callback_of_jax_takes_another_effects_place() -> None:
  class Own(tracing.Effect):
    pass

  effect, seen = Own(), list[float]()
  tracing.allow_effect(Own, ordered=True)

  def calls(x: Any) -> Any:
    note = lambda x: seen.append(float(x[0])) or x
    return [jax.experimental.io_callback(note, x, x, ordered=True)]

  p = primitive(lambda context, x: lowering.lower_in_order(context, calls, [x], effect), effect)
  program = jax.jit(lambda x: p.bind(p.bind(x) + 1))
  np.testing.assert_array_equal(program(X), X + 1)
  jax.effects_barrier()
  assert seen == [0.0, 1.0]


# -- XLA's partitioner -----------------------------------------------------------------------------
GRID = np.arange(4).reshape(2, 2, 1, 1)


def test_a_tiling_is_a_grid_of_devices_and_back() -> None:
  tiled = partitioner.sharding_of_grid(GRID, 2)
  np.testing.assert_array_equal(partitioner.device_grid(tiled, 2), GRID)
  assert partitioner.spec_of_sharding(tiled, mesh(names=("d", "e"))) == P("d", "e")
  rows = partitioner.sharding_of_grid(GRID.reshape(2, 1, 2, 1), 2)
  np.testing.assert_array_equal(partitioner.device_grid(rows, 2), GRID.reshape(2, 1, 2, 1))
  whole = partitioner.replicated_sharding()
  assert partitioner.device_grid(whole, 2) is None
  one = xla_client.OpSharding()
  one.type = xla_client.OpSharding.Type.MAXIMAL  # as JAX has it for its callbacks
  one.tile_assignment_dimensions = [1]
  one.tile_assignment_devices = [0]
  alone = xla_client.HloSharding.from_proto(one)
  assert [partitioner.is_of_one_device(s) for s in (tiled, whole, alone)] == [False, False, True]
  assert partitioner.device_grid(alone, 2) is None
  assert partitioner.sharding_of_grid(np.arange(4).reshape(1, 1, 4, 1), 2) == whole
  assert partitioner.tuple_sharding([tiled, whole]).tuple_elements() == [tiled, whole]


def test_a_calls_partitioner_is_asked_by_xla() -> None:
  asked: list[Any] = []

  def partition(shapes: Any, shardings: Any, result: Any, sharding: Any, config: Any) -> Any:
    asked.append([*map(partitioner.shape_and_dtype, shapes), len(shardings)])
    raise RuntimeError("the partitioner is asked")

  whole = lambda *_: partitioner.replicated_sharding()
  partitioner.register_partitioner("test_partitioned", lambda s, _: s, partition, whole)

  def rule(context: Any, value: Any) -> Any:
    return lowering.emit_ffi_call(
      context, "test_partitioned", [value], context.avals_in, context.avals_out, {},
      has_side_effect=False, aliases={},
    )  # fmt: skip

  with contextlib.suppress(jax.errors.JaxRuntimeError):
    jax.jit(primitive(rule).bind).lower(over_devices()).compile()
  assert asked == [[((4,), np.float32), 1]]
  token = type("Token", (), {"__str__": lambda self: "token[]"})()
  assert partitioner.shape_and_dtype(token) == ((), None)


def test_shardys_rule_is_on_the_call() -> None:
  shared = Rule(operands=((0,),), results=((0,),))

  def rule(context: Any, value: Any) -> Any:
    made = hlo.custom_call([value.type], [value], call_target_name="test_ruled")
    partitioner.set_sharding_rule(made.owner if hasattr(made, "owner") else made[0].owner, shared)
    return [made] if hasattr(made, "owner") else list(made)

  assert "sdy.sharding_rule" in jax.jit(primitive(rule).bind).lower(X).as_text()


# -- JAX's callbacks -------------------------------------------------------------------------------
def test_jaxs_callbacks_are_these_primitives_with_these_rules() -> None:
  def calls(x: Any) -> Any:
    jax.debug.callback(lambda x: None, x)
    jax.debug.print("{}", x)
    x = jax.pure_callback(lambda x: x, x, x)
    return jax.experimental.io_callback(lambda x: x, x, x)

  found = [eqn.primitive for eqn in jax.make_jaxpr(calls)(X).eqns]
  assert found == [
    callbacks.debug_callback_p,
    callbacks.debug_print_p,
    callbacks.pure_callback_p,
    callbacks.io_callback_p,
  ]
  for rule in (
    callbacks.debug_callback_lowering,
    callbacks.debug_print_lowering,
    callbacks.pure_callback_lowering,
    callbacks.io_callback_lowering,
    callbacks.buffer_callback_lowering(),
  ):
    assert callable(rule)


def test_a_print_is_a_function_of_flat_arrays(capsys: pytest.CaptureFixture[str]) -> None:
  eqn = jax.make_jaxpr(lambda x: jax.debug.print("x is {}", x))(X).eqns[0]
  callbacks.debug_print_callback(eqn.params)(np.float32(3))
  assert capsys.readouterr().out == "x is 3.0\n"


def test_foreign_calls_are_batched_by_their_method() -> None:
  assert callable(callbacks.ffi_batching_rule)
  call = jax.ffi.ffi_call("test_ffi", jax.ShapeDtypeStruct((), "float32"), vmap_method="sequential")
  text = str(jax.make_jaxpr(jax.vmap(call))(X))
  assert "scan" in text or "while" in text


def test_a_callbacks_operation_has_a_sharding_where_it_is_partitioned() -> None:
  for token in (False, True):
    look = lambda context: callbacks.callback_sharding(
      context, None, context.avals_out, token=token
    )
    assert len(lowered(look, x=over_devices()).shardings) == 1 + token


def test_a_callbacks_thread_has_its_settings_for_a_while() -> None:
  other = jax.devices()[1]
  enter, leave = callbacks.callback_scope(other)
  before = enter()
  assert jnp.zeros(1).device == other
  leave(before)
  assert jnp.zeros(1).device == jax.devices()[0]
