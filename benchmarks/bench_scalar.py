# SPDX-License-Identifier: Apache-2.0
"""The cost of one call: an f32 scalar through host code, in a compiled loop.

Every contestant is the identity, called N times by one `lax.fori_loop` in one compiled program, so
that dispatch is paid once and XLA's call path N times (2,000; fewer for slow ones). "loop only" is
the same loop around one addition; it is reported, not subtracted. Unit: microseconds per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters

REFERENCE = "callgate in-place gate"
RETURN = "callgate return gate"
INPLACE_NEGATE = "callgate in-place gate, negation"
RETURN_NEGATE = "callgate return gate, negation"
RAW_CALL = "C++ FFI handler + bare Python call"
TVM_PYTHON = "jax-tvm-ffi, Python function"
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
ONE_ELEMENT = jax.ShapeDtypeStruct((1,), jnp.float32)

# Name, adapter, argument, and whether the result is the argument (an empty body leaves garbage, the
# negation is another function).
CONTESTANTS = (
  ("loop only (one addition)", lambda spec: lambda x: x + 1.0, SCALAR, False),
  ("C++ FFI handler, empty", adapters.raw_noop, SCALAR, False),
  (RAW_CALL, adapters.raw_python_call, SCALAR, False),
  (REFERENCE, adapters.callgate_inplace, SCALAR, True),
  ("callgate in-place gate, empty body", adapters.callgate_inplace_empty, SCALAR, False),
  (RETURN, adapters.callgate_return, SCALAR, True),
  (INPLACE_NEGATE, adapters.callgate_inplace_negate, SCALAR, False),
  (RETURN_NEGATE, adapters.callgate_return_negate, SCALAR, False),
  ("jax buffer_callback", adapters.buffer_callback, SCALAR, True),
  ("jax pure_callback", adapters.pure_callback, SCALAR, True),
  ("jax io_callback", adapters.io_callback, SCALAR, True),
  (TVM_PYTHON, adapters.tvm_ffi_python, SCALAR, True),
  ("jax-tvm-ffi, Python function, empty body", adapters.tvm_ffi_python_empty, SCALAR, False),
  ("jax-tvm-ffi, native function", adapters.tvm_ffi_native, SCALAR, True),
  ("warp jax_callable", adapters.warp_callable, ONE_ELEMENT, True),
  ("brainevent numba_kernel", adapters.brainevent_numba, SCALAR, True),
  ("torch2jax (rdyro)", adapters.torch2jax, SCALAR, True),
)

TARGETS = (
  harness.Target(
    "in-place gate over the raw handler with a bare call", REFERENCE, RAW_CALL, at_most=5.0
  ),
  harness.Target("in-place gate, microseconds", REFERENCE, at_most=0.28),
  harness.Target(
    "pure_callback over the in-place gate", "jax pure_callback", REFERENCE, at_least=25.0
  ),
  harness.Target(
    "buffer_callback over the in-place gate", "jax buffer_callback", REFERENCE, at_least=2.0
  ),
  harness.Target("return gate with a new result, microseconds", RETURN_NEGATE, at_most=0.45),
  harness.Target("return gate over the in-place gate", RETURN, REFERENCE, at_most=1.6),
  harness.Target("the same, with a new result", RETURN_NEGATE, INPLACE_NEGATE, at_most=1.6),
  harness.Target("in-place gate over jax-tvm-ffi's Python", REFERENCE, TVM_PYTHON, at_most=1.0),
  harness.Target(
    "the same two with empty bodies",
    "callgate in-place gate, empty body",
    "jax-tvm-ffi, Python function, empty body",
    at_most=1.0,
  ),
)


def run(options: harness.Options) -> harness.Report:
  """Measures every way of calling host code on one scalar."""
  most = options.pick(2000, 200)
  contestants = [
    harness.Contestant(name, functools.partial(_build, adapter, spec, exact, most))
    for name, adapter, spec, exact in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(150))
  title = f"One call on an f32 scalar, in a compiled loop of up to {most}"
  return harness.Report("scalar", title, "us", rows, REFERENCE, TARGETS, quick=options.quick)


def _build(adapter: adapters.Adapter, spec: adapters.Spec, exact: bool, most: int) -> harness.Work:
  """The contestant's loop; see `_is_identity` for `exact`."""
  function = adapter(spec)
  harness.check(not exact or _is_identity(function, spec), "the result is not the argument")
  return harness.fitted(functools.partial(_loop, function, spec), most, least=100)


def _loop(function: Callable[..., jax.Array], spec: adapters.Spec, calls: int) -> harness.Thunk:
  """A program that makes `calls` calls one after the other."""
  program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: function(carry), x))
  operand = jnp.full(spec.shape, 1.5, spec.dtype)
  compiled = program.lower(operand).compile()
  return lambda: jax.block_until_ready(compiled(operand))


def _is_identity(function: Callable[..., jax.Array], spec: adapters.Spec) -> bool:
  """True if calls on a carry that changes each time give back what each of them got."""
  steps = 64
  program = jax.jit(lambda x: lax.fori_loop(0, steps, lambda _, carry: function(carry) + 1.0, x))
  return bool((program(jnp.full(spec.shape, 0.5, spec.dtype)) == steps + 0.5).all())
