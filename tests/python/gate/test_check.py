# SPDX-License-Identifier: Apache-2.0
"""`callgate.check`: what stops a program, and what the error says."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate._gate import check as _check


@jax.jit
def root(x):
  cg.check(x >= 0, "expected x >= 0, got {x}", x=x)
  return jnp.sqrt(x)


def test_a_check_that_holds_changes_nothing(engine):
  assert float(root(4.0)) == 2.0
  assert jax.vmap(root)(jnp.array([1.0, 4.0])).tolist() == [1.0, 2.0]


def test_a_check_that_fails_stops_the_program_and_says_why(engine):
  with pytest.raises(cg.CheckError) as error, cg.errors():
    root(-1.0)
  assert error.value.message == "expected x >= 0, got -1.0"
  assert {k: float(v) for k, v in error.value.values.items()} == {"x": -1.0}
  assert isinstance(error.value, AssertionError)
  if engine == "callgate":
    assert "gate/test_check.py" in error.value.site
    assert "in root" in str(error.value)


def test_without_errors_jax_raises_with_the_text():
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"expected x >= 0, got -2\.0"):
    jax.block_until_ready(root(-2.0))
  assert isinstance(cg.last_error(), cg.CheckError)


def test_the_runtime_stays_usable():
  for _ in range(3):
    with pytest.raises(cg.CheckError), cg.errors():
      root(-1.0)
    assert float(root(9.0)) == 3.0


def test_under_vmap_the_first_lane_that_fails_is_shown(engine):
  with pytest.raises(cg.CheckError, match="got -3"), cg.errors():
    jax.jit(jax.vmap(root))(jnp.array([1.0, -3.0, -4.0]))


def test_a_lane_that_does_not_take_the_branch_is_not_checked(engine):
  def lane(p, x):
    return jax.lax.cond(p, root, lambda x: x, x)

  got = jax.jit(jax.vmap(lane))(jnp.array([True, False]), jnp.array([4.0, -1.0]))
  assert got.tolist() == [2.0, -1.0]
  with pytest.raises(cg.CheckError), cg.errors():
    jax.jit(jax.vmap(lane))(jnp.array([True, True]), jnp.array([4.0, -1.0]))


def test_checks_work_in_loops_and_under_differentiation(engine):
  def total(x):
    def step(carry, i):
      cg.check(carry < 100, "at step {i}: {carry}", i=i, carry=carry)
      return carry * x, None

    return jax.lax.scan(step, x, jnp.arange(3))[0]

  assert float(jax.jit(jax.grad(total))(2.0)) == 32.0
  with pytest.raises(cg.CheckError, match="at step 1: 400"), cg.errors():
    jax.jit(jax.grad(total))(20.0)
  with pytest.raises(cg.CheckError), cg.errors():
    jax.jit(jax.vmap(jax.grad(jax.checkpoint(total))))(jnp.array([2.0, 20.0]))


def test_a_check_is_never_removed():
  def program(x):
    cg.check(x > 0, "no")

  with pytest.raises(cg.CheckError), cg.errors():
    jax.jit(program)(-1.0)


def test_values_of_any_shape_and_structure_are_carried():
  def program(x):
    cg.check(x.sum() > 100, "sum of {x} is too small", x=x, more={"n": x.shape[0], "y": x[0]})

  with pytest.raises(cg.CheckError) as error, cg.errors():
    jax.jit(program)(jnp.arange(3))
  np.testing.assert_array_equal(error.value.values["x"], [0, 1, 2])
  assert error.value.message == "sum of [0 1 2] is too small"
  assert int(error.value.values["more"]["n"]) == 3


def test_outside_jit_it_raises_too():
  with pytest.raises(cg.CheckError), cg.errors():
    cg.check(False, "eager")


@pytest.mark.parametrize("predicate", [1.0, np.ones(3, bool), "x"])
def test_a_predicate_that_is_none_is_refused_while_tracing(predicate):
  with pytest.raises(cg.GateDefinitionError, match=r"predicate: expected a bool of shape \(\)"):
    cg.check(predicate, "text")


def test_a_message_with_an_unknown_field_is_refused_while_tracing():
  with pytest.raises(
    cg.GateDefinitionError, match=r"expected fields among the values, .* got \{y\}"
  ):
    cg.check(True, "{x} {y}", x=1)


# -- messages that can't be formatted ---
@pytest.mark.parametrize(
  ("message", "said"),
  [
    ("{x:q}", "x: float32[2]"),
    ("{x:.3f}", "unsupported format string"),
    ("{x.missing}", "no attribute 'missing'"),
    ("{x[7]}", "out of bounds"),
    ("{x!z}", "check: message"),
    ("{x", "expected '}'"),
  ],
)
def test_a_format_that_the_values_do_not_have_is_an_error_while_tracing(message, said):
  with pytest.raises(cg.GateDefinitionError, match="check: message: expected a format") as error:
    jax.eval_shape(lambda x: cg.check(x[0] > 0, message, x=x), jnp.ones(2))
  assert said in str(error.value)


def test_formats_of_scalars_items_and_trees_are_taken():
  def program(x, tree):
    cg.check(x < 0, "{x:.2f} {tree[a][1]} {tree[b]:>5}", x=x, tree=tree)

  with pytest.raises(cg.CheckError) as error, cg.errors():
    jax.jit(program)(1.0, {"a": jnp.arange(3), "b": 7})
  assert error.value.message == "1.00 1     7"


def test_a_failing_check_whose_values_can_not_be_formatted_says_so(engine):
  with pytest.raises(cg.CheckError) as error, cg.errors():
    jax.jit(lambda x: cg.check(x > 0, "the letter {x:c} is wrong", x=x))(jnp.int32(-1))
  assert error.value.message.startswith(
    "the letter {x:c} is wrong (the values below can't be formatted: OverflowError: "
  )
  assert "x = -1" in str(error.value)


def test_checks_outside_of_programs_keep_few_messages():
  """Each message has a gate of its own, and a program."""
  seen = weakref.WeakSet()
  for number in range(150):
    message = f"expected more than {number}"
    cg.check(jnp.bool_(True), message)
    seen.add(_check._checks[message])
  gc.collect()
  assert len(seen) <= 130


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_packed_values_are_carried_in_their_own_dtype(engine, dtype):
  x = jnp.arange(3.0)

  def program(x):
    cg.check(x.sum() < 0, "got {small} of {x}", small=x.astype(dtype), x=x)
    return x

  for call in (jax.jit(program), jax.vmap(lambda one: program(one[None])[0])):
    with pytest.raises(cg.CheckError) as caught, cg.errors():
      jax.block_until_ready(call(x))
    values = caught.value.values
    assert set(values) == {"small", "x"}
    assert values["small"].dtype == dtype
    assert values["x"].dtype == x.dtype
    assert caught.value.message.startswith("got [0")
