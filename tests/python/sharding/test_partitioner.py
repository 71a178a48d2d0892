# SPDX-License-Identifier: Apache-2.0
"""Gates and kernels in programs over several devices: one call a shard, right for every rule."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from interpreters import printed_by
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from property_checks import examples
from split_arrays import MESHES, X, mesh, moves, put, specs
from waiting import until

import callgate as cg
from callgate import _callgate
from callgate._core.public import core

DTYPES = ["int32", "float32", "bfloat16", "uint8", "complex64", "bool", "int8", "float16"]


class Calls:
  """The shapes of a gate's arguments, from several threads."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self.shapes: list[Any] = []

  def saw(self, *arrays: np.ndarray) -> None:
    with self._lock:
      self.shapes.append(tuple(x.shape for x in arrays))

  def take(self) -> list[Any]:
    jax.effects_barrier()
    with self._lock:
      shapes, self.shapes = sorted(self.shapes), []
      return shapes


def doubling(**options: Any) -> tuple[cg.Gate, Calls]:
  calls = Calls()

  def double(x: np.ndarray) -> np.ndarray:
    calls.saw(x)
    return x * 2

  return cg.gate(double, out=lambda x: x, **options), calls


# -- every rule, every mesh, every sharding ------------------------------------------------------
def follow(
  terms: Sequence[Sequence[str]], outs: Sequence[Sequence[str]], whole: set[str], dtype: Any
) -> Callable[..., Any]:
  """A function for a rule: sums over what results lack, running sums along whole dimensions.

  Splitting a dimension that must be whole would change what it gives.
  """

  def function(*xs: np.ndarray) -> tuple[np.ndarray, ...]:
    sizes = {
      n: e for x, term in zip(xs, terms, strict=True) for n, e in zip(term, x.shape, strict=True)
    }
    results: list[np.ndarray] = []
    for out in outs:
      total = np.zeros(
        [sizes[n] for n in out], np.complex64 if np.dtype(dtype).kind == "c" else int
      )
      for x, term in zip(xs, terms, strict=True):
        y = x.astype(total.dtype)
        for axis, name in enumerate(term):
          if name in whole:
            y = np.cumsum(y, axis=axis)
        y = y.sum(axis=tuple(i for i, name in enumerate(term) if name not in out))
        kept = [name for name in term if name in out]
        y = y.transpose([kept.index(name) for name in out if name in kept])
        total = total + y.reshape([sizes[n] if n in kept else 1 for n in out])
      limit = 7 if np.dtype(dtype).kind != "b" else 2
      small = total if np.dtype(dtype).kind == "c" else total % limit
      results.append(np.array(small.astype(dtype), order="C"))
    return tuple(results)

  return function


@hypothesis.given(st.data())
@examples(20, suppress_health_check=list(hypothesis.HealthCheck))
def test_every_rule_gives_what_one_device_gives(data: st.DataObject) -> None:
  on = mesh(data.draw(st.sampled_from(sorted(MESHES)), "mesh"))
  dtype = jnp.dtype(data.draw(st.sampled_from(DTYPES), "dtype"))
  names = st.lists(st.sampled_from("ijk"), max_size=3, unique=True)
  terms = data.draw(st.lists(names, min_size=1, max_size=3), "operands")
  known = sorted({name for term in terms for name in term})
  some = st.lists(st.sampled_from(known), max_size=3, unique=True) if known else st.just([])
  outs = data.draw(st.lists(some, min_size=1, max_size=2), "results")
  whole = set(data.draw(st.lists(st.sampled_from("ijk"), max_size=1), "whole"))
  extents = {name: data.draw(st.sampled_from([4, 8, 6]), f"extent of {name}") for name in "ijk"}
  effect = data.draw(st.sampled_from(["pure", "io", "ordered"]), "effect")

  def term(letters: Sequence[str]) -> str:
    return " ".join(f"[{n}]" if n in whole else n for n in letters)

  rule = f"{', '.join(map(term, terms))} -> {', '.join(map(term, outs))}"
  hypothesis.note(rule)
  types = [jax.ShapeDtypeStruct([extents[n] for n in out], dtype) for out in outs]
  function = follow(terms, outs, whole, dtype)
  gate = cg.gate(function, out=tuple(types), sharding=rule, effect=effect)
  shapes = [tuple(extents[n] for n in letters) for letters in terms]
  arrays = [(np.arange(int(np.prod(s))).reshape(s) % 2).astype(dtype) for s in shapes]
  inputs = [
    put(x, on, *data.draw(specs(x.shape, on), f"sharding of operand {i}"))
    for i, x in enumerate(arrays)
  ]
  wanted = [
    NamedSharding(on, data.draw(specs(tuple(t.shape), on), f"sharding of result {i}"))
    for i, t in enumerate(types)
  ]
  placed = data.draw(st.booleans(), "results are placed")
  call = jax.jit(gate, out_shardings=tuple(wanted) if placed else None)
  with cg.errors():
    found = jax.block_until_ready(call(*inputs))
  for got, want in zip(found, function(*arrays), strict=True):
    np.testing.assert_array_equal(np.asarray(got), want)


