# SPDX-License-Identifier: Apache-2.0
"""Cases of `compat.sharded_jit` for a process with 8 CPU devices: see compat/test_sharded_jit.py.

python sharded_jit_cases.py FILE     writes {case: "" or what failed} as JSON, with those of errors
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import sharded_jit_errors  # its cases, too
from hypothesis import given, strategies
from jax import lax
from property_checks import examples
from sharded_jit_support import X, case, message_of, report, shard_shapes

from callgate.compat.sharded_jit import PartitionSpec as P
from callgate.compat.sharded_jit import sharded_jit, with_sharding_constraint


@case
def arguments_are_split_and_results_replicated() -> None:
  f = sharded_jit(lambda x, y: x + y, in_parts=(P(2, 1), P(2, 1)), out_parts=None)
  result = f(X, X + 1)
  np.testing.assert_array_equal(result, 2 * X + 1)
  assert shard_shapes(result) == [(8, 8)] * 2


@case
def parts_are_prefixes_of_pytrees() -> None:
  def f(a, b, c):
    return a[0] + a[1] + b + c[0] + c[1][0] + c[1][1]

  m = np.arange(16).reshape(4, 4)
  args = (m, 1), m, [2, (m, m)]
  for in_parts in ((None, P(2, 1), [None, P(2, 1)]), None):
    result = sharded_jit(f, in_parts, P(2, 1))(*args)
    np.testing.assert_array_equal(result, f(*args))
    assert shard_shapes(result) == [(2, 4)] * 2
  outs = sharded_jit(
    lambda x: (x + 1, ((x + 2, x + 3), x + 4)), (P(2, 1),), (P(2, 1), ((P(1, 2), None), P(2, 1)))
  )(X)
  shapes = jax.tree.map(lambda array: shard_shapes(array)[0], outs)
  assert shapes == ((4, 8), (((8, 4), (8, 8)), (4, 8)))


@case
def every_split_of_the_devices_gives_its_tiles() -> None:
  for parts in ((8, 1), (1, 8), (2, 4), (4, 2), (3, 1), (1, 5), (2, 3), (3, 2), (1, 1)):
    x = np.arange(24 * 30).reshape(24, 30) if parts != (1, 5) else np.arange(40).reshape(4, 10)
    x = x[:, :30] if parts[1] not in (4, 8) else x[:, :24]
    result = sharded_jit(lambda x: x + 1, P(*parts), P(*parts))(x)
    np.testing.assert_array_equal(result, x + 1)
    tile = x.shape[0] // parts[0], x.shape[1] // parts[1]
    assert shard_shapes(result) == [tile] * (parts[0] * parts[1])
    assert len({str(shard.index) for shard in result.addressable_shards}) == parts[0] * parts[1]


@case
def nothing_said_is_one_device() -> None:
  result = sharded_jit(lambda x: x + 1, None, None)(1.0)
  assert float(result) == 2.0
  assert len(result.addressable_shards) == 1


@case
def a_constraint_alone_says_how_many_devices() -> None:
  def f(x):
    return with_sharding_constraint(x + 1, P(1, 2)) * 2

  result = sharded_jit(f, None, None)(X)
  np.testing.assert_array_equal(result, (X + 1) * 2)
  assert len(result.addressable_shards) == 2
  assert shard_shapes(sharded_jit(f, P(2, 1), P(2, 1))(X)) == [(4, 8)] * 2
  text = message_of(ValueError, lambda: sharded_jit(f, P(2, 2), P(2, 2))(X))
  assert "partitions=PartitionSpec(1, 2) (total partitions: 2)" in text
  assert "expected number of partitions: 4" in text


@case
def also_from_inside_jit_and_while() -> None:
  @jax.jit
  def f(x):
    body = lambda x: with_sharding_constraint(x + 1.0, P(2, 1))
    return lax.while_loop(lambda x: x[0, 0] < 10.0, body, x)

  result = sharded_jit(f, None, None)(X)
  np.testing.assert_array_equal(result, X + 10)
  assert len(result.addressable_shards) == 2


@case
def the_gradient_of_a_constraint_constrains_the_cotangent() -> None:
  def f(x):
    y, back = jax.vjp(lambda z: jnp.sin(with_sharding_constraint(z, P(2, 2))), x + 1)
    return back(y)[0]

  x = X[:4, :4]
  np.testing.assert_allclose(
    sharded_jit(f, P(4, 1), None)(x), np.sin(x + 1) * np.cos(x + 1), atol=1e-5
  )
  g = jax.grad(lambda x: with_sharding_constraint(jnp.sin(x), P(2, 2)).sum())
  text = jax.jit(sharded_jit(g, P(4, 1), None)).lower(x).as_text()
  # The value itself is not needed: what is constrained is the cotangent.
  assert text.count('[{"parts0"}, {"parts1"}]') == 1, text


@case
def transformations_agree_with_the_plain_function() -> None:
  plain = lambda x: jnp.sin(x @ x)
  f = sharded_jit(plain, P(2, 2), P(4, 1))
  x = X / 8
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
  close(jax.grad(lambda x: f(x).sum())(x), jax.grad(lambda x: plain(x).sum())(x))
  stack = jnp.stack([x, x / 2])
  close(jax.vmap(f)(stack), jax.vmap(plain)(stack))
  loop = lambda f: lax.scan(lambda c, _: (f(c), None), x, length=3)[0]
  close(loop(f), loop(plain))
  close(jax.jit(f)(x), plain(x))
  close(sharded_jit(lambda x: f(x) * 2, P(2, 2), P(2, 2))(x), 2 * plain(x))


@case
def it_runs_under_pmap() -> None:
  x = np.arange(32.0, dtype=np.float32).reshape(2, 4, 4)
  for f in (
    sharded_jit(lambda x: x @ x, in_parts=P(2, 1), out_parts=None),
    sharded_jit(lambda x: with_sharding_constraint(x @ x, P(2, 1)), None, None),
  ):
    np.testing.assert_allclose(jax.pmap(f)(x), x @ x)


@case
def pmap_agrees_with_pmap_of_the_plain_function() -> None:
  def several(x, y):
    a = lax.dot(x, y)
    return a, a + jnp.ones(4), (x + y,)

  x = np.arange(32.0, dtype=np.float32).reshape(2, 4, 4)
  close = functools.partial(jax.tree.map, np.testing.assert_allclose)
  for ins in ((P(2, 1), P(1, 2)), (P(2, 2), P(2, 2)), (P(4, 1), P(2, 2))):
    for outs in (ins[0], (ins[1], None, (ins[0],)), None):
      close(jax.pmap(sharded_jit(several, ins, outs))(x, x + 1), jax.pmap(several)(x, x + 1))
  axes = (None, None, 0)
  f = lambda x, y, _: x @ y
  split = sharded_jit(f, (P(2, 1), None, None), P(2, 1))
  args = x[0], x[1], np.arange(2.0)
  close(jax.pmap(split, in_axes=axes)(*args), jax.pmap(f, in_axes=axes)(*args))


@case
def one_function_serves_jit_and_pmap_and_plain_calls() -> None:
  f = sharded_jit(lambda x: with_sharding_constraint(x @ x, P(2, 2)), P(4, 1), None)
  x = np.arange(32.0, dtype=np.float32).reshape(2, 4, 4)
  for _ in range(2):
    assert len(f(x[0]).addressable_shards) == 4
    np.testing.assert_allclose(jax.jit(f)(x[0]), x[0] @ x[0])
    np.testing.assert_allclose(jax.pmap(f)(x), x @ x)


@case
def random_keys_are_arrays_like_others() -> None:
  draw = lambda key, keys: jax.random.uniform(key, (8, 2)) + jax.vmap(jax.random.uniform)(keys)[0]
  for make in (jax.random.key, jax.random.PRNGKey):
    keys = jax.random.split(make(1), 4)
    parts = P(4) if keys.ndim == 1 else P(4, 1)
    result = sharded_jit(draw, (None, parts), P(4, 1))(make(0), keys)
    np.testing.assert_allclose(result, draw(make(0), keys), rtol=1e-6)


@case
def two_hundred_arguments_are_taken() -> None:
  total = lambda *args: jnp.asarray(args).sum()
  x = np.arange(32, dtype=np.int32).reshape(2, 4, 4)
  split = sharded_jit(total, (P(2, 1),) * 200, None)
  assert int(split(*[x[0]] * 200)) == 200 * x[0].sum()
  np.testing.assert_array_equal(jax.pmap(split)(*[x] * 200), 200 * x.sum((1, 2)))


@case
def a_program_inside_jit_shows_its_tiles() -> None:
  f = sharded_jit(lambda x: x + 1, P(2, 1), None)
  text = jax.jit(f).lower(X).as_text()
  assert 'sdy.sharding_constraint %arg0 <@mesh, [{"parts0"}, {}]>' in text
  f = sharded_jit(lambda x: with_sharding_constraint(x + 1, P(2, 1)) * 2, None, None)
  text = jax.jit(f).lower(X).as_text()
  assert '<@mesh, [{"parts0"}, {}]>' in text  # the constraint
  assert "<@mesh, [{}, {}]>" in text  # the arguments and results
  assert '"parts0"=2' in text


@case
def equal_calls_trace_and_compile_once() -> None:
  traces, compiled = [], []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
  )

  def f(x):
    traces.append(x.shape)
    return x + 1

  g = sharded_jit(f, P(2, 1), P(2, 1))
  g(X)
  assert len(compiled) == 1
  g(X + 1)
  g(g(X))
  assert traces == [(8, 8)]
  assert len(compiled) == 1
  g(X[:4])
  assert traces == [(8, 8), (4, 8)]
  assert len(compiled) == 2
  jax.monitoring.clear_event_listeners()


@case
def what_is_split_already_is_not_moved() -> None:
  f = sharded_jit(lambda x: x * 1.0, P(2, 1), P(2, 1))
  x = f(X)
  with jax.transfer_guard("disallow"):
    f(x)


@case
def any_counts_put_tile_k_on_device_k() -> None:
  def counts(draw):
    total = draw(strategies.integers(1, 8))
    splits = [c for c in itertools.product(range(1, total + 1), repeat=3) if np.prod(c) == total]
    return draw(strategies.sampled_from(splits)), draw(strategies.sampled_from(splits))

  @examples(9)
  @given(strategies.composite(counts)(), strategies.tuples(*[strategies.integers(1, 2)] * 3))
  def check(both, tile):
    before, after = both
    shape = [int(np.lcm(b, a)) * n for b, a, n in zip(before, after, tile, strict=True)]
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    if np.prod(after) in (6, 12):
      before = after  # XLA aborts on some moves between mixed tilings
    result = sharded_jit(lambda x: x * 2, P(*before), P(*after))(x)
    for k, shard in enumerate(result.addressable_shards):
      at = np.unravel_index(k, after)
      own = tuple(
        slice(i * n // c, (i + 1) * n // c) for i, n, c in zip(at, shape, after, strict=True)
      )
      np.testing.assert_array_equal(shard.data, 2 * x[own])
      assert shard.device == jax.local_devices()[k]

  check()


@case
def constraints_are_batched_and_replicate() -> None:
  plain = lambda x: jnp.cos(x) * 2

  def f(x):
    tree = with_sharding_constraint({"a": x, "b": (x[0], x)}, {"a": P(2, 2), "b": (None, P(4, 1))})
    return jnp.cos(tree["a"]) + jnp.cos(tree["b"][1])

  stack = np.stack([X, X / 2, X / 4])
  for axis in (0, 1, 2):
    ins = np.moveaxis(stack, 0, axis)
    mapped = jax.vmap(f, in_axes=axis, out_axes=axis)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(sharded_jit(mapped, None, None)(ins), plain(ins))
    split = sharded_jit(f, None, None)
    close(jax.vmap(split, in_axes=axis, out_axes=axis)(ins), plain(ins))
  text = jax.jit(sharded_jit(jax.vmap(f), None, None)).lower(stack).as_text()
  assert '[{}, {"parts0"}, {"parts1"}]' in text
  assert '[{}, {"parts0", "parts1"}, {}]' in text


@case
def derivatives_see_what_a_function_closes_over() -> None:
  def loss(w, x):
    layer = sharded_jit(lambda x: jnp.tanh(x @ w), P(4, 1), P(2, 2))
    return jax.checkpoint(layer)(x).sum()

  held = []
  method = sharded_jit(lambda x: jnp.tanh(x @ held[0]), P(4, 1), P(2, 2))

  def loss_of_state(w, x):  # the function stays the same, what it closes over doesn't
    held[:] = [w]
    return method(x).sum()

  def plain(w, x):
    return jnp.tanh(x @ w).sum()

  w = X / 64
  for derivative in (jax.grad, jax.jacfwd):
    expected = derivative(plain)(w, X / 8)
    for f in (loss, loss_of_state):
      np.testing.assert_allclose(derivative(f)(w, X / 8), expected, rtol=1e-4, atol=1e-4)


@case
def threads_that_call_at_once_get_their_results() -> None:
  f = sharded_jit(lambda x, y: x @ y, (P(2, 1), P(1, 2)), P(2, 1))
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(lambda k: f(X, X + k), range(8)))
  for k, result in enumerate(results):
    np.testing.assert_allclose(result, X @ (X + k))


if __name__ == "__main__":
  assert sharded_jit_errors.__name__
  report(sys.argv[1])
