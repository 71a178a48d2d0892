# SPDX-License-Identifier: Apache-2.0
"""`callgate.compat.host_callback` of 2020 under transformations and in control flow."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hcb_streams import Stream, lines

from callgate.compat import host_callback as hcb


def run(function, *args):
  """`jax.jit(function)(*args)` with a receiver."""
  with hcb.outfeed_receiver():
    return jax.tree.map(np.asarray, jax.jit(function)(*args))


def eager(function, *args):
  with hcb.outfeed_receiver():  # for control flow
    return jax.tree.map(np.asarray, function(*args))


both = pytest.mark.parametrize("apply", [run, eager])


@pytest.fixture
def stream():
  return Stream()


@pytest.fixture
def show(stream):
  return functools.partial(hcb.id_print, output_stream=stream)


def two(show):
  """Two taps, the second with a result."""

  def f(a):
    y = show(a * 2.0, what="a * 2")
    y = show(y * 3.0, what="y * 3", result=y)
    return y**2

  return f


# -- vmap ------------------------------------------------------------------------------------------
@both
def test_vmap_sends_the_whole_and_counts_the_results_leaves(apply, show, stream):
  out = apply(jax.vmap(two(show)), jnp.array([4.0, 5.0]))
  np.testing.assert_array_equal(out, [64.0, 100.0])
  assert stream.taken() == lines(
    """
    batch_dims: (0,) transforms: ('batch',) what: a * 2
    [ 8. 10.]
    batch_dims: (0, 0) transforms: ('batch',) what: y * 3
    [24. 30.]
    """
  )


@both
def test_unbatched_leaves_have_no_batch_dim(apply, show, stream):
  def f(y):
    x, y = show((jnp.float32(3), y))
    return x + y

  apply(jax.vmap(f), jnp.array([4.0, 5.0]))
  assert stream.taken() == lines("batch_dims: (None, 0) transforms: ('batch',)\n[ 3.\n  [4. 5.] ]")


@both
def test_vmap_over_another_axis_sends_it_where_it_is(apply):
  seen = []

  def note(value, transforms, batch_dims):
    seen.append((value.shape, transforms, batch_dims))

  apply(jax.vmap(lambda x: hcb.id_tap(note, x), in_axes=1), jnp.ones((3, 4)))
  assert seen == [((3, 4), ("batch",), (1,))]


@both
def test_nested_vmap_gives_one_batch_each(apply):
  seen = []
  rows = jax.vmap(lambda x, y: hcb.id_tap(lambda v, **k: seen.append((v, k)), x + y), (0, None))
  apply(jax.vmap(rows, (None, 0)), jnp.arange(5), jnp.arange(3))
  ((value, keywords),) = seen
  np.testing.assert_array_equal(value, np.add.outer(np.arange(3), np.arange(5)))
  assert keywords["transforms"] == ("batch", "batch")
  assert [one["batch_dims"] for one in keywords["transforms"]] == [(0,), (0,)]
  assert keywords["transforms"][0]["name"] == "batch"


def test_a_function_without_the_keyword_finds_it_in_the_transform():
  seen = []
  jax.vmap(lambda x: hcb.id_tap(lambda v, transforms: seen.append(transforms[0]["batch_dims"]), x))(
    jnp.arange(2)
  )
  assert seen == [(0,)]


# -- differentiation -------------------------------------------------------------------------------
@both
def test_jvp_calls_again_with_the_tangents(apply, show, stream):
  out = apply(lambda x, t: jax.jvp(two(show), (x,), (t,)), 5.0, 0.25)
  assert out == (100.0, 10.0)
  got = stream.taken()
  want = lines(
    """
    what: a * 2
    10.
    transforms: ('jvp',) what: a * 2
    0.5
    what: y * 3
    30.
    transforms: ('jvp',) what: y * 3
    1.5
    """
  )
  assert got == want if apply is eager else sorted(got) == sorted(want)


@both
def test_tangents_of_constants_are_zeros_of_their_dtype(apply):
  seen = []

  def f(x):
    return hcb.id_tap(lambda v, **k: seen.append((v, k)), (x, jnp.arange(2), jnp.float32(1)))[0]

  apply(lambda x: jax.jvp(f, (x,), (1.0,)), 2.0)
  (tangent,) = [value for value, keywords in seen if keywords]
  assert [leaf.tolist() for leaf in tangent] == [1.0, [0, 0], 0.0]
  assert tangent[1].dtype == np.int32


@both
def test_grad_calls_with_the_adjoints(apply, show, stream):
  def f(x):
    y = show(x * 2.0, what="x * 2")
    return x * show(y * 3.0, what="y * 3")

  assert apply(jax.grad(f), 5.0) == 60.0
  got = stream.taken()
  want = lines(
    """
    what: x * 2
    10.
    what: y * 3
    30.
    transforms: ('jvp', 'transpose') what: y * 3
    5.
    transforms: ('jvp', 'transpose') what: x * 2
    15.
    """
  )
  assert got == want if apply is eager else sorted(got) == sorted(want)


def test_under_grad_the_primal_call_comes_only_if_the_primal_is_needed(show, stream):
  assert run(jax.grad(lambda x: 2.0 * show(x * 3.0, what="x * 3")), 5.0) == 6.0
  assert stream.taken() == lines("transforms: ('jvp', 'transpose') what: x * 3\n2.")


@both
def test_the_result_carries_the_adjoint_calls(apply):
  seen = []

  def note(value, transforms=()):
    seen.append((float(value), transforms))

  assert apply(jax.grad(lambda x: hcb.id_tap(note, x * 2, result=x**2)), 5.0) == 10.0
  assert (0.0, ("jvp", "transpose")) in seen  # of the tapped value, which the result doesn't need


@both
def test_grad_of_grad_nests_the_names(apply, show, stream):
  def f(x):
    return x * (show(x * 2.0, what="x") * 3.0)

  assert apply(jax.grad(jax.grad(f)), 5.0) == 12.0
  got = stream.taken()
  want = lines(
    """
    transforms: ('jvp', 'transpose') what: x
    3.
    transforms: ('jvp', 'transpose', 'jvp', 'transpose') what: x
    2.
    """
  )
  if apply is run:
    assert got == want
  else:
    assert want[2:] == got[4:6]
    assert got[:4] == lines("what: x\n10.\ntransforms: ('jvp', 'transpose') what: x\n15.")


@both
def test_vjp_and_vmap_of_grad_compose(apply):
  seen = []

  def note(value, transforms=(), batch_dims=None):
    seen.append((value.tolist(), transforms, batch_dims))

  out = apply(jax.vmap(jax.grad(lambda x: hcb.id_tap(note, x * x) * 2.0)), jnp.array([1.0, 3.0]))
  np.testing.assert_array_equal(out, [4.0, 12.0])
  assert ([2.0, 2.0], ("jvp", "transpose", "batch"), (0,)) in seen or (
    2.0, ("jvp", "transpose"), None
  ) in seen  # fmt: skip


@both
def test_custom_vjp_may_tap(apply):
  seen = []

  @jax.custom_vjp
  def f(x):
    return hcb.id_tap(seen.append, x) * 2

  f.defvjp(lambda x: (f(x), x), lambda x, ct: (hcb.id_tap(seen.append, ct * x),))
  assert apply(jax.value_and_grad(f), 3.0) == (6.0, 3.0)
  assert seen == [3.0, 3.0]


# -- mask ------------------------------------------------------------------------------------------
def padded(seen):
  def note(value, **keywords):
    seen.append((value.tolist(), keywords))

  return lambda x, n: jnp.sum(hcb.id_tap(note, x, logical_shape=(n,), what="x"))


@both
def test_a_padded_array_comes_trimmed_with_its_logical_shape(apply):
  seen = []
  apply(padded(seen), jnp.arange(4), 2)
  assert seen == [([0, 1], {"what": "x", "transforms": ("mask",), "logical_shapes": ((2,),)})]


@both
@pytest.mark.parametrize("axis", [0, 1])
def test_lanes_of_one_logical_shape_come_trimmed_together(apply, axis):
  seen = []
  x = jnp.arange(8).reshape(2, 4)
  apply(jax.vmap(padded(seen), (axis, None)), x if axis == 0 else x.T, 2)
  ((value, keywords),) = seen
  assert value == [[0, 1], [4, 5]]
  assert keywords["transforms"] == ("mask", "batch")
  assert keywords["logical_shapes"] == ((2,),)
  assert keywords["batch_dims"] == (0,)


@both
def test_lanes_of_different_logical_shapes_come_whole_with_every_shape(apply):
  seen = []
  apply(jax.vmap(padded(seen)), jnp.arange(8).reshape(2, 4), jnp.array([2, 3]))
  ((value, keywords),) = seen
  assert value == [[0, 1, 2, 3], [4, 5, 6, 7]]
  np.testing.assert_array_equal(keywords["logical_shapes"][0][0], [2, 3])


# -- control flow ----------------------------------------------------------------------------------
@both
def test_cond_taps_the_taken_branch(apply, show, stream):
  def f(x):
    x = show(x, where="1")
    x = jax.lax.cond(
      x % 2 == 0,
      lambda x: show(x, where="true"),
      lambda x: show(-1, where="false", result=x),
      x + 1,
    )
    return show(x + 1, where="end")

  assert apply(f, 1) == 3
  assert stream.taken() == lines("where: 1\n1\nwhere: false\n-1\nwhere: end\n3")


@both
def test_while_taps_condition_and_body(apply, show, stream):
  def f(x):
    return jax.lax.while_loop(lambda x: show(x < 3, where="c"), lambda x: show(x + 1, where="b"), x)

  assert apply(f, 1) == 3
  assert stream.taken() == lines(
    "where: c\nTrue\nwhere: b\n2\nwhere: c\nTrue\nwhere: b\n3\nwhere: c\nFalse"
  )


@both
def test_vmap_of_while_taps_all_lanes_once_a_round(apply, show, stream):
  def f(x):
    return jax.lax.while_loop(lambda x: show(x < 2, where="c"), lambda x: show(x + 1, where="b"), x)

  np.testing.assert_array_equal(apply(jax.vmap(f), jnp.arange(4)), [2, 2, 2, 3])
  values = stream.taken()[1::2]
  assert values == [
    "[ True  True False False]", "[1 2 3 4]",
    "[ True False False False]", "[2 3 3 4]",
    "[False False False False]",
  ]  # fmt: skip


@both
def test_scan_taps_each_step(apply):
  seen = []

  def step(carry, x):
    carry = hcb.id_tap(lambda v: seen.append(v.tolist()), carry + x)
    return carry, hcb.id_tap(lambda v: seen.append(v.tolist()), -carry)

  apply(lambda x: jax.lax.scan(step, x, jnp.arange(3)), 10)
  assert seen == [10, -10, 11, -11, 13, -13]


def _scanned(tap, x):
  def step(carry, y):
    return (carry[0] + 1, tap(carry[1] + y)), None

  return jax.lax.scan(step, (0, x), jnp.arange(3))[0]


def _looped(tap, x):
  return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, tap(c[1] + c[0])), (0, x))


def _nested(tap, x):
  return jax.lax.fori_loop(0, 1, lambda _, c: (c[0] + 1, _scanned(tap, c[1])[1]), (2, x))


def _branched(tap, x):
  taken = lambda x: (x - 7, [tap(x + y) for y in (0, 1, 3)])
  return jax.lax.cond(x > 0, taken, lambda x: (x, [x] * 3), x)


def _jitted(tap, x):
  return jax.jit(lambda x: (x - 7, [tap(x + y) for y in (0, 1, 3)]))(x)


@both
@pytest.mark.parametrize("program", [_scanned, _looped, _nested, _branched, _jitted])
def test_taps_live_by_a_result_of_their_loop_or_branch_that_nothing_uses(apply, program):
  seen = []
  assert apply(lambda x: program(lambda v: hcb.id_tap(note(seen), v), x)[0], 10) == 3
  assert sorted(seen) == [10, 11, 13]


@pytest.mark.parametrize("program", [_scanned, _nested, _branched, _jitted])
def test_taps_that_no_result_of_their_loop_or_branch_needs_are_left_out(program):
  seen = []
  unused = lambda v: (hcb.id_tap(note(seen), v), v)[1]
  assert run(lambda x: sum(jax.tree.leaves(program(unused, x))) > 0, 10)
  assert seen == []


def note(seen):
  return lambda value: seen.append(value.tolist())


@both
def test_nested_jit_and_remat_keep_the_order(apply, show, stream):
  def f(x):
    x = show(x, where="1")
    x = jax.jit(lambda x: show(x + 1.0, where="nested"))(x)
    x = jax.checkpoint(lambda x: jnp.sin(show(x, where="remat")) * 0 + x)(x)
    return show(x + 1.0, where="end")

  assert apply(f, 1.0) == 3.0
  assert stream.taken() == lines(
    "where: 1\n1.\nwhere: nested\n2.\nwhere: remat\n2.\nwhere: end\n3."
  )
