# SPDX-License-Identifier: Apache-2.0
"""Runs a JAX callback on callgate's engine: its arguments and its results.

The functions made here behave as `pure_callback_impl` of `jax/_src/callback.py`, without the 30 µs
of `jax.device_put`'s Python code. They run on any of XLA's threads, with the GIL held, several at
once. They are so short that `benchmarks/` shows a tenth of a microsecond more.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from callgate._call.lowering import emit
from callgate._core import dtypes
from callgate._jax import callbacks, dispatch, execution, lowering, tracing
from callgate._runtime import config

Array = np.ndarray[Any, Any]
# JAX's own logger, so that the user's configuration of it applies.
_logger = logging.getLogger("jax._src.callback")


@dataclasses.dataclass(frozen=True, slots=True)
class OnCallgate:
  """Marks a callback for callgate's engine; equal functions have equal marks, for JAX's caches."""

  function: Callable[..., Any]

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.function(*args, **kwargs)


def can_serve(ctx: Any) -> bool:
  # A partitioned program calls only JAX's own targets once; any other target runs on every device.
  return config.engine() != "jax" and not lowering.is_automatic(ctx)


class Carrier(NamedTuple):
  """Describes how one array crosses between the program and Python."""

  aval: Any  # the type in the program's call
  shape: tuple[int, ...]
  dtype: np.dtype[Any]  # the dtype that the callback sees
  is_wider: bool  # for packed sub-byte types: the program passes a wider type


def carrier(aval: Any) -> Carrier:
  """Returns the carrier of `aval`: keys as data, float0 as bool, sub-byte types as wider ones."""
  if aval.dtype == jax.dtypes.float0:
    aval = aval.update(dtype=np.dtype(bool))
  aval = tracing.physical_aval(aval)
  dtype, carried = np.dtype(aval.dtype), dtypes.carrier(aval.dtype)
  return Carrier(aval.update(dtype=carried), tuple(aval.shape), dtype, carried != dtype)


def emit_carried(ctx: Any, operands: Sequence[Any], effect: Any, **options: Any) -> list[Any]:
  """Emits a call with carried arrays, in order if there is an `effect`."""

  def convert(value: Any, aval: Any) -> Any:
    target = mlir.aval_to_ir_type(ctx.module_context, aval)
    return value if value.type == target else stablehlo.convert(target, value)

  avals, outs = ([carrier(aval).aval for aval in side] for side in (ctx.avals_in, ctx.avals_out))
  values = list(map(convert, operands, avals))
  results = emit(ctx, values, avals, outs, order=effect, **options)
  return [convert(value, aval) for value, aval in zip(results, ctx.avals_out, strict=True)]


def host_function(
  ctx: Any, callback: Callable[..., Any], in_tree: Any, api: str
) -> Callable[..., list[Array]]:
  """Returns a function that runs `callback` on program arrays; `in_tree` is `(args, kwargs)`."""
  operands, results = (list(map(carrier, avals)) for avals in (ctx.avals_in, ctx.avals_out))

  def unflattened(*arrays: Any) -> Any:
    args, kwargs = jax.tree.unflatten(in_tree, arrays)
    return callback(*args, **kwargs)

  is_flat = in_tree == jax.tree.structure(((0,) * len(operands), {}))
  function = callback if is_flat else unflattened
  device = dispatch.cpu_devices("a callback of JAX's")[0]
  to_jax, check = _argument_maker(operands, device), _result_checker(results)
  enter, leave = callbacks.callback_scope(device)
  # Looks these names up once here, not once a call.
  array_type, numpy_type = type(jax.device_put(0.0, device)), np.ndarray
  leaves, as_numpy = jax.tree.leaves, np.asarray

  def call(*inputs: Array) -> list[Array]:
    arrays = to_jax(inputs)
    before = enter()
    _running.append(None)  # atomic, for other threads
    try:
      value = function(*arrays)
      one = type(value) is array_type or type(value) is numpy_type
      values = [as_numpy(value)] if one else [as_numpy(leaf) for leaf in leaves(value)]
    except KeyboardInterrupt:  # the user's
      raise
    except BaseException:
      _logger.exception("jax.%s failed", api)
      raise
    finally:
      _running.pop()
      leave(before)
    return check(values)

  return call


# An item for each running callback. Atomic: single steps; emptied by the end of each
# callback.
_running: list[None] = []


class _Waits(execution.Watcher):
  """Kept by a program with an io_callback."""

  waits = True


def end_before_dispatch_returns(context: Any) -> None:
  """Records an io_callback: its program ends before its dispatch returns, as in JAX."""
  if _running:  # XLA's threads may all wait for this program: it runs on the caller's
    dispatch.mark_host_callbacks(context)
  lowering.add_keepalive(context, _Waits())


def _argument_maker(
  operands: Sequence[Carrier], device: Any
) -> Callable[[Sequence[Array]], list[Any]]:
  """Makes jax.Arrays on the CPU of NumPy arrays, as `jax.device_put` did in the first call."""
  put = dispatch.fast_device_put(device)
  targets: list[tuple[Any, Any]] = []  # one for each operand, once known
  is_wider = any(operand.is_wider for operand in operands)

  def decide(inputs: Sequence[Array]) -> list[Any]:
    arrays = [jax.device_put(x, device) for x in inputs]
    # Except if the thread's `jax_enable_x64` changes a dtype; then `device_put` decides every time.
    if all(x.dtype == operand.dtype for x, operand in zip(arrays, operands, strict=True)):
      targets[:] = [(x.aval, x.sharding) for x in arrays]
    return arrays

  def make(inputs: Sequence[Array]) -> list[Any]:
    if is_wider:
      inputs = [x.astype(operand.dtype) for x, operand in zip(inputs, operands, strict=True)]
    if not targets:
      return decide(inputs)
    return [put(*target, [x]) for target, x in zip(targets, inputs, strict=True)]

  def make_one(inputs: Sequence[Array]) -> list[Any]:
    return [put(*targets[0], inputs)] if targets else decide(inputs)

  return make_one if len(operands) == 1 and not is_wider else make


def _result_checker(results: Sequence[Carrier]) -> Callable[[list[Array]], list[Array]]:
  """Returns a function that converts a list of results for the program, or raises JAX's errors."""

  def check(values: list[Array]) -> list[Array]:
    if len(values) != len(results):
      counts = f"Expected: {len(results)}, Actual: {len(values)}"
      raise RuntimeError(f"Mismatched number of outputs from callback. {counts}")
    for i, (aval, shape, dtype, is_wider) in enumerate(results):
      if values[i].dtype != dtype or values[i].shape != shape:
        value = values[i] = tracing.canonicalize_value(values[i])
        for what, wanted, got in (("shape", shape, value.shape), ("dtype", dtype, value.dtype)):
          if got != wanted:
            pair = f"Expected: {wanted}, Actual: {got}"
            raise RuntimeError(f"Incorrect output {what} for return value #{i}: {pair}")
      if is_wider:
        values[i] = values[i].astype(aval.dtype)
    return values

  def check_one(values: list[Array]) -> list[Array]:
    if len(values) == 1 and values[0].dtype == only.dtype and values[0].shape == only.shape:
      return values
    return check(values)

  if len(results) != 1 or results[0].is_wider:
    return check
  only = results[0]
  return check_one
