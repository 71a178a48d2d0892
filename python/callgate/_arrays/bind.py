"""Between the runtime's flat arrays and the user's function: pytrees, keywords, array libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from callgate import _callgate
from callgate._arrays import escape, gpu
from callgate._arrays.torch import to_numpy, torch_converter
from callgate._core import encoding
from callgate._core.errors import GateDefinitionError

ARRAY_KINDS = ("numpy", "buffer", "jax", "torch", "cupy", "numba")
STYLES = ("return", "inplace", "context")
Function = Callable[..., Any]
Convert = Callable[[Any], Any]


def runtime_arrays(kind: str) -> str:
  """What the C++ runtime makes for a gate with `arrays=kind`."""
  return "numpy" if kind == "numpy" else "buffer"


def is_native(kind: str) -> bool:
  """Whether a gate with `arrays=kind` gets a GPU's own arrays; others get copies on the host.

  Not so "jax": a callable that runs JAX on the device whose program waits for it may wait for
  itself. It gets arrays on the CPU, as JAX's own callbacks do.
  """
  return kind in gpu.KINDS


def bind(
  function: Function, style: str, arrays: str, gate: str, spec: str
) -> tuple[Function, bool]:
  """The flat callable of one call site, and whether its results come and go as a tuple.

  The runtime calls this once for each call site of a loaded executable. The flat callable's form
  follows the style: `f(*inputs)`, `f(outs, *inputs)` or `f(context, outs, *inputs)`.
  """
  many = spec != ""
  flat = functools.partial(_flat, function, style, gate, spec)
  if arrays in ("numpy", "buffer") and spec in ("", "*"):
    return function, many
  if not is_native(arrays):
    return flat(_host_converter(arrays), to_numpy), many
  return _by_place(flat, arrays), many


def _by_place(flat: Callable[[Convert, Convert], Function], arrays: str) -> Function:
  """The flat callable of arrays that a GPU's program gives as they are."""

  @functools.cache
  def on_host() -> Function:
    return flat(_host_converter(arrays), to_numpy)

  @functools.cache
  def on_gpu() -> tuple[gpu.Library, Function]:
    library = gpu.library(arrays)
    return library, flat(library.convert, library.result)

  def call(*args: Any) -> Any:
    place = _callgate.device_call()
    if place is None:
      return on_host()(*args)
    library, function = on_gpu()
    return library.run(*place, functools.partial(function, *args))

  return call


def _flat(
  function: Function, style: str, gate: str, spec: str, convert: Convert, to_result: Convert
) -> Function:
  if spec in ("", "*"):
    return _convert_flat(function, style, convert, to_result, spec == "*")
  return _in_trees(function, style, encoding.signature(spec), convert, to_result, gate)


def _host_converter(arrays: str) -> Convert:
  """Makes a library's array from the runtime's view of the host's memory."""
  if arrays in ("numpy", "buffer"):
    return gpu.same
  if arrays == "jax":
    return _to_jax
  if arrays == "torch":
    return torch_converter()
  raise GateDefinitionError(
    f"arrays={arrays!r} needs a CUDA device: this call runs on the CPU. Expected one of 'numpy', "
    "'buffer', 'jax' or 'torch' here"
  )


class _Immutable:
  """A Buffer for a consumer of immutable arrays: zero copy whatever DLPack version it asks."""

  def __init__(self, buffer: Any) -> None:
    self.buffer = buffer

  def __dlpack__(self, **options: Any) -> Any:
    return self.buffer._dlpack_unchecked()

  def __dlpack_device__(self) -> tuple[int, int]:
    return self.buffer.__dlpack_device__()


def _to_jax(buffer: Any) -> Any:
  return escape.track_jax_array(buffer, jax.dlpack.from_dlpack(_Immutable(buffer)))


def _convert_flat(
  function: Function, style: str, convert: Convert, to_result: Convert, many: bool
) -> Function:
  def returning(*inputs: Any) -> Any:
    result = function(*map(convert, inputs))
    if many and isinstance(result, tuple):
      return tuple(map(to_result, result))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return to_result(result)

  def outs_of(out: Any) -> Any:
    return tuple(map(convert, out)) if many else convert(out)

  def inplace(out: Any, *inputs: Any) -> Any:
    return function(outs_of(out), *map(convert, inputs))

  def context(where: Any, out: Any, *inputs: Any) -> Any:
    return function(where, outs_of(out), *map(convert, inputs))

  return {"return": returning, "inplace": inplace, "context": context}[style]


def _in_trees(
  function: Function,
  style: str,
  signature: encoding.Signature,
  convert: Convert,
  to_result: Convert,
  gate: str,
) -> Function:
  def arguments(flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return signature.arguments([convert(array) for array in flat])

  def outs_of(outs: Sequence[Any]) -> Any:
    return jax.tree.unflatten(signature.out_tree, map(convert, outs))

  def returning(*inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    result = function(*args, **kwargs)
    return tuple(map(to_result, encoding.check_structure(signature.out_tree, result, gate)))

  def inplace(outs: Sequence[Any], *inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    return function(outs_of(outs), *args, **kwargs)

  def context(where: Any, outs: Sequence[Any], *inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    return function(where, outs_of(outs), *args, **kwargs)

  return {"return": returning, "inplace": inplace, "context": context}[style]
