# SPDX-License-Identifier: Apache-2.0
"""`callgate.torch`: PyTorch functions and modules as JAX functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np

from callgate._arrays import torch as _torch
from callgate._call.generic import P, R
from callgate._call.options import shared
from callgate._call.site import Static
from callgate._core import extras, factories, registry, signatures
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._gate.gate import Gate
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._torch.gate import TorchCallee
from callgate._torch.options import (
  RandomOptions,
  TorchInplaceOptions,
  TorchOptions,
  TorchReturnOptions,
  Vmap,
)

A = ParamSpec("A")
B = ParamSpec("B")
C = ParamSpec("C")
Q = ParamSpec("Q")
T = TypeVar("T")


class FunctionCallee(TorchCallee):
  """The core of a `TorchFunction`."""

  kind = "torch function"

  def __init__(self, function: Callable[..., Any], name: str, options: TorchOptions) -> None:
    from callgate._torch import calls

    label = f"{self.kind} '{name}'"
    rule = options.vmap if callable(options.vmap) else None
    self.method = "each" if rule else _options.choice(label, "vmap", options.vmap, get_args(Vmap))
    self.random = options.random
    self.run = calls.of_function(function, options)
    call = calls.caller(self.run, ())
    functools.update_wrapper(call, function, updated=())
    inferred = options.out is None and options.like is None
    out = self._infer if inferred else options.out
    changes = {"name": name, "out": out, "vmap": rule or "each", "arrays": "torch"}
    super().__init__(None, (), call, shared(GateOptions, options, **changes))
    if options.style == "inplace" and inferred:
      raise GateDefinitionError(
        f"{self.label}: style='inplace' needs out=, the types of the arrays that it writes"
      )

  def given(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], dict[str, Any], Static]:
    args, kwargs = jax.tree.map(_from_torch, (args, kwargs))
    if self.random and "rng" not in kwargs:
      raise GateDefinitionError(f"{self.label} has random=True; pass rng=, a JAX key")
    return super().given(args, kwargs)

  def _infer(self, *args: Any, **kwargs: Any) -> Any:
    from callgate._torch import calls

    types, self.drawn = calls.result_types(self.label, self.run, args, kwargs)
    if self.random:
      self.drawn = None  # both runs use the same key
    leaves, tree = jax.tree.flatten(types)
    for index, struct in enumerate(leaves):
      dtype = tracing.canonical_dtype(struct.dtype)
      integers = np.issubdtype(dtype, np.integer)  # cast if their values fit
      if dtype != struct.dtype and not (self.casts() or integers):
        expected = f"{dtype.name}: .to(torch.{dtype.name}) in the function, or cast=True"
        got = f"result {index} is {struct.dtype.name}, which needs jax_enable_x64"
        raise GateDefinitionError(f"{self.label}: {got}; expected {expected}")
      leaves[index] = jax.ShapeDtypeStruct(struct.shape, dtype)
    return jax.tree.unflatten(tree, leaves)


class ModuleCallee(FunctionCallee):
  """The core of a `TorchModule`.

  Attributes:
    module: the module as a function of its parameters and buffers.
  """

  kind = "torch module"

  def __init__(self, module: Any, name: str, options: TorchOptions) -> None:
    from callgate._torch.module import ModuleFunction

    if options.style != "return":
      why = "style: a module returns its results; use style='return'"
      raise GateDefinitionError(f"callgate.torch: {why}")
    function = self.module = ModuleFunction(f"{self.kind} '{name}'", module, options.mutable)
    own = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
    with contextlib.suppress(TypeError, ValueError):
      parameters = signatures.read(module.forward).parameters.values()
      function.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    super().__init__(function, name, options)

  def check_params(self, params: Any) -> None:
    what = f"{self.label}: argument 'params'"
    if not isinstance(params, Mapping):
      expected = "a dict of arrays as in `.params`"
      raise GateDefinitionError(f"{what}: expected {expected}, got {type(params).__name__}")
    own = self.module.tensors()
    for names, a in ((own.keys() - params.keys(), "no"), (params.keys() - own.keys(), "a")):
      if names:
        known = f"the names of `.params`: {', '.join(own)}"
        raise GateDefinitionError(f"{what}: got {a} '{min(names)}'; expected {known}")
    for name, tensor in own.items():
      if (shape := list(np.shape(params[name]))) != (wanted := list(tensor.shape)):
        raise GateDefinitionError(f"{what}: '{name}': expected shape {wanted}, got {shape}")

  def frozen(self, args: Any) -> frozenset[int]:
    fixed = [args[0][name] for name, trained in self.module.trainable().items() if not trained]
    return frozenset(jax.tree.leaves(fixed))


class TorchFunction(Gate[P, R]):
  """A PyTorch function as a JAX function; `callgate.torch` makes one.

  A call takes pytrees of arrays; it copies torch tensors. Keyword arguments that contain an array
  are arguments too. Other keyword arguments are static: they must be hashable, and reach the
  function unchanged. With `random=True` a call also takes a key, `rng=`. It returns the function's
  results with jax.Arrays in place of tensors.
  """

  _makers = "callgate.torch"

  @property
  def random(self) -> bool:
    """True if calls take a key, `rng=`."""
    return self._core.random


class TorchModule(TorchFunction[..., Any]):
  """A `torch.nn.Module` as a JAX function of its parameters; `callgate.torch` makes one.

  Call it as `model(params, *args)`, with a dict like `TorchModule.params`.
  """

  @property
  def params(self) -> dict[str, jax.Array]:
    """The module's current parameters and buffers by name, as new JAX arrays."""
    found: dict[str, jax.Array] = {}
    for name, tensor in self._core.module.tensors().items():
      array = _torch.to_numpy(tensor)
      dtype = tracing.canonical_dtype(array.dtype)
      if dtype != array.dtype and array.dtype.kind not in "iu":  # counters may have fewer bits
        expected = f"{dtype.name} without it (module.float() converts a module)"
        got = f"parameter '{name}' is {array.dtype.name}, which needs jax_enable_x64"
        raise GateDefinitionError(f"{self._core.label}: {got}; expected {expected}")
      found[name] = jnp.array(array, dtype)  # `load` overwrites the module's memory
    return found

  @property
  def trainable(self) -> dict[str, bool]:
    """A dict with True for each name in `params` that has a gradient, and False for the others.

    Buffers, and parameters with `requires_grad=False`, have a zero gradient. An optimizer with
    weight decay should skip them: `optax.masked(optimizer, model.trainable)`.
    """
    return self._core.module.trainable()

  def load(self, params: Mapping[str, Any]) -> None:
    """Writes arrays into the module's parameters and buffers.

    Args:
      params: a dict like `TorchModule.params`.

    Raises:
      GateDefinitionError: the module lacks a name, or has another shape there.
    """
    self._core.check_params(params)
    self._core.module.load(params)

  def __call__(self, params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls the module's forward with these parameters and buffers; see `TorchFunction`.

    Args:
      params: a dict like `TorchModule.params`.
      *args: the arguments of forward.
      **kwargs: the keyword arguments of forward.

    Returns:
      The result of forward; with `mutable=True` a pair of it and the dict of the new buffers.
    """
    self._core.check_params(params)
    return super().__call__(dict(params), *args, **kwargs)


def _from_torch(leaf: Any) -> Any:
  is_torchs = hasattr(leaf, "data_ptr") and not isinstance(leaf, jax.Array)
  return jnp.asarray(_torch.to_numpy(leaf)) if is_torchs else leaf


class Module(Protocol):
  """A `torch.nn.Module`, for type checkers."""

  def named_parameters(self, *args: Any, **kwargs: Any) -> Any: ...


class MakesFunctions(Protocol[A, B, C]):
  """The type of `torch`."""

  @overload
  def __call__(self, fn: Module, /, *args: C.args, **options: C.kwargs) -> TorchModule: ...
  @overload
  def __call__(
    self, fn: Callable[Concatenate[Any, Q], Any], /, *args: A.args, **options: A.kwargs
  ) -> TorchFunction[Q, Any]: ...
  @overload
  def __call__(
    self, fn: None = None, /, *args: A.args, **options: A.kwargs
  ) -> Callable[[Callable[Concatenate[Any, Q], Any]], TorchFunction[Q, Any]]: ...
  @overload
  def __call__(
    self, fn: Callable[..., T], /, *args: B.args, **options: B.kwargs
  ) -> TorchFunction[..., T]: ...
  @overload
  def __call__(
    self, fn: None = None, /, *args: B.args, **options: B.kwargs
  ) -> Callable[[Callable[..., T]], TorchFunction[..., T]]: ...
  @overload
  def __call__(
    self, fn: Callable[Q, T], /, *args: C.args, **options: C.kwargs
  ) -> TorchFunction[Q, T]: ...
  @overload
  def __call__(
    self, fn: None = None, /, *args: C.args, **options: C.kwargs
  ) -> Callable[[Callable[Q, T]], TorchFunction[Q, T]]: ...


def _decorator(
  *kinds: *tuple[Callable[A, Any], Callable[B, Any], Callable[C, Any]],
) -> Callable[[Callable[..., Any]], MakesFunctions[A, B, C]]:
  del kinds
  return factories.decorator(TorchOptions)


@_decorator(TorchInplaceOptions, RandomOptions, TorchReturnOptions)
def torch(fn: Callable[..., Any], /, *, options: TorchOptions) -> Any:
  """Makes a JAX function of a PyTorch function or module, with derivatives and vmap.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, torch

  @cg.torch
  def distance(x, y):                  # tensors over XLA's own memory
    return torch.linalg.vector_norm(x - y)

  x, y = jnp.array([3.0, 4.0]), jnp.zeros(2)
  assert distance(x, y) == 5
  assert jnp.allclose(jax.jit(jax.grad(distance))(x, y), jnp.array([0.6, 0.8]))
  ```

  torch's autograd gives derivatives of any order, in both modes, by running the function again.
  Call a module as `model(params, *args)`, with `params` like `model.params`.

  Args:
    fn: a function of pytrees of tensors that returns such a pytree and doesn't write to its
      arguments; or a `torch.nn.Module`. Leave it out to use the result as a decorator.

  Returns:
    A `TorchFunction`; for a module a `TorchModule`, with `params`, `trainable` and `load`.

  Raises:
    GateDefinitionError: an option is wrong, or PyTorch is not installed. In a call: the result
      types can't be found, or a parameter is missing.
    ValueError: another live gate has the name.
  """
  _options.name("torch", options.name)
  options = _options.checked("torch", options)
  nn = extras.library("torch.nn", "PyTorch", "torch", by="callgate.torch")
  if not callable(fn):
    raise GateDefinitionError(f"callgate.torch: fn: expected a callable or a module, got {fn!r}")
  if isinstance(fn, nn.Module):
    kind = cast("type[Any]", type(fn))
    name = options.name or registry.free_name(f"{kind.__module__}.{kind.__qualname__}")
    return TorchModule(ModuleCallee(fn, name, options))
  if options.mutable:
    raise GateDefinitionError("callgate.torch: mutable=True needs a module, got a function")
  name = options.name or registry.unique_name(fn)
  return TorchFunction(FunctionCallee(fn, name, options))
