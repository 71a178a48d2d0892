# SPDX-License-Identifier: Apache-2.0
"""`callgate.compat.host_callback_2023` under transformations and in control flow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hcb_streams import lines

from callgate.compat import host_callback_2023 as hcb

both = pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])


def printed(stream):
  hcb.barrier_wait()
  return stream.taken()


def two(show):
  def f(a):
    y = show(a * 2.0, what="a * 2")
    y = show(y * 3.0, what="y * 3", result=y)
    return y**2

  return f


def cube(show):
  def f(x):
    y = x * x
    show((x, y), what="x,x^2")
    return y * x

  return f


# -- vmap ------------------------------------------------------------------------------------------
@both
def test_vmap_sends_the_whole_and_counts_tapped_leaves_alone(jit, show, stream):
  np.testing.assert_array_equal(jit(jax.vmap(two(show)))(jnp.array([4.0, 5.0])), [64.0, 100.0])
  assert printed(stream) == lines(
    """
    transforms: [('batch', {'batch_dims': (0,)})] what: a * 2
    [ 8. 10.]
    transforms: [('batch', {'batch_dims': (0,)})] what: y * 3
    [24. 30.]
    """
  )


@both
def test_the_transforms_are_names_with_parameters(jit):
  seen = []

  def f(x, y):
    return hcb.id_tap(lambda v, t: seen.append((jax.tree.map(np.shape, v), t)), (x, y, 1.0))

  jit(jax.vmap(jax.vmap(f, (None, 0)), (1, None)))(jnp.ones((4, 3)), jnp.ones(2))
  hcb.barrier_wait()
  (value, transforms) = seen[0]
  assert transforms == (
    ("batch", {"batch_dims": (None, 0, None)}),
    ("batch", {"batch_dims": (1, None, None)}),
  )
  assert value == ((4, 3), (2,), ())


@both
def test_unbatched_taps_are_sent_once(jit, show, stream):
  jit(jax.vmap(lambda x: show(7, result=x)))(jnp.arange(3))
  assert printed(stream) == ["7"]


# -- differentiation -------------------------------------------------------------------------------
@both
def test_primals_alone_are_sent_under_jvp_grad_and_grad_of_grad(jit, show, stream):
  want = lines("what: x,x^2\n( 3. 9. )")
  assert jit(lambda x: jax.jvp(cube(show), (x,), (0.5,)))(3.0) == (27.0, 13.5)
  assert printed(stream) == want
  assert jit(jax.grad(cube(show)))(3.0) == 27.0
  assert printed(stream) == want
  assert jit(jax.grad(jax.grad(cube(show))))(3.0) == 18.0
  assert printed(stream) == want
  np.testing.assert_array_equal(
    jit(jax.vmap(jax.grad(cube(show))))(jnp.array([2.0, 3.0])), [12, 27]
  )
  assert printed(stream) == lines(
    "transforms: [('batch', {'batch_dims': (0, 0)})] what: x,x^2\n( [2. 3.] [4. 9.] )"
  )


@both
def test_values_that_pass_through_keep_their_derivatives(jit, show, stream):
  f = lambda x: jnp.sum(show({"a": x, "n": jnp.arange(3)})["a"] ** 3)
  np.testing.assert_array_equal(jit(jax.grad(f))(jnp.arange(3.0)), [0.0, 3.0, 12.0])
  assert printed(stream) == ["{ a=[0. 1. 2.] n=[0 1 2] }"]


@both
def test_a_custom_jvp_that_taps_a_tangent_shows_transpose_under_grad(jit, show, stream):
  @jax.custom_jvp
  def tangents(x):
    return x

  @tangents.defjvp
  def _(primals, dots):
    return primals[0], show(dots[0], what="dot")

  f = lambda x: tangents(x * 3) * 2.0
  assert jit(lambda x: jax.jvp(f, (x,), (1.0,)))(1.0) == (6.0, 6.0)
  assert printed(stream) == lines("what: dot\n3.")
  assert jit(jax.grad(f))(1.0) == 6.0
  assert printed(stream) == lines("transforms: ['transpose'] what: dot\n2.")
  jit(jax.vmap(jax.grad(f)))(jnp.ones(2))
  first, second = printed(stream)
  assert first.startswith("transforms: ['transpose'")
  assert second in ("2.", "[2. 2.]")


@both
def test_a_custom_vjp_may_tap_cotangents(jit, show, stream):
  @jax.custom_vjp
  def cotangents(x):
    return x

  cotangents.defvjp(lambda x: (x, None), lambda _, ct: (show(ct, what="ct"),))

  def f(x):
    x, y = cotangents((x, x * x))
    return x * y

  assert jit(jax.grad(f))(3.0) == 27.0
  assert printed(stream) == lines("what: ct\n( 9. 3. )")


@both
def test_both_passes_of_remat_tap(jit, show, stream):
  f = lambda x: cube(show)(jax.checkpoint(cube(show))(x))
  assert jit(jax.grad(f))(3.0) == 59049.0
  got = printed(stream)
  assert got == lines("what: x,x^2\n( 3. 9. )\nwhat: x,x^2\n( 27. 729. )\nwhat: x,x^2\n( 3. 9. )")


@both
def test_integer_leaves_pass_with_float0_tangents_to_third_order(jit):
  def f(x):
    x = hcb.id_tap(lambda *_: None, x)
    return jnp.sum(jnp.sin(x[0])), x[1]

  x = (jnp.array([0.7, 0.8]), jnp.array([1, 2, 3]))
  _, back = jax.vjp(f, x)
  (gradient,) = back((1.0, np.zeros(3, jax.dtypes.float0)))
  assert gradient[1].dtype == jax.dtypes.float0
  np.testing.assert_allclose(gradient[0], np.cos(x[0]), rtol=1e-6)

  derivative = lambda x: f((x, jnp.array([1, 2, 3])))[0]
  for want in (np.cos(0.7), -np.sin(0.7), -np.cos(0.7)):
    derivative = jax.grad(derivative)
    np.testing.assert_allclose(jit(derivative)(0.7), want, rtol=1e-5)
  hcb.barrier_wait()


# -- control flow ----------------------------------------------------------------------------------
@both
def test_cond_taps_the_taken_branch(jit, show, stream):
  def f(x):
    x = show(x, where="1")
    x = jax.lax.cond(
      x % 2 == 0,
      lambda x: show(x, where="true"),
      lambda x: show(-1, where="false", result=x),
      x + 1,
    )
    return show(x + 1, where="end")

  assert jit(f)(1) == 3
  assert printed(stream) == lines("where: 1\n1\nwhere: false\n-1\nwhere: end\n3")


@both
def test_while_taps_condition_and_body(jit, show, stream):
  def f(x):
    return jax.lax.while_loop(lambda x: show(x < 3, where="c"), lambda x: show(x + 1, where="b"), x)

  assert jit(f)(1) == 3
  assert printed(stream) == lines(
    "where: c\nTrue\nwhere: b\n2\nwhere: c\nTrue\nwhere: b\n3\nwhere: c\nFalse"
  )


@both
def test_vmap_of_while_taps_all_lanes_once_a_round(jit, show, stream):
  def f(x):
    return jax.lax.while_loop(lambda x: show(x < 2, where="c"), lambda x: show(x + 1, where="b"), x)

  np.testing.assert_array_equal(jit(jax.vmap(f))(jnp.arange(4)), [2, 2, 2, 3])
  assert printed(stream)[1::2] == [
    "[ True  True False False]", "[1 2 3 4]",
    "[ True False False False]", "[2 3 3 4]",
    "[False False False False]",
  ]  # fmt: skip


@both
def test_vmap_of_while_with_captured_arrays_and_many_carries(jit):
  seen = []

  def f(x, limit, step):
    def body(state):
      n, total = state
      hcb.id_tap(lambda v, _: seen.append(v.tolist()), n)
      return n + step, total + jnp.arange(2) * n

    return jax.lax.while_loop(lambda state: state[0] < limit, body, (x, jnp.zeros(2, jnp.int32)))

  def plain(x, limit, step):
    total = np.zeros(2, int)
    while x < limit:
      total += np.arange(2) * x
      x += step
    return x, total

  limits = [3, 0, 5]
  n, total = jit(jax.vmap(f, (None, 0, None)))(1, jnp.array(limits), 1)
  hcb.barrier_wait()
  for lane, limit in enumerate(limits):
    want = plain(1, limit, 1)
    assert n[lane] == want[0]
    np.testing.assert_array_equal(total[lane], want[1])
  assert len(seen) == 4


@both
def test_scan_nested_jit_and_remat_in_a_loop_keep_the_order(jit, show, stream):
  def step(carry, x):
    carry = jax.jit(lambda c: show(c + x, where="nested"))(carry)
    return carry, show(-carry, where="s")

  jit(lambda x: jax.lax.scan(step, x, jnp.arange(2)))(10)
  assert printed(stream) == lines(
    "where: nested\n10\nwhere: s\n-10\nwhere: nested\n11\nwhere: s\n-11"
  )
  jit(lambda k: jax.lax.fori_loop(0, 2, jax.checkpoint(lambda i, k: k * show(k + i)), k))(3)
  assert printed(stream) == ["3", "10"]


def test_grad_through_an_ode_solver_works():
  from jax.experimental.ode import odeint

  seen = []

  def loss(k):
    def f(x, t, k):
      return -k * hcb.id_tap(lambda v, _: seen.append(v), x)

    return odeint(f, 1.0, jnp.linspace(0, 0.5, num=2), k)[-1]

  np.testing.assert_allclose(jax.grad(loss)(1.0), -0.5 * np.exp(-0.5), rtol=1e-3)
  hcb.barrier_wait()
  assert seen
