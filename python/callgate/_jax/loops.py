# SPDX-License-Identifier: Apache-2.0
"""JAX's loops: their primitives' parameters, the rules that hoist and evaluate them, and types."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax._src import source_info_util as _source_info
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lax.control_flow import loops as _loops

T = TypeVar("T")
# JAX's files in these folders only call other functions and have no loops (0.10 to 0.12). The
# exception is a file with a loop for `vmap_method`.
_CALLING = {os.path.dirname(inspect.getfile(module)) for module in (_source_info, _partial_eval)}
_CALLING_NOT = "ffi.py"
_Layer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _only_calls(file: str) -> bool:
  folder, name = os.path.split(file)
  return file == __file__ or (folder in _CALLING and name != _CALLING_NOT)


def wrap_function(name: str, layer: _Layer) -> None:
  """Passes calls of `jax.lax.scan`, for example, through a layer.

  The layer gets the function and the call's arguments. Loops of JAX's own functions and of
  callgate's skip it. JAX wraps these functions, and the wrapper's cell holds the function (0.10 to
  0.12).
  """
  wrapper: Any = getattr(jax.lax, name)
  cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("fun")]
  original = cell.cell_contents

  @functools.wraps(original)
  def through(*args: Any, **kwargs: Any) -> Any:
    frame: Any = inspect.currentframe()
    while frame is not None and _only_calls(frame.f_code.co_filename):
      frame = frame.f_back
    if frame is None or _source_info.is_user_filename(frame.f_code.co_filename):
      return layer(original, args, kwargs)
    return original(*args, **kwargs)

  cell.cell_contents = through


# The lowering of `jax.lax.scan`: a `while_loop` on whole arrays (0.10 to 0.12). Takes the
# primitive's parameters, whatever their names. No public name.
scan_impl: Callable[..., Any] = _loops._scan_impl  # pyright: ignore[reportPrivateUsage]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
  """Returns the number of constants and of carried operands of a `scan` (0.10 to 0.12)."""
  if "num_consts" in params:
    return params["num_consts"], params["num_carry"]
  consts, carry, _ = map(list, params["ft_in"].unpack())  # since 0.12
  return len(consts), len(carry)


def traced_once(step: Callable[..., Any]) -> Any:
  """Returns a function that JAX traces once and whose operations keep the user's lines.

  A jit that 0.12 inlines keeps them. One that 0.10 or 0.11 inlines gives them the line of its call.
  """
  return jax.jit(step, inline=jax.__version_info__ >= (0, 12))


def split_scan(params: Mapping[str, Any], of: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
  """Splits values for a `scan`'s operands into (constants, carry, scanned operands)."""
  first, count = scan_counts(params)
  return list(of[:first]), list(of[first : first + count]), list(of[first + count :])


# Primitives that run their only jaxpr on their operands in the lowered program (0.10 to 0.12).
_CALLS = frozenset((
  "jit", "pjit", "call", "core_call", "closed_call", "checkpoint", "remat", "remat2",
  "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call", "linear_call",
))  # fmt: skip


def called(eqn: Any) -> Any:
  """Returns the only jaxpr that a call runs on its operands; else None (0.10 to 0.12)."""
  if eqn.primitive.name not in _CALLS:
    return None
  names = ("jaxpr", "call_jaxpr", "fun_jaxpr", "callee", "call")
  return next(it for it in map(eqn.params.get, names) if it is not None)


def runs(eqn: Any) -> tuple[Any, list[int]] | None:
  """Returns (jaxpr, positions of its operands) of an equation that is lowered to the jaxpr.

  None for a loop, a branch, and equations that transform their jaxprs (0.10 to 0.12).
  """
  if eqn.primitive.name == "custom_linear_solve":
    lengths = eqn.params["const_lengths"]
    first, count = lengths.matvec + lengths.vecmat, len(eqn.invars)
    rest = first + lengths.solve + lengths.transpose_solve
    return eqn.params["jaxprs"].solve, [*range(first, first + lengths.solve), *range(rest, count)]
  inner = called(eqn)
  return None if inner is None else (inner, list(range(len(eqn.invars))))


# A jaxpr with some of its arguments moved to the front: (jaxpr, True for each that moves) (0.10 to
# 0.12).
move_binders_to_front: Callable[[Any, Sequence[bool]], Any] = _partial_eval.move_binders_to_front


def split_operands(params: dict[str, Any], of: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
  """Splits values for a `while_loop`'s operands into (condition, body, carry)."""
  first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
  return list(of[:first]), list(of[first:second]), list(of[second:])


def any_lane(flag: Any) -> Any:
  """Returns the predicate of a batched `while_loop`, which continues while any lane does."""
  return jax.numpy.any(flag) if flag.shape else flag


def chosen(lanes: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
  """Returns the carry of a batched `while_loop`: new values for lanes that continue, else old."""

  def choose(new: Any, old: Any) -> Any:
    flags = jax.lax.broadcast_in_dim(lanes, new.shape, tuple(range(lanes.ndim)))
    return jax.lax.select(flags, new, old)

  return list(map(choose, new, old))


def weakly_typed(value: Any, weak: bool = True) -> Any:
  """Returns the value, weakly typed if `weak`, as Python numbers are (0.10 to 0.12; not public)."""
  if not weak:
    return value
  return _lax._convert_element_type(value, value.dtype, weak_type=True)  # pyright: ignore[reportPrivateUsage]
