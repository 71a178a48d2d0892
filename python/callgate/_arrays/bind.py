# SPDX-License-Identifier: Apache-2.0
"""Connects the runtime's flat arrays to the user's function: pytrees, keywords, array libraries."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from callgate import _callgate
from callgate._arrays import escape, gpu
from callgate._arrays.torch import to_numpy, torch_converter
from callgate._core import encoding, split
from callgate._core.errors import GateDefinitionError

Function = Callable[..., Any]
Convert = Callable[[Any], Any]


def is_native(kind: str) -> bool:
  """Returns True if a gate with `arrays=kind` gets a GPU's own arrays; others get host copies."""
  return kind in gpu.KINDS  # not "jax": its callable might wait for the device that waits for it


def bind(
  function: Function, style: str, arrays: str, gate: str, spec: str
) -> tuple[Function, bool]:
  """Returns the flat callable of a loaded call site, and True if its results are a tuple.

  By style, it is `f(*inputs)`, `f(outs, *inputs)` or `f(context, outs, *inputs)`.
  """
  many = spec != ""
  if arrays in ("numpy", "buffer") and spec in ("", "*"):
    return function, many
  flat = functools.partial(_flat, function, style, gate, spec, arrays == "jax")
  if not is_native(arrays):
    return flat(_host_converter(arrays), to_numpy), many

  @functools.cache
  def on_host() -> Function:
    return flat(_host_converter(arrays), to_numpy)

  @functools.cache
  def on_gpu() -> tuple[gpu.GpuLibrary, Function]:
    library = gpu.library(arrays)
    return library, flat(library.convert, library.result)

  def by_place(*args: Any) -> Any:
    place = _callgate.device_call()
    if place is None:
      return on_host()(*args)
    library, function = on_gpu()
    return library.run(*place, functools.partial(function, *args))

  return by_place, many


def _host_converter(arrays: str) -> Convert:
  """Returns a function that makes a library's array of the runtime's view of host memory."""
  if arrays in ("cupy", "numba"):
    expected = "Use 'numpy', 'buffer', 'jax' or 'torch' here"
    why = "needs a CUDA device: this call runs on the CPU"
    raise GateDefinitionError(f"arrays={arrays!r} {why}. {expected}")
  return _to_jax if arrays == "jax" else torch_converter() if arrays == "torch" else gpu.same


class _Immutable:
  """A Buffer for a consumer of immutable arrays: zero-copy for any requested DLPack version."""

  def __init__(self, buffer: Any) -> None:
    self.buffer = buffer

  def __dlpack__(self, **options: Any) -> Any:
    return self.buffer._dlpack_unchecked()

  def __dlpack_device__(self) -> tuple[int, int]:
    return self.buffer.__dlpack_device__()


def _to_jax(buffer: Any) -> Any:
  array = jax.dlpack.from_dlpack(_Immutable(buffer))
  escape.jax_arrays[buffer] = weakref.ref(array)
  return array


def _flat(
  function: Function, style: str, gate: str, spec: str, keys: bool, convert: Convert,
  to_result: Convert,
) -> Function:  # fmt: skip
  """Returns the function of the runtime's flat arrays, which converts them and rebuilds pytrees."""
  if spec in ("", "*"):

    def call(lead: tuple[Any, ...], inputs: Sequence[Any]) -> Any:
      return function(*lead, *map(convert, inputs))

    def outs_of(out: Any) -> Any:
      return tuple(map(convert, out)) if spec else convert(out)

    def results_of(result: Any) -> Any:
      many = spec and isinstance(result, tuple)
      return tuple(map(to_result, result)) if many else to_result(result)
  else:
    signature = encoding.signature(spec)

    def call(lead: tuple[Any, ...], inputs: Sequence[Any]) -> Any:
      args, kwargs = signature.arguments([convert(array) for array in inputs], keys=keys)
      return function(*lead, *args, **kwargs)

    unflatten_outs = split.unflattener(signature.out_tree, keys=False)

    def outs_of(out: Any) -> Any:
      return unflatten_outs(map(convert, out))

    def results_of(result: Any) -> Any:
      return tuple(map(to_result, encoding.check_structure(signature.out_tree, result, gate)))

  def write(lead: tuple[Any, ...], out: Any, inputs: Sequence[Any]) -> Any:
    converted = outs_of(out)
    result = call((*lead, converted), inputs)
    return out if result is converted else result  # the runtime recognizes its own

  return {
    "return": lambda *inputs: results_of(call((), inputs)),
    "inplace": lambda out, *inputs: write((), out, inputs),
    "context": lambda where, out, *inputs: write((where,), out, inputs),
  }[style]
