# SPDX-License-Identifier: Apache-2.0
"""Option names of JAX and other libraries, with callgate's names, for error messages."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from callgate._core.errors import GateDefinitionError

P = ParamSpec("P")
R = TypeVar("R")

_OUT = "out=, a pytree of ShapeDtypeStructs or a function of the arguments' ShapeDtypeStructs"
_STATIC = "keyword arguments without arrays, which are static"
_TRACED = "Numba's compiler in cg.numba, which takes functions of numba.njit with their options"
_VMAP = {
  "sequential": "vmap='each'",
  "sequential_unrolled": "vmap='each'",
  "expand_dims": "vmap='whole'",
  "broadcast_all": "vmap='broadcast'",
  "legacy_vectorized": "vmap='whole'",
}
# The library of an option, and callgate's option: by value, or for any value.
_OPTIONS: dict[str, tuple[str, str | Mapping[Any, str]]] = {
  "result_shape_dtypes": ("JAX's", _OUT),
  "result_shape": ("JAX's", _OUT),
  "out_shape": ("JAX's", _OUT),
  "out_type": ("JAX's", _OUT),
  "output_shape_dtype": ("JAX's", _OUT),
  "abstract_eval": ("JAX's", _OUT),
  "vmap_method": ("JAX's", _VMAP),
  "vectorized": ("JAX's", {True: "vmap='whole'", False: "vmap='each'"}),
  "ordered": ("JAX's", {True: "effect='ordered'", False: "effect='io'"}),
  "has_side_effect": ("JAX's", {True: "effect='io'", False: "effect='pure'"}),
  "side_effect": ("JAX's", {True: "effect='io'", False: "effect='pure'"}),
  "pure": ("another library's", {True: "effect='pure'", False: "effect='io' or 'ordered'"}),
  "partitioned": ("JAX's", {True: "sharding='shard'", False: "sharding='gather'"}),
  "input_output_aliases": ("JAX's", "aliases="),
  "donate_argnums": ("JAX's", "aliases=, with jax.jit(donate_argnums=) around the call"),
  "command_buffer_compatible": ("JAX's", {True: "command_buffer=True of cg.gate"}),
  "static_argnums": ("JAX's", _STATIC),
  "static_argnames": ("JAX's", _STATIC),
  "nondiff_argnums": ("JAX's", _STATIC),
  "custom_call_api_version": ("JAX's", "not needed, since callgate has its own calls of XLA's FFI"),
  "legacy_backend_config": ("JAX's", "keyword arguments, which kernels get as attributes"),
  "input_layouts": ("JAX's", "not needed, since arrays are dense and row-major"),
  "output_layouts": ("JAX's", "not needed, since arrays are dense and row-major"),
  "vjp": ("another library's", "defvjp(fwd, bwd) of the result"),
  "jvp": ("another library's", "defjvp(rule) of the result"),
  "jit": ("another library's", "not needed, since calls work inside and outside jax.jit"),
  "nopython": ("Numba's", _TRACED),
  "nogil": ("Numba's", _TRACED),
  "forceobj": ("Numba's", _TRACED),
}


def answer(owner: str, options: Mapping[str, Any], taken: Container[str] = ()) -> None:
  """Raises for an option, except those in `taken`, that has another name here."""
  for name, value in options.items():
    if name not in _OPTIONS or name in taken:
      continue
    whose, ours = _OPTIONS[name]
    if not isinstance(ours, str):
      known = isinstance(value, (bool, str)) and value in ours
      ours = ours[value] if known else " or ".join(dict.fromkeys(ours.values()))
    raise GateDefinitionError(f"{owner}: {name}={value!r} is {whose} option; in callgate: {ours}")


def near(name: str, names: Iterable[str]) -> str:
  """Returns a hint at a similar name, in Python's words; "" if there is none."""
  found = difflib.get_close_matches(name, list(names), n=1)
  return f". Did you mean '{found[0]}'?" if found else ""


def answer_vmap(label: str, value: Any) -> None:
  """Raises if a value of `vmap=` is a `vmap_method` of JAX."""
  if isinstance(value, str) and value in _VMAP:
    raise GateDefinitionError(
      f"{label}: vmap: {value!r} is JAX's value; in callgate: {_VMAP[value]}"
    )


def answered(function: Callable[P, R]) -> Callable[P, R]:
  """Wraps a function with options of its own, which raises for the options of other libraries."""
  taken = inspect.signature(function).parameters

  @functools.wraps(function)
  def call(*args: P.args, **options: P.kwargs) -> R:
    answer(function.__name__, options, taken)
    return function(*args, **options)

  return call