@hypothesis.given(st.data())
@examples(9, suppress_health_check=list(hypothesis.HealthCheck))
def test_lanes_may_be_anywhere(data: st.DataObject) -> None:
  on = mesh(data.draw(st.sampled_from(sorted(MESHES)), "mesh"))
  vmap = data.draw(st.sampled_from(["each", "whole", "broadcast"]), "vmap")
  sharding = data.draw(st.sampled_from([None, "gather", "shard", "i [j], j -> i"]), "sharding")
  effect = data.draw(st.sampled_from(["pure", "io"]), "effect")

  def weigh(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return (np.cumsum(x, -1) * w[..., None, :]).sum(-1)

  gate = cg.gate(
    weigh,
    out=lambda x, w: jax.ShapeDtypeStruct(x.shape[:-1], x.dtype),
    vmap=vmap,
    sharding="i [j], j -> i" if sharding == "shard" else sharding,
    effect=effect,
  )
  x = np.arange(8 * 8 * 4, dtype=np.float32).reshape(8, 8, 4) % 5
  shared = data.draw(st.booleans(), "the second operand has no lanes")
  w = np.arange(4 if shared else 32, dtype=np.float32).reshape((4,) if shared else (8, 4)) % 3
  function = jax.vmap(gate, in_axes=(0, None if shared else 0))
  inputs = [put(v, on, *data.draw(specs(v.shape, on), "sharding")) for v in (x, w)]
  want = (np.cumsum(x, -1) * (w if shared else w[:, None])).sum(-1)
  np.testing.assert_array_equal(np.asarray(jax.jit(function)(*inputs)), want)


# -- what is called, and what moves --------------------------------------------------------------
def test_a_call_a_shard_and_nothing_moves() -> None:
  gate, calls = doubling(sharding="shard")
  x = put(X, mesh("8"), "a")
  y = jax.jit(lambda x: gate(x) + 1)(x)
  np.testing.assert_array_equal(y, X * 2 + 1)
  assert y.sharding.spec == P("a")
  assert calls.take() == [((2, 8),)] * 8
  assert moves(lambda x: gate(x) + 1, x) == set()


def test_the_program_holds_the_call_on_the_shards_shape_and_no_pointer() -> None:
  gate, _ = doubling(sharding="shard", name="doubled")
  text = jax.jit(gate).lower(put(X, mesh("8"), "a")).compile().as_text()
  (call,) = [line for line in text.splitlines() if 'custom_call_target="callgate.gate"' in line]
  assert "f32[2,8]" in call
  assert "f32[16,8]" not in text.split("ENTRY")[1]
  held = call.split("backend_config=")[1]
  assert str(id(gate)) not in held
  assert f"{id(core(gate).callee):x}" not in held


def test_gather_calls_once_on_the_whole_array() -> None:
  for options in ({}, {"sharding": "gather"}):
    gate, calls = doubling(**options)
    np.testing.assert_array_equal(jax.jit(gate)(put(X, mesh(), "a", "b")), X * 2)
    assert calls.take() == [((16, 8),)]


def test_lanes_of_a_vmap_are_split_without_being_told_to() -> None:
  gate, calls = doubling()
  x = put(X, mesh("8"), "a")
  np.testing.assert_array_equal(jax.jit(jax.vmap(gate))(x), X * 2)
  assert calls.take() == [((8,),)] * 16
  assert moves(jax.vmap(gate), x) == set()


def test_gather_still_splits_lanes() -> None:
  gate, calls = doubling(sharding="gather")
  np.testing.assert_array_equal(jax.jit(jax.vmap(gate))(put(X, mesh(), "a", "b")), X * 2)
  assert calls.take() == [((8,),)] * 16


def test_a_whole_dimension_is_gathered_and_no_other() -> None:
  gate, calls = doubling(sharding="i [j] -> i [j]")
  x = put(X, mesh(), "a", "b")
  np.testing.assert_array_equal(jax.jit(gate)(x), X * 2)
  assert set(calls.take()) == {((4, 8),)}
  assert moves(gate, x) == {"all-gather"}


@pytest.mark.parametrize("effect", ["io", "ordered"])
def test_effects_happen_once_a_distinct_shard(effect: str) -> None:
  gate, calls = doubling(sharding="shard", effect=effect)
  y = jax.jit(gate)(put(X, mesh(), "a"))
  np.testing.assert_array_equal(y, X * 2)
  assert calls.take() == [((4, 8),)] * 4


def test_results_of_one_call_reach_every_device() -> None:
  """Arrays of all dtypes, in one program."""
  numbers = jnp.asarray((np.arange(16).reshape(8, 2) % 3) - 1)
  values = [numbers.astype(dtype) for dtype in (*DTYPES, "float8_e4m3fn", "int16", "uint32")]

  def both(x: Any) -> Any:
    return cg.call(lambda x: (x.copy(), x[0].copy()), (x, x[0]), x, effect="io")

  found = jax.jit(lambda xs: [both(x) for x in xs])([put(x, mesh("8"), "a") for x in values])
  for want, (whole, row) in zip(values, found, strict=True):
    for shard in (*whole.addressable_shards, *row.addressable_shards):
      part = np.asarray(want if shard.data.ndim == 2 else want[0])[shard.index]
      assert np.asarray(shard.data).tobytes() == part.tobytes(), want.dtype


def test_negative_zero_and_nan_survive_being_sent() -> None:
  values = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
  gate = cg.gate(lambda x: x.copy(), out=lambda x: x)
  y = jax.jit(gate)(put(np.tile(values, 8), mesh("8"), "a"))
  assert np.asarray(y).tobytes() == np.tile(values, 8).tobytes()


def test_zero_size_arrays_and_scalars() -> None:
  gate, calls = doubling(sharding="shard", effect="io")
  assert jax.jit(gate)(put(np.zeros((8, 0), np.float32), mesh("8"), "a")).shape == (8, 0)
  assert float(jax.jit(gate)(put(np.float32(3), mesh("8")))) == 6
  assert set(calls.take()) == {((),), ((8, 0),)}


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gates_without_operands_are_called_once(effect: Any, kind: AxisType) -> None:
  calls: list[int] = []
  on = mesh(kind=kind)
  gives = cg.gate(
    lambda: (calls.append(1), np.float32(3))[1],
    out=jax.ShapeDtypeStruct((), jnp.float32),
    effect=effect,
  )
  with jax.set_mesh(on):
    y = jax.jit(lambda x: x * gives())(put(X, on, "a"))
    np.testing.assert_array_equal(y, X * 3)
    assert calls == [1]
    if effect != "pure":
      notes = cg.gate(lambda: calls.append(2), out=(), effect=effect)
      jax.block_until_ready(jax.jit(lambda x: (notes(), x + 1)[1])(put(X, on, "a")))
      jax.effects_barrier()
      assert calls == [1, 2]


def test_an_uneven_dimension_is_gathered() -> None:
  gate, calls = doubling(sharding="shard")
  on = mesh("8")

  def program(x: jax.Array) -> jax.Array:
    longer = jnp.concatenate([x, x[:1]])
    return gate(jax.lax.with_sharding_constraint(longer, NamedSharding(on, P("a"))))

  np.testing.assert_array_equal(jax.jit(program)(put(X, on, "a")), np.concatenate([X, X[:1]]) * 2)
  assert set(calls.take()) == {((17, 8),)}


def test_devices_in_any_order() -> None:
  devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 5, 4, 6]]
  seen: dict[int, float] = {}

  def note(context: cg.Context, out: np.ndarray, x: np.ndarray) -> None:
    seen[context.rank] = float(x.flat[0])
    out[...] = x

  gate = cg.gate(note, out=lambda x: x, style="context", sharding="shard")
  x = put(X, Mesh(devices, ("a",)), "a")
  np.testing.assert_array_equal(jax.jit(gate)(x), X)
  assert seen == {rank: 16.0 * rank for rank in range(8)}


