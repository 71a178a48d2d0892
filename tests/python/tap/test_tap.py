# SPDX-License-Identifier: Apache-2.0
"""Taps: what leaves a program, how often, in which order, with what said about it."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.ad_checkpoint import checkpoint_name
from property_checks import examples

import callgate as cg


class Seen(list[Any]):
  """A consumer that remembers; as a list, what came."""

  def __call__(self, value: Any, info: cg.TapInfo) -> None:
    self.append(value)
    self.infos.append(info)

  def __init__(self) -> None:
    super().__init__()
    self.infos: list[cg.TapInfo] = []

  def __hash__(self) -> int:  # type: ignore[override]
    return id(self)

  def __eq__(self, other: object) -> bool:
    return self is other

  def values(self) -> list[Any]:
    cg.barrier()
    return [np.asarray(value).tolist() for value in self]


@pytest.fixture
def seen() -> Seen:
  return Seen()


# -- how often ---------------------------------------------------------------------------------
def test_a_tap_runs_once_per_execution_and_gives_its_value_back(engine, seen):
  program = jax.jit(lambda x: cg.tap(x * 2, seen) + 1)
  assert [float(program(x)) for x in (1.0, 2.0, 1.0)] == [3.0, 5.0, 3.0]
  assert seen.values() == [2.0, 4.0, 2.0]


def test_a_tap_whose_value_nobody_uses_runs(engine, seen):
  def program(x):
    cg.tap(x, seen)

  jax.jit(program)(3.0)
  assert seen.values() == [3.0]


def test_equal_taps_are_not_merged_and_constant_ones_not_hoisted(engine, seen):
  def program(x):
    cg.tap(x, seen)
    cg.tap(x, seen)
    jax.lax.fori_loop(0, 3, lambda i, c: (cg.tap(jnp.float32(7), seen), c)[1], 0)
    return x

  jax.jit(program)(1.0)
  assert sorted(seen.values()) == [1.0, 1.0, 7.0, 7.0, 7.0]


def test_taps_in_condition_and_body_of_a_while_loop_run_as_they_do(engine, seen):
  body_seen = Seen()
  program = jax.jit(
    lambda x: jax.lax.while_loop(
      lambda c: cg.tap(c, seen) < 3, lambda c: cg.tap(c + 1, body_seen), x
    )
  )
  assert int(program(0)) == 3
  assert seen.values() == [0, 1, 2, 3]
  assert body_seen.values() == [1, 2, 3]


def test_only_the_taken_branch_taps(engine, seen):
  program = jax.jit(
    lambda p, x: jax.lax.cond(p, lambda y: cg.tap(y, seen), lambda y: cg.tap(-y, seen), x)
  )
  program(True, 1.0)
  program(False, 2.0)
  assert seen.values() == [1.0, -2.0]


def test_under_vmap_of_cond_each_lane_taps_in_the_branch_that_it_takes(engine, seen):
  def lane(p, x):
    return jax.lax.cond(p, lambda y: cg.tap(y, seen), lambda y: cg.tap(-y, seen), x)

  jax.jit(jax.vmap(lane))(jnp.array([True, False, True]), jnp.array([1.0, 2.0, 3.0]))
  assert sorted(seen.values()) == [-2.0, 1.0, 3.0]


@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_under_vmap_of_while_a_lane_that_has_ended_taps_no_more(effect, seen):
  def lane(n):
    return jax.lax.while_loop(
      lambda c: c < n, lambda c: cg.tap(c + 1, seen, effect=effect), jnp.int32(0)
    )

  assert jax.jit(jax.vmap(lane))(jnp.array([2, 0, 1])).tolist() == [2, 0, 1]
  assert sorted(seen.values()) == [1, 1, 2]


def test_a_value_without_arrays_is_delivered_as_often_as_any_other(engine):
  seen = []

  def step(c, _):
    cg.tap({"none": None}, lambda value, info: seen.append((value, info.lane)), where=c > 0)
    return c + 1, cg.tap((), seen.append, every=2)

  program = jax.jit(jax.vmap(lambda x: jax.lax.scan(step, x, length=2)[0]))
  assert program(jnp.array([1.0, -1.0])).tolist() == [3, 1]
  cg.barrier()
  assert sorted(seen, key=str) == [(), ({"none": None}, (0,)), ({"none": None}, (0,))]
  cg.tap((), seen.append)
  cg.barrier()
  assert seen[-1] == ()
  with pytest.raises(cg.GateDefinitionError, match="value: expected an array, since a"):
    cg.tap((), seen.append, effect="dataflow")


@pytest.mark.parametrize("kind", ["partitioned", "shard_map"])
def test_over_several_devices_a_value_without_arrays_is_delivered(kind):
  mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
  seen = []
  f = lambda x: (cg.tap((), seen.append), x + 1)[1]
  if kind == "shard_map":
    f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
  jax.jit(f)(jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("d"))))
  cg.barrier()
  assert seen in ([()], [(), ()])


# -- where, every --------------------------------------------------------------------------------
def test_where_decides_at_run_time(engine, seen):
  program = jax.jit(lambda x: cg.tap(x, seen, where=x > 1))
  for x in (0.5, 1.5, 2.5, -1.0):
    program(x)
  assert seen.values() == [1.5, 2.5]


def test_where_decides_for_each_lane(engine, seen):
  jax.jit(jax.vmap(lambda x: cg.tap(x, seen, where=x > 1)))(jnp.array([0.0, 2.0, 1.0, 3.0]))
  assert seen.values() == [2.0, 3.0]
  assert [info.lane for info in seen.infos] == [(1,), (3,)]


def test_every_sends_the_first_of_each_so_many(seen):
  program = jax.jit(
    lambda n: jax.lax.fori_loop(0, n, lambda i, c: (cg.tap(i, seen, every=10), c)[1], 0)
  )
  program(35)
  assert seen.values() == [0, 10, 20, 30]
  program(10)  # counting goes on: 35 executions were before
  assert seen.values()[4:] == [5]


# -- what is said about it -----------------------------------------------------------------------
def test_lanes_of_nested_vmaps_are_numbered_from_the_outermost(engine, seen):
  x = jnp.arange(6.0).reshape(2, 3)
  jax.jit(jax.vmap(jax.vmap(lambda v: cg.tap(v, seen))))(x)
  cg.barrier()
  assert {info.lane: float(v) for v, info in zip(seen, seen.infos, strict=True)} == {
    (i, j): float(x[i, j]) for i in range(2) for j in range(3)
  }


def test_lanes_come_along_any_axis_and_share_what_is_not_mapped(engine, seen):
  x, y = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.float32(7)
  jax.jit(jax.vmap(lambda a, b: cg.tap({"a": a, "b": b}, seen), (1, None)))(x, y)
  cg.barrier()
  assert [(value["a"].tolist(), float(value["b"])) for value in seen] == [
    (x[:, i].tolist(), 7.0) for i in range(3)
  ]


def test_the_info_says_who_when_and_where(seen):
  before = jax.jit(lambda x: cg.tap(x, seen, name="loss"))
  before(1.0)
  before(2.0)
  cg.barrier()
  first, second = seen.infos
  assert (first.name, first.role, first.transforms, first.lane) == ("loss", "primal", (), ())
  assert (first.device, first.process, first.shard) == (jax.devices()[0].id, 0, None)
  assert second.seq > first.seq
  assert second.time_ns >= first.time_ns > 1_600_000_000 * 10**9
  assert first.run != second.run
  assert not first.repeated


def test_transforms_are_listed_in_order_of_application(seen):
  def f(x):
    return jnp.sum(cg.tap(x, seen, roles=("primal", "tangent", "cotangent")) ** 2)

  jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(jnp.ones((2, 3)))
  cg.barrier()
  names = {info.role: [name for name, _ in info.transforms] for info in seen.infos}
  assert names == {"primal": ["batch"], "cotangent": ["batch", "jvp", "transpose"]}


# -- derivatives ---------------------------------------------------------------------------------
ROLES = ("primal", "tangent", "cotangent")


@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_gradients_are_those_without_taps_and_the_primal_comes_once(effect, seen):
  def f(x):
    return jnp.sin(cg.tap(x**2, seen, effect=effect))

  assert float(jax.jit(jax.grad(f))(2.0)) == pytest.approx(4 * np.cos(4), rel=1e-6)
  assert seen.values() == [4.0]


@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_tangents_and_cotangents_come_with_their_role_when_asked_for(effect, seen):
  def f(x):
    return jnp.sin(cg.tap(x**2, seen, effect=effect, roles=ROLES))

  jax.jit(lambda x: jax.jvp(f, (x,), (3.0,)))(2.0)
  cg.barrier()
  got = {info.role: float(value) for value, info in zip(seen, seen.infos, strict=True)}
  assert got == {"primal": 4.0, "tangent": 12.0}
  del seen[:], seen.infos[:]
  jax.jit(jax.grad(f))(2.0)
  cg.barrier()
  got = {info.role: float(value) for value, info in zip(seen, seen.infos, strict=True)}
  assert got == {"primal": 4.0, "cotangent": pytest.approx(np.cos(4), rel=1e-6)}


@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_integer_leaves_go_along_under_differentiation(effect, seen):
  def f(x):
    tapped = cg.tap({"x": x, "n": jnp.int32(3)}, seen, effect=effect, roles=ROLES)
    return tapped["x"] ** tapped["n"]

  third = jax.grad(jax.grad(jax.grad(f)))
  assert float(jax.jit(third)(2.0)) == pytest.approx(6.0)
  cg.barrier()
  assert [float(v["x"]) for v, i in zip(seen, seen.infos, strict=True) if i.role == "primal"] == [
    2.0
  ]


def test_a_repeat_under_checkpoint_is_marked(seen):
  f = jax.checkpoint(lambda x: jnp.sin(cg.tap(x**2, seen)))
  jax.jit(jax.grad(f))(2.0)
  assert seen.values() == [4.0, 4.0]
  assert [info.repeated for info in seen.infos] == [False, True]


@pytest.mark.parametrize("effect", ["io", "ordered"])
def test_a_policy_of_names_keeps_a_gate_s_result_for_the_tap_that_repeats(seen, effect):
  sine = cg.gate(np.sin, like=jnp.sin, effect=effect)

  def loss(x):
    y = sine(x)
    cg.tap(y, seen)
    return jnp.sin(checkpoint_name(y, "y")) * x

  policy = jax.checkpoint_policies.save_only_these_names("y")
  got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(1.0)
  want = jax.grad(lambda x: jnp.sin(jnp.sin(x)) * x)(1.0)
  assert float(got) == pytest.approx(float(want), rel=1e-5)
  cg.barrier()
  assert [info.repeated for info in seen.infos] == [False, True]


def test_where_a_policy_saves_everything_nothing_repeats(seen):
  policy = jax.checkpoint_policies.everything_saveable
  f = jax.checkpoint(lambda x: jnp.sin(cg.tap(jnp.exp(x), seen)), policy=policy)
  jax.jit(jax.grad(f))(2.0)
  cg.barrier()
  assert not any(info.repeated for info in seen.infos)


@pytest.mark.parametrize("how", ["loop", "jit", "checkpoint", "cond"])
@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_a_loop_that_runs_again_for_its_tangents_marks_what_it_has_sent(effect, how, seen):
  def step(x):
    return jnp.sin(cg.tap(x, seen, roles=("primal", "tangent"), effect=effect))

  def body(carry):
    i, x = carry
    return i + 1, jax.lax.cond(i >= 0, step, lambda x: x, x) if how == "cond" else step(x)

  f = lambda x: jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]
  f = {"jit": jax.jit, "checkpoint": jax.checkpoint}.get(how, lambda f: f)(f)

  def sent() -> list[tuple[str, bool]]:
    cg.barrier()
    about = sorted((info.role, info.repeated) for info in seen.infos)
    seen.infos.clear()
    return about

  _, tangent = jax.linearize(f, 1.0)
  assert sent() == [("primal", False)] * 2
  for _ in range(2):
    tangent(1.0)
    assert sent() == [("primal", True)] * 2 + [("tangent", False)] * 2


def test_a_tap_of_a_tangent_alone_is_new_each_time_that_its_loop_runs(seen):
  @jax.custom_jvp
  def f(x):
    return jnp.sin(x)

  @f.defjvp
  def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return f(x), cg.tap(jnp.cos(x) * t, seen)

  step = lambda carry: (carry[0] + 1, f(carry[1]))
  loop = lambda x: jax.lax.while_loop(lambda carry: carry[0] < 2, step, (0, x))[1]
  _, tangent = jax.linearize(loop, 1.0)
  for _ in range(2):
    tangent(1.0)
  cg.barrier()
  assert [info.repeated for info in seen.infos] == [False] * 4


def test_dataflow_taps_compose_with_custom_vjp_and_live_by_their_use(seen):
  @jax.custom_vjp
  def f(x):
    return cg.tap(x, seen, effect="dataflow") * 2

  f.defvjp(lambda x: (f(x), None), lambda _, ct: (cg.tap(ct * 2, seen, effect="dataflow"),))
  assert [float(y) for y in jax.jit(jax.value_and_grad(f))(3.0)] == [6.0, 2.0]
  assert sorted(seen.values()) == [2.0, 3.0]

  def unused(x):
    cg.tap(x, seen, effect="dataflow")
    return x

  jax.jit(unused)(9.0)
  assert 9.0 not in seen.values()
  assert not jax.make_jaxpr(lambda x: cg.tap(x, seen, effect="dataflow"))(1.0).effects


# -- order ---------------------------------------------------------------------------------------
def test_ordered_taps_of_one_scan_body_keep_program_order(seen):
  def step(carry, x):
    cg.tap(x, seen, ordered=True)
    cg.tap(-x, seen, ordered=True)
    return carry, None

  program = jax.jit(lambda xs: jax.lax.scan(step, 0.0, xs)[0])
  for start in (1.0, 101.0):
    program(jnp.arange(start, start + 50))
  want = [s * x for a in (1.0, 101.0) for x in np.arange(a, a + 50) for s in (1, -1)]
  assert seen.values() == want


def test_ordered_taps_and_gates_keep_order_among_each_other(seen):
  events: list[Any] = []
  gate = cg.gate(lambda x: events.append(("gate", float(x))), out=(), effect="ordered")

  def program(x):
    cg.tap(x, lambda v: None, ordered=True)
    gate(x + 1)
    cg.tap(x + 2, seen, ordered=True)

  jax.jit(program)(1.0)
  assert seen.values() == [3.0]
  assert events == [("gate", 2.0)]


# -- values --------------------------------------------------------------------------------------
DTYPES = [
  "bool", "int4", "uint4", "int8", "uint16", "int32", "float16", "bfloat16", "float32",
  "complex64", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_every_dtype_and_shape_arrives_as_it_was(shape, seen):
  values = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape)
  xs = {name: values.astype(np.dtype(getattr(ml_dtypes, name, name))) for name in DTYPES}
  tap = lambda x: cg.tap(x, seen, effect="dataflow")
  back = jax.jit(lambda xs: {name: tap(x) for name, x in xs.items()})(xs)
  cg.barrier()
  found = {got.dtype.name: got for got in seen}
  assert found.keys() == xs.keys()
  for name, x in xs.items():
    assert back[name].dtype == x.dtype
    assert found[name].shape == shape
    np.testing.assert_array_equal(found[name].astype(np.complex64), x.astype(np.complex64))


@examples(7)
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), axis=st.integers(0, 2))
def test_any_axis_can_be_mapped(shape, axis):
  axis %= len(shape)
  seen = Seen()
  x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
  jax.vmap(lambda v: cg.tap(v, seen), axis, axis)(x)
  want = [np.moveaxis(x, axis, 0)[i].tolist() for i in range(shape[axis])]
  assert seen.values() == want


def test_a_consumer_owns_what_it_gets(seen):
  program = jax.jit(lambda x: cg.tap(x, seen))
  for i in range(100):
    program(jnp.full(1000, i))
  cg.barrier()
  assert [int(v[0]) for v in seen] == list(range(100))
  assert all(v.flags.owndata and v.flags.writeable for v in seen)


def test_padding_is_cut_off_by_logical_shape(seen):
  def program(x, n):
    return cg.tap(x, seen, logical_shape=(n, None))

  jax.jit(program)(jnp.arange(12.0).reshape(4, 3), 2)
  cg.barrier()
  assert seen[0].tolist() == np.arange(6.0).reshape(2, 3).tolist()
  del seen[:]
  jax.jit(jax.vmap(program))(jnp.ones((3, 4, 3)), jnp.array([1, 2, 3]))
  cg.barrier()
  assert [v.shape for v in seen] == [(1, 3), (2, 3), (3, 3)]


def test_random_keys_can_be_tapped(seen):
  key = jax.random.key(3)
  jax.jit(lambda k: cg.tap(k, seen))(key)
  cg.barrier()
  assert seen[0] == key


# -- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"every": 0}, "every: expected a positive int, got 0"),
    ({"effect": "pure"}, "effect: expected 'io' or 'dataflow', got 'pure'"),
    ({"effect": "dataflow", "ordered": True}, "ordered: expected False"),
    ({"roles": ("tangent",)}, "roles: expected 'primal'"),
    ({"where": 3}, "where: expected a bool of shape (), got int32[]"),
    ({"logical_shape": (1, 2)}, "expected 1 sizes for float32[3], got 2"),
    ({"name": "a\nb"}, "name: expected a line of text"),
    ({"sharding": "x"}, "sharding: expected 'shard', 'gather' or a rule"),
    ({"replicas": "x"}, "replicas: expected 'once' or 'all'"),
  ],
)
def test_wrong_options_are_refused_before_anything_runs(options, text, seen):
  with pytest.raises(cg.GateDefinitionError) as error:
    cg.tap(jnp.ones(3), seen, **options)
  assert text in str(error.value)
  assert seen.values() == []


@pytest.mark.parametrize("to", [3, None, "", "default"])
def test_a_target_that_is_none_is_refused(to):
  with pytest.raises(cg.GateDefinitionError, match="to: expected"):
    cg.tap(1.0, to)


def test_taps_from_many_threads_all_arrive(seen):
  program = jax.jit(lambda x: cg.tap(x, seen))

  def run(start: int) -> None:
    for i in range(50):
      program(jnp.int32(start + i))

  threads = [threading.Thread(target=run, args=(100 * k,)) for k in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(seen.values()) == sorted(100 * k + i for k in range(4) for i in range(50))
