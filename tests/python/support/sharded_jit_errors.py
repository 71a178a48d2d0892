# SPDX-License-Identifier: Apache-2.0
"""Cases of the errors of `compat.sharded_jit`, for a process with 8 CPU devices.

They run with those of sharded_jit_cases.py, which imports them.
"""

from __future__ import annotations

import jax
import numpy as np
from sharded_jit_support import X, case, message_of

from callgate.compat.sharded_jit import PartitionSpec as P
from callgate.compat.sharded_jit import sharded_jit, with_sharding_constraint


@case
def static_arguments_come_off_first() -> None:
  f = sharded_jit(lambda n, x: x * n, in_parts=P(2, 1), out_parts=P(2, 1), static_argnums=0)
  np.testing.assert_array_equal(f(3, X), 3 * X)
  np.testing.assert_array_equal(f(4, X), 4 * X)
  assert f(3.0, np.ones((2, 2), np.int32)).dtype == np.float32
  assert f(3, np.ones((2, 2), np.int32)).dtype == np.int32  # 3 == 3.0, but they aren't the same
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, None, None, static_argnums=3)(X))
  assert "static_argnums=(3,)" in text
  assert "only 1 positional" in text


@case
def errors_name_the_numbers() -> None:
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(9), None)(np.ones(9)))
  assert text == "sharded_jit computation requires 9 devices, but only 8 devices are available."
  text = message_of(NotImplementedError, lambda: sharded_jit(lambda x: x, None, None)(x=X))
  assert "kwargs not yet supported" in text
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2), None)(X))
  assert "PartitionSpec(2,) has 1 dimensions, but array 0 has 2" in text
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2, 1), P(4, 1)))
  assert "2 (PartitionSpec(2, 1) in in_parts) and 4 (PartitionSpec(4, 1) in out_parts)" in text
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, (P(2, 1), None), None)(X))
  assert "in_parts: expected a prefix" in text
  for program in (with_sharding_constraint, jax.jit(with_sharding_constraint, static_argnums=1)):
    text = message_of(NotImplementedError, lambda program=program: program(X, P(2, 1)))
    assert "inside sharded_jit" in text
  message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2, 1), None)(np.ones((3, 2))))


@case
def dimensions_that_do_not_divide_are_refused_or_padded() -> None:
  x = np.arange(10.0, dtype=np.float32).reshape(5, 2)
  for program in (lambda f: f, jax.jit):
    text = message_of(ValueError, lambda p=program: p(sharded_jit(lambda x: x, P(2, 1), None))(x))
    assert "in_parts: PartitionSpec(2, 1) splits dimension 0 of array 0 2 ways" in text
    text = message_of(ValueError, lambda p=program: p(sharded_jit(lambda x: x, None, P(1, 4)))(x))
    assert "out_parts" in text
    assert "expected a multiple of 4, got 2: shape [5, 2]" in text
  padded = sharded_jit(lambda x: with_sharding_constraint(x + 1, P(2, 1)).sum(0), None, None)
  np.testing.assert_array_equal(padded(x), (x + 1).sum(0))


@case
def one_process_has_all_of_its_parts() -> None:
  f = sharded_jit(lambda x: x + 1, P(2, 1), None, None, P(2, 1), None, 2)
  np.testing.assert_array_equal(f(X), X + 1)
  np.testing.assert_array_equal(
    sharded_jit(lambda x: x, None, None, num_partitions=np.int64(3))(X), X
  )

  def error(*args, **kwargs):
    return message_of(ValueError, lambda: sharded_jit(lambda x: x, *args, **kwargs)(X))

  text = error(P(2, 1), None, local_num_partitions=9)
  assert text == (
    "sharded_jit computation requires 9 local devices, but only 8 local devices are available."
  )
  text = error(P(2, 1), None, local_in_parts=P(4, 1), local_num_partitions=2)
  assert "local partitions everywhere, got 2 (local_num_partitions=2) and 4" in text
  text = error(P(4, 1), None, local_in_parts=P(2, 2))
  assert "local_in_parts: expected PartitionSpec(4, 1) for array 0" in text
  text = error(P(4, 1), None, local_num_partitions=2)
  assert text == "sharded_jit: expected 4 local partitions, since there is one process, got 2"


@case
def numbers_that_disagree_are_refused() -> None:
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2, 1), None, num_partitions=4))
  assert "got 4 (num_partitions=4) and 2 (PartitionSpec(2, 1) in in_parts)" in text
  text = message_of(ValueError, lambda: sharded_jit(lambda x: x, P(2, 1), P(4, 1))(X))
  assert "All partition specs must use the same number of total partitions" in text
  assert "got 2 (PartitionSpec(2, 1) in in_parts) and 4 (PartitionSpec(4, 1) in out_parts)" in text
  inner = sharded_jit(lambda x: x * 2, P(2, 1), None)
  text = message_of(ValueError, lambda: sharded_jit(inner, P(4, 1), None)(X))
  assert "(total partitions: 2)" in text
  assert "expected number of partitions: 4" in text

  def both(x):
    return with_sharding_constraint(with_sharding_constraint(x, P(2, 1)) + 1, P(4, 1))

  text = message_of(ValueError, lambda: sharded_jit(both, None, None)(X))
  assert "PartitionSpec(4, 1) (total partitions: 4) doesn't match" in text
  for wrong in (0, -2, 1.5, True):
    text = message_of(
      ValueError, lambda wrong=wrong: sharded_jit(lambda x: x, None, None, num_partitions=wrong)
    )
    assert f"num_partitions: expected an integer of at least 1, got {wrong}" in text


@case
def specs_and_static_arguments_that_do_not_fit_are_named() -> None:
  def error(error=ValueError, fun=lambda x: x, args=(X,), ins=None, outs=None, **kwargs):
    return message_of(error, lambda: sharded_jit(fun, ins, outs, **kwargs)(*args))

  assert "in_parts: expected a PartitionSpec or None as leaves, got 2" in error(ins=(2,))
  assert "out_parts: expected a prefix" in error(outs=(P(2, 1), None))
  text = error(outs=P(2))
  assert "out_parts: PartitionSpec(2,) has 1 dimensions, but array 0 has 2: shape [8, 8]" in text
  text = error(fun=lambda x: with_sharding_constraint(x, P(2)))
  assert "with_sharding_constraint: PartitionSpec(2,) has 1 dimensions" in text
  for value in ([1], ((2, [1]),)):
    text = error(fun=lambda x, n: x, args=(X, value), static_argnums=1)
    assert f"static argument 1 of <lambda>: expected a hashable value, got {value}" in text
  text = error(fun=lambda x, n: x, args=(X,), static_argnums=(1,))
  assert "static_argnums=(1,)" in text


@case
def a_constraint_outside_is_refused_on_any_number_of_devices() -> None:
  x = sharded_jit(lambda x: x, P(4, 1), P(4, 1))(X)
  for f in (
    lambda x: with_sharding_constraint(x, P(2, 1)),
    jax.jit(lambda x: with_sharding_constraint(x, P(2, 1))),
  ):
    for argument in (X, x):
      text = message_of(NotImplementedError, lambda f=f, a=argument: f(a))
      assert "only be called inside sharded_jit()" in text
      assert "partitions=PartitionSpec(2, 1)" in text