# -- transformations -----------------------------------------------------------------------------
RULES: dict[str, dict[str, Any]] = {
  "shard": {"sharding": "shard"},
  "gather": {"sharding": "gather"},
  "rows": {"sharding": "i [j] -> i [j]"},
  "io": {"sharding": "shard", "effect": "io"},
  "ordered": {"sharding": "shard", "effect": "ordered"},
}


def programs(on: Mesh) -> dict[str, Callable[[Any], Callable[[Any], Any]]]:
  """Programs around a function of an array that doubles it, all of which double it once."""
  spec = P("a", "b")

  def with_rule(gate: Any) -> Callable[[Any], Any]:
    f = jax.custom_vjp(lambda x: gate(x))
    f.defvjp(lambda x: (gate(x), None), lambda _, ct: (gate(ct),))
    return f

  return {
    "plain": lambda g: g,
    "scan": lambda g: lambda x: jax.lax.scan(lambda c, _: (g(c), None), x, length=1)[0],
    "scanned rows": lambda g: lambda x: jax.lax.map(lambda r: g(r[None])[0], x),
    "while": lambda g: lambda x: jax.lax.fori_loop(0, 1, lambda _, c: g(c), x),
    "cond": lambda g: lambda x: jax.lax.cond(x.sum() > 0, g, lambda x: x, x),
    "vmap": lambda g: jax.vmap(lambda r: g(r[None])[0]),
    "vmap of columns": lambda g: jax.vmap(lambda r: g(r[None])[0], in_axes=1, out_axes=1),
    "vmap with spmd_axis_name": lambda g: jax.vmap(lambda r: g(r[None])[0], spmd_axis_name="a"),
    "nested vmap": lambda g: jax.vmap(jax.vmap(lambda v: g(v[None, None])[0, 0])),
    "vmap of scan": lambda g: jax.vmap(
      lambda r: jax.lax.scan(lambda c, _: (g(c[None])[0], None), r, length=1)[0]
    ),
    "gradient": lambda g: (
      lambda x: jax.grad(lambda x: (with_rule(g)(x) * x).sum())(x) - with_rule(g)(x)
    ),
    "remat": lambda g: (
      lambda x: (
        jax.grad(
          lambda c: jax.lax.scan(jax.checkpoint(lambda c, _: (with_rule(g)(c), None)), c, length=1)[
            0
          ].sum()
        )(x)
        * x
      )
    ),
    "jvp": lambda g: lambda x: jax.jvp(lambda x: x * 2, (x,), (g(x) / 2,))[1],
    "constraint": lambda g: (
      lambda x: g(jax.lax.with_sharding_constraint(x, NamedSharding(on, P("b", "a"))))
    ),
    "shard_map": lambda g: jax.shard_map(g, mesh=on, in_specs=spec, out_specs=spec),
    "shard_map, unchecked": lambda g: jax.shard_map(
      g, mesh=on, in_specs=spec, out_specs=spec, check_vma=False
    ),
    "partly automatic": lambda g: jax.shard_map(
      g, mesh=on, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
    ),
    "partly automatic, unchecked": lambda g: jax.shard_map(
      g, mesh=on, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, check_vma=False
    ),
  }


