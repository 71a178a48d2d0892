"""Between the runtime's flat arrays and the user's function: pytrees, keywords, array libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from callgate import _escape, _spec
from callgate.errors import GateDefinitionError, ResultError

ARRAY_KINDS = ("numpy", "buffer", "jax", "torch", "cupy")
STYLES = ("return", "inplace", "context")

Function = Callable[..., Any]


def runtime_arrays(kind: str) -> str:
  """What the C++ runtime makes for a gate with `arrays=kind`."""
  return "numpy" if kind == "numpy" else "buffer"


def bind(
  function: Function, style: str, arrays: str, gate: str, spec: str
) -> tuple[Function, bool]:
  """The flat callable of one call site, and whether its results come and go as a tuple.

  The runtime calls this once for each call site of a loaded executable. The flat callable's form
  follows the style: `f(*inputs)`, `f(outs, *inputs)` or `f(context, outs, *inputs)`.
  """
  convert = converter(arrays)
  if spec in ("", "*") and convert is None:
    return function, spec == "*"
  if spec in ("", "*"):
    return _convert_flat(function, style, convert or _same, spec == "*"), spec == "*"
  signature = _spec.signature(spec)
  to_arguments = functools.partial(_arguments, signature, convert or _same)
  if style == "return":
    return _returning(function, signature, to_arguments, gate), True
  return _writing(function, style, signature, to_arguments, convert or _same), True


def converter(arrays: str) -> Callable[[Any], Any] | None:
  """Makes a library's array from the runtime's view; None where the view serves as it is."""
  if arrays in ("numpy", "buffer"):
    return None
  if arrays == "jax":
    return _to_jax
  if arrays == "torch":
    return _torch_converter()
  raise GateDefinitionError(
    "arrays='cupy' needs a CUDA device: this call runs on the CPU. Expected one of 'numpy', "
    "'buffer', 'jax' or 'torch' here"
  )


def _to_jax(buffer: Any) -> Any:
  return _escape.track_jax_array(buffer, jax.dlpack.from_dlpack(buffer))


def _torch_converter() -> Callable[[Any], Any]:
  try:
    from torch.utils.dlpack import from_dlpack
  except ImportError as error:
    raise GateDefinitionError(
      "arrays='torch' needs PyTorch, which is not installed: pip install 'callgate[torch]'"
    ) from error

  def convert(buffer: Any) -> Any:
    # Unversioned: torch has no read-only tensors, and would warn about each input.
    return from_dlpack(buffer._dlpack_unchecked())

  return convert


def to_numpy(value: Any) -> Any:
  """A returned array as NumPy: torch tensors need help with gradients and bfloat16."""
  if not (hasattr(value, "detach") and hasattr(value, "data_ptr")):
    return value
  tensor = value.detach().cpu()
  if str(tensor.dtype) == "torch.bfloat16":
    import ml_dtypes
    import torch

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return tensor.numpy()


def _same(array: Any) -> Any:
  return array


def _arguments(
  signature: _spec.Signature, convert: Callable[[Any], Any], flat: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
  return signature.arguments([convert(array) for array in flat])


def _convert_flat(
  function: Function, style: str, convert: Callable[[Any], Any], many: bool
) -> Function:
  def returning(*inputs: Any) -> Any:
    result = function(*map(convert, inputs))
    return tuple(map(to_numpy, result)) if many and isinstance(result, tuple) else to_numpy(result)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

  def outs_of(out: Any) -> Any:
    return tuple(map(convert, out)) if many else convert(out)

  def inplace(out: Any, *inputs: Any) -> Any:
    return function(outs_of(out), *map(convert, inputs))

  def context(where: Any, out: Any, *inputs: Any) -> Any:
    return function(where, outs_of(out), *map(convert, inputs))

  return {"return": returning, "inplace": inplace, "context": context}[style]


def _returning(
  function: Function, signature: _spec.Signature, to_arguments: Function, gate: str
) -> Function:
  def call(*inputs: Any) -> Any:
    args, kwargs = to_arguments(inputs)
    result = function(*args, **kwargs)
    leaves = _spec.check_structure(signature.out_tree, result, gate)
    return tuple(map(to_numpy, leaves))

  return call


def _writing(
  function: Function,
  style: str,
  signature: _spec.Signature,
  to_arguments: Function,
  convert: Callable[[Any], Any],
) -> Function:
  def inplace(outs: Sequence[Any], *inputs: Any) -> Any:
    args, kwargs = to_arguments(inputs)
    out = jax.tree.unflatten(signature.out_tree, map(convert, outs))
    return function(out, *args, **kwargs)

  def context(where: Any, outs: Sequence[Any], *inputs: Any) -> Any:
    args, kwargs = to_arguments(inputs)
    out = jax.tree.unflatten(signature.out_tree, map(convert, outs))
    return function(where, out, *args, **kwargs)

  return inplace if style == "inplace" else context


def run_on_host(
  function: Function,
  style: str,
  arrays: str,
  gate: str,
  site: Any,
  results: Sequence[tuple[tuple[int, ...], Any]],
  inputs: Sequence[Any],
  cast: bool,
) -> tuple[Any, ...]:
  """One call of the user's function without the runtime, for JAX's own callbacks.

  Args:
    function: the user's callable; `style` and `arrays` its form. Only "numpy" and "jax" arrays
      exist outside the runtime: "buffer" and "torch" callables get NumPy arrays and tensors made
      from them.
    gate: the gate's name, for messages.
    site: the CallSite.
    results: (shape, dtype) of each result.
    inputs: NumPy arrays.
    cast: same-kind casts of results are allowed.

  Returns:
    The results, checked as the runtime checks them.
  """
  convert = _host_converter(arrays)
  copies = [np.array(x) for x in inputs]
  for copy in copies:
    copy.setflags(write=False)
  args, kwargs = jax.tree.unflatten(site.in_tree, [convert(x) for x in copies])
  static = dict(site.static)
  if style == "return":
    value = function(*args, **kwargs, **static)
    leaves = [to_numpy(leaf) for leaf in _spec.check_structure(site.out_tree, value, gate)]
    return tuple(
      _checked(gate, leaf, shape, dtype, index, cast)
      for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, results, strict=True))
    )
  outs = [np.zeros(shape, dtype) for shape, dtype in results]
  out = jax.tree.unflatten(site.out_tree, [convert(x) for x in outs])
  lead = (HostContext(),) if style == "context" else ()
  function(*lead, out, *args, **kwargs, **static)
  return tuple(outs)


class HostContext:
  """`Context` for callables that JAX's own callbacks run."""

  stage = "EXECUTE"
  stream = 0
  device = 0


def _host_converter(arrays: str) -> Callable[[Any], Any]:
  if arrays == "jax":
    return jax.numpy.asarray
  if arrays == "torch":
    import torch

    return torch.from_numpy
  return _same


def _checked(
  gate: str, value: Any, shape: tuple[int, ...], dtype: Any, index: int, cast: bool
) -> Any:
  array = np.asarray(value)
  same_kind = array.dtype == dtype or (cast and np.can_cast(array.dtype, dtype, "same_kind"))
  if array.shape != shape or not same_kind:
    raise ResultError(
      f"gate '{gate}': result {index}: expected {np.dtype(dtype).name}{list(shape)}, got "
      f"{array.dtype.name}{list(array.shape)}"
    )
  return array.astype(dtype, copy=False)