def _is_refused(rule: str, program: str) -> bool:
  """XLA ends the process for such a program with JAX 0.10."""
  return jax.__version_info__ < (0, 11) and rule == "ordered" and program.startswith("partly")


@functools.cache
def results_and_calls(rule: str) -> dict[str, tuple[np.ndarray, list[Any]]]:
  """All programs as one, which compiles faster than one each; each with a gate of its own."""
  on = mesh()
  used = {name: make for name, make in programs(on).items() if not _is_refused(rule, name)}
  gates = {name: doubling(**RULES[rule]) for name in used}
  function = jax.jit(lambda x: {name: make(gates[name][0])(x) for name, make in used.items()})
  found = jax.block_until_ready(function(put(X, on, "a", "b")))
  return {name: (np.asarray(found[name]), gates[name][1].take()) for name in used}


@pytest.mark.parametrize(("rule", "program"), list(itertools.product(RULES, programs(mesh()))))
def test_every_rule_under_every_transformation(rule: str, program: str) -> None:
  if _is_refused(rule, program):
    gate, on = doubling(**RULES[rule])[0], mesh()
    with pytest.raises(cg.GateDefinitionError, match="leaves some of them to XLA"):
      jax.jit(programs(on)[program](gate))(put(X, on, "a", "b"))
    return
  found, calls = results_and_calls(rule)[program]
  np.testing.assert_array_equal(found, X * 2)
  assert calls


def test_a_whole_value_that_goes_through_jaxs_callback_is_refused_in_a_partly_manual_program() -> (
  None
):
  from callgate.compat import host_callback_2023

  tapped = lambda x: host_callback_2023.id_tap(lambda value, transforms: None, x)
  on = mesh()
  with pytest.raises(cg.GateDefinitionError, match=r"callback of JAX's own .* leaves some of them"):
    jax.jit(programs(on)["partly automatic"](tapped))(put(X, on, "a", "b"))


@pytest.mark.parametrize("rule", ["shard", "rows", "io", "ordered"])
def test_results_carry_the_propagated_spec_in_their_type(rule: str) -> None:
  on = mesh(kind=AxisType.Explicit)
  gate, _ = doubling(**RULES[rule])
  types: list[Any] = []

  def program(x: jax.Array) -> jax.Array:
    y = gate(x)
    types.append(jax.typeof(y).sharding.spec)
    return y

  with jax.set_mesh(on):
    x = put(X, on, "a", "b")
    y = jax.jit(program)(x)
    np.testing.assert_array_equal(y, X * 2)
    assert types == [P("a", None) if rule == "rows" else P("a", "b")]
    assert y.sharding.spec == types[0]
    np.testing.assert_array_equal(gate(x), X * 2)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda r: gate(r[None])[0]))(x), X * 2)
    if rule != "rows":
      scanned = jax.jit(lambda x: jax.lax.scan(lambda c, _: (gate(c), None), x, length=2)[0])
      np.testing.assert_array_equal(scanned(x), X * 4)
      rule_of = jax.custom_vjp(lambda x: gate(x))
      rule_of.defvjp(lambda x: (gate(x), None), lambda _, ct: (gate(ct),))
      gradient = jax.jit(jax.grad(lambda x: (rule_of(x) * 3).sum()))(x)
      np.testing.assert_array_equal(gradient, np.full_like(X, 6))


def test_a_matrix_product_on_an_explicit_mesh() -> None:
  on = mesh(kind=AxisType.Explicit)
  gate = cg.gate(
    lambda a, b: a @ b,
    out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
    sharding="i k, k j -> i j",
  )
  with jax.set_mesh(on):
    y = jax.jit(gate)(put(X, on, "a"), put(X.T.copy(), on, None, "b"))
    assert jax.typeof(y).sharding.spec == P("a", "b")
    np.testing.assert_allclose(y, X @ X.T)


def test_donated_memory_is_the_results_on_every_device() -> None:
  def add(out: np.ndarray, x: np.ndarray) -> None:
    np.add(x, 1, out=out)

  gate = cg.gate(add, out=lambda x: x, style="inplace", aliases={0: 0}, sharding="shard")
  x = jnp.copy(put(X, mesh("8"), "a"))  # not NumPy's memory
  before = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
  y = jax.jit(gate, donate_argnums=0)(x)
  np.testing.assert_array_equal(y, X + 1)
  assert x.is_deleted()
  assert [shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards] == before


def test_exported_programs_keep_their_shards() -> None:
  gate, calls = doubling(sharding="shard", name="exported double")
  on = mesh()
  struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(on, P("a", "b")))
  exported = jax.export.export(jax.jit(gate), disabled_checks=cg.export_checks())(struct)
  again = jax.export.deserialize(exported.serialize())
  np.testing.assert_array_equal(jax.jit(again.call)(put(X, on, "a", "b")), X * 2)
  assert calls.take() == [((4, 4),)] * 8


CACHED = """
import sys
import jax, jax.numpy as jnp, numpy as np
import callgate as cg
from jax.sharding import NamedSharding, PartitionSpec as P

hits, shapes = [], []
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.monitoring.register_event_listener(
  lambda event, **_: hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None
)
split = NamedSharding(jax.make_mesh((8,), ("a",)), P("a"))
x = jax.device_put(np.arange(16, dtype=np.float32), split)

@cg.gate(out=lambda x: x, sharding="shard", effect="io", name="cached shard")
def double(x):
  shapes.append(x.shape)
  return 2 * x

starts = []
tap = lambda x: cg.tap(x, lambda v, info: starts.append(info.shard[0].start), name="cached")
program = jax.jit(lambda x: double(tap(x))).lower(x)
before = len(hits)
compiled = program.compile()
found = len(hits) - before
y = jax.block_until_ready(compiled(x))
cg.barrier()
print(y.tolist() == list(range(0, 32, 2)), shapes == [(2,)] * 8, sorted(starts), found)
"""


def test_a_second_process_finds_sharded_programs_in_the_persistent_cache(tmp_path: Path) -> None:
  first, second = (printed_by(CACHED, str(tmp_path)).strip() for _ in range(2))
  assert first == "True True [0, 2, 4, 6, 8, 10, 12, 14] 0"
  assert second == "True True [0, 2, 4, 6, 8, 10, 12, 14] 1"


# -- kernels -------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_kernels_run_on_shards(effect: str) -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x * y + 1", sharding="shard", effect=effect)
  x = put(X, mesh(), "a")
  np.testing.assert_array_equal(jax.jit(kernel)(x, x), X * X + 1)
  if effect == "pure":
    assert moves(kernel, x, x) == set()
  np.testing.assert_array_equal(jax.jit(jax.vmap(kernel))(x, x), X * X + 1)


def test_elementwise_kernels_are_split_as_they_broadcast() -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x * y + 1")
  on = mesh()
  x, row = put(X, on, "a", "b"), put(X[:1], on, None, "b")
  y = jax.jit(kernel)(x, row)
  np.testing.assert_array_equal(y, X * X[:1] + 1)
  assert y.sharding.spec == P("a", "b")
  assert moves(kernel, x, row) == set()


@hypothesis.given(st.data())
@examples(6, suppress_health_check=list(hypothesis.HealthCheck))
def test_elementwise_kernels_broadcast_on_any_tiles(data: st.DataObject) -> None:
  on = mesh(data.draw(st.sampled_from(sorted(MESHES)), "mesh"))
  shapes = [
    data.draw(st.sampled_from([(8, 8), (8, 1), (1, 8), (8,), (1, 1), ()]), f"shape {i}")
    for i in range(2)
  ]
  arrays = [np.arange(int(np.prod(s)), dtype=np.float32).reshape(s) for s in shapes]
  inputs = [put(x, on, *data.draw(specs(x.shape, on), "sharding")) for x in arrays]
  with cg.errors():
    got = jax.block_until_ready(jax.jit(SCALED)(*inputs))
  np.testing.assert_array_equal(got, arrays[0] * arrays[1] + 1)


SCALED = cg.elementwise("T x, T y", "T z", "z = x * y + 1", name="scaled on tiles")


def test_a_kernel_that_knows_its_place_is_gathered() -> None:
  kernel = cg.elementwise("T x", "T z", "z = x + i")
  y = jax.jit(kernel)(put(np.zeros(16, np.float32), mesh("8"), "a"))
  np.testing.assert_array_equal(y, np.arange(16))


# -- functions as rules --------------------------------------------------------------------------
def test_a_function_of_the_mesh_gives_a_rule() -> None:
  seen: list[Any] = []

  def rule(mesh: Any, x: Any) -> str:
    seen.append((dict(mesh.shape), x.shape, x.sharding.spec))
    return "i [j] -> i [j]"

  gate, calls = doubling(sharding=rule)
  np.testing.assert_array_equal(jax.jit(gate)(put(X, mesh(), "a", "b")), X * 2)
  assert seen == [({"a": 4, "b": 2}, (16, 8), P("a", "b"))]
  assert set(calls.take()) == {((4, 8),)}


def test_a_function_of_the_mesh_gives_specs() -> None:
  gate, calls = doubling(sharding=lambda mesh, x: (P(("b", "a")), P(("b", "a"))))
  np.testing.assert_array_equal(jax.jit(gate)(put(X, mesh(), "a")), X * 2)
  assert calls.take() == [((2, 8),)] * 8


def test_a_function_on_an_explicit_mesh_gives_types() -> None:
  on = mesh(kind=AxisType.Explicit)
  gate, _ = doubling(sharding=lambda mesh, x: "i [j] -> i [j]")
  with jax.set_mesh(on):
    y = jax.jit(gate)(put(X, on, "a", "b"))
    assert jax.typeof(y).sharding.spec == P("a", None)
    np.testing.assert_array_equal(y, X * 2)


@pytest.mark.parametrize(
  ("given", "said"),
  [
    (3, "the function returned 3; expected 'shard', 'gather', a rule"),
    ((P("a"),), "expected 'shard', 'gather', a rule"),
    ((P("a"), (P(), P())), "expected a PartitionSpec for each of 1 result"),
    ((P(None, None, "a"), P()), "expected at most 2 entries"),
    ("i -> i j", "expected 2 name"),
  ],
)
def test_a_function_that_gives_something_else_is_told_of(given: Any, said: str) -> None:
  gate, _ = doubling(sharding=lambda mesh, x: given)
  with pytest.raises(jax.errors.JaxRuntimeError) as caught:
    jax.jit(gate)(put(X, mesh(), "a"))
  assert said in str(caught.value)


# -- options and errors --------------------------------------------------------------------------
@pytest.mark.parametrize("sharding", ["rows", 3, "i j", ("i", "j")])
def test_a_text_that_is_no_rule_is_refused(sharding: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match="sharding: expected None, 'shard', 'gather'"):
    cg.gate(lambda x: x, out=lambda x: x, sharding=sharding)


def test_a_rule_that_does_not_fit_is_refused_before_anything_runs() -> None:
  gate, calls = doubling(sharding="i -> i", name="misfit")
  with pytest.raises(cg.GateDefinitionError, match="gate 'misfit': sharding: 'i -> i'"):
    gate(X)
  assert calls.take() == []


@pytest.mark.parametrize("sharding", ["shard", "gather"])
@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_an_exception_in_one_shard_before_a_collective(sharding: str, effect: str) -> None:
  def fail(x: np.ndarray) -> np.ndarray:
    if 16.0 in x:
      raise KeyError("sixteen")
    return x

  gate = cg.gate(
    fail, out=lambda x: x, sharding=sharding, effect=effect, name=f"f {sharding} {effect}"
  )
  program = jax.jit(lambda x: gate(x).sum())
  x = put(X, mesh("8"), "a")
  with pytest.raises(KeyError, match="sixteen") as caught, cg.errors():
    jax.block_until_ready(program(x))
  note = " ".join(caught.value.__notes__)
  assert f"gate 'f {sharding} {effect}' on shard" in note
  if sharding == "shard":
    assert "shard 1 of 8 (x[2:4, 0:8])" in note
  assert float(jax.jit(jnp.sum)(x)) == X.sum()  # usable afterwards


def test_the_next_call_raises_what_nobody_asked_for() -> None:
  def fail(x: np.ndarray) -> np.ndarray:
    raise KeyError("unasked")

  gate = cg.gate(fail, out=lambda x: x, sharding="shard")
  x = put(X, mesh("8"), "a")
  jax.block_until_ready(jax.jit(gate)(x))
  with pytest.raises(KeyError, match="unasked"):
    gate(x)


@pytest.mark.parametrize("devices", [8, 4])
def test_a_pure_program_whose_result_nobody_keeps_is_waited_for(devices: int) -> None:
  goes_on = threading.Event()

  def fail(x: np.ndarray) -> np.ndarray:
    goes_on.wait(60)
    if 16.0 in x:
      raise KeyError("sixteen")
    return x

  gate = cg.gate(fail, out=lambda x: x, sharding="shard")
  program = jax.jit(lambda x: gate(x).sum())
  x = put(X, Mesh(np.array(jax.devices()[-devices:]), "a"), "a")
  timer = threading.Timer(0.3, goes_on.set)
  program(x)
  with pytest.raises(TimeoutError, match="programs still run after"):
    cg.barrier(timeout=0.01)
  timer.start()
  with pytest.raises(KeyError, match="sixteen"):
    cg.barrier()
  goes_on.clear()
  program(x)
  timer = threading.Timer(0.1, goes_on.set)
  timer.start()
  with pytest.raises(KeyError, match="sixteen"), cg.errors():
    pass


def test_a_call_that_takes_too_long_is_given_up_on_every_device() -> None:
  release = threading.Event()

  def wait(x: np.ndarray) -> np.ndarray:
    if 16.0 in x:
      release.wait(60)
    return x

  gate = cg.gate(wait, out=lambda x: x, sharding="shard", timeout=0.5)
  try:
    with pytest.raises(cg.GateTimeoutError), cg.errors():
      jax.block_until_ready(jax.jit(lambda x: gate(x).sum())(put(X, mesh("8"), "a")))
  finally:
    release.set()


def test_the_exception_of_a_call_that_was_given_up_before_surfaces_nowhere() -> None:
  release = threading.Event()
  kept: list[np.ndarray] = []

  def wait(x: np.ndarray) -> np.ndarray:
    if 16.0 in x:
      kept.append(x)  # of a copy that is this call's own
      release.wait(60)
      raise KeyError("too late")
    return x

  gate = cg.gate(wait, out=lambda x: x, sharding="shard", timeout=0.1)
  try:
    with pytest.raises(cg.GateTimeoutError), cg.errors():
      jax.block_until_ready(jax.jit(lambda x: gate(x).sum())(put(X, mesh("8"), "a")))
  finally:
    release.set()
  until(lambda: _callgate.active_calls() == 0, "the call has ended")
  with cg.errors():
    cg.barrier()


# -- collective gates ----------------------------------------------------------------------------
def ranks(collected: list[Any]) -> cg.Gate:
  def note(context: cg.Context, out: np.ndarray, x: np.ndarray) -> None:
    collected.append((context.rank, context.size, tuple(context.coordinates.items())))
    out[...] = x

  return cg.gate(note, out=lambda x: x, style="context", collective=True, sharding="shard")


EVERYBODY = [(rank, 8, (("a", rank // 2), ("b", rank % 2))) for rank in range(8)]


def test_collective_gates_know_rank_size_and_coordinates() -> None:
  seen: list[Any] = []
  gate = ranks(seen)
  x = put(X, mesh(), "a")  # two devices have the same shard, and both are called
  jax.block_until_ready(jax.jit(gate)(x))
  assert sorted(seen) == EVERYBODY
  seen.clear()
  on = mesh()
  mapped = jax.jit(jax.shard_map(gate, mesh=on, in_specs=P("a"), out_specs=P("a")))
  jax.block_until_ready(mapped(x))
  assert sorted(seen) == EVERYBODY
  seen.clear()
  jax.block_until_ready(jax.jit(gate)(X))
  assert seen == [(0, 1, ())]


def test_collective_gates_may_wait_for_each_other() -> None:
  barrier = threading.Barrier(8, timeout=60)
  shares: dict[int, float] = {}

  def add_up(context: cg.Context, out: np.ndarray, x: np.ndarray) -> None:
    shares[context.rank] = float(x.sum())
    barrier.wait()
    out[...] = sum(shares.values())
    barrier.wait()

  gate = cg.gate(
    add_up, out=lambda x: x, style="context", collective=True, sharding="shard", effect="io"
  )
  y = jax.jit(gate)(put(np.arange(8, dtype=np.float32), mesh("8"), "a"))
  np.testing.assert_array_equal(y, np.full(8, 28))


@pytest.mark.parametrize("manual", ["a", "b"])
@pytest.mark.parametrize("split", [("a", "b"), ("a",), ("b",), ()])
def test_a_collective_gate_in_a_partly_automatic_shard_map(
  manual: str, split: tuple[str, ...]
) -> None:
  seen: list[Any] = []
  gate, on = ranks(seen), mesh()
  spec = P(*(axis if axis == manual else None for axis in ("a", "b")))
  mapped = jax.shard_map(gate, mesh=on, in_specs=spec, out_specs=spec, axis_names={manual})
  program = jax.jit(lambda x: jax.lax.scan(lambda c, _: (mapped(c) + 1, None), x, length=2)[0])
  for _ in range(2):
    seen.clear()
    found = program(put(X, on, *(axis if axis in split else None for axis in ("a", "b"))))
    cg.barrier()  # one device's result is there before the others'
    np.testing.assert_array_equal(found, X + 2)
    assert sorted(seen) == sorted(EVERYBODY * 2)


def test_a_collective_gate_that_waits_in_a_partly_automatic_shard_map() -> None:
  barrier = threading.Barrier(8, timeout=60)
  shares: dict[int, Any] = {}

  def add_up(context: cg.Context, out: np.ndarray, x: np.ndarray) -> None:
    shares[context.rank] = x.copy()
    barrier.wait()
    out[...] = sum(float(share.sum()) for share in shares.values())
    barrier.wait()

  gate = cg.gate(
    add_up, out=lambda x: x, style="context", collective=True, sharding="shard", effect="io"
  )
  on = mesh()
  mapped = jax.shard_map(gate, mesh=on, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
  found = jax.jit(mapped)(put(X, on, "a", "b"))
  cg.barrier()
  np.testing.assert_array_equal(found, np.full_like(X, X.sum()))
  tiles = np.block([[shares[2 * row + column] for column in range(2)] for row in range(4)])
  np.testing.assert_array_equal(tiles, X)


def test_a_collective_gate_of_lanes_in_a_partly_automatic_shard_map() -> None:
  seen: list[Any] = []
  gate, on = ranks(seen), mesh()
  mapped = jax.shard_map(
    jax.vmap(gate), mesh=on, in_specs=P(None, "a"), out_specs=P(None, "a"), axis_names={"a"}
  )
  xs = np.stack([X, X + 1, X + 2])
  np.testing.assert_array_equal(jax.jit(mapped)(put(xs, on, None, "a", "b")), xs)
  cg.barrier()
  assert sorted(seen) == sorted(EVERYBODY * 3)


# -- order ---------------------------------------------------------------------------------------
def test_ordered_gates_keep_the_program_order_on_each_device() -> None:
  seen: dict[int, list[float]] = {}

  def note(context: cg.Context, out: Any, x: np.ndarray) -> None:
    seen.setdefault(context.device, []).append(float(x.flat[0]) - 16.0 * context.rank)

  gate = cg.gate(note, out=lambda x: (), style="context", effect="ordered", sharding="shard")

  @jax.jit
  def program(x: jax.Array) -> jax.Array:
    def body(c: jax.Array, _: Any) -> tuple[jax.Array, None]:
      gate(c)
      gate(c + 0.5)
      return c + 1, None

    return jax.lax.scan(body, x, length=3)[0]

  x = put(X, mesh("8"), "a")
  for _ in range(2):
    program(x)
  jax.effects_barrier()
  steps = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
  assert seen == dict.fromkeys(range(8), steps * 2)
