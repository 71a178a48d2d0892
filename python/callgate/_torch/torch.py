"""`callgate.torch`: PyTorch functions and modules as JAX functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import jax

from callgate._arrays import torch as _torch
from callgate._call.operation import Effect
from callgate._core import extras, registry
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._gate.gate import Thread
from callgate._jax import tracing
from callgate._torch.gate import TorchGate

Style = Literal["return", "inplace"]
Vmap = Literal["auto", "whole", "each"]


class TorchFunction(TorchGate):
  """A PyTorch function as a JAX function; made by `callgate.torch`.

  Attributes:
    name: what compiled programs call it by; unique among the live gates of the process.
    random: whether calls take a key, `rng=`.
  """

  kind = "torch function"

  def __init__(
    self,
    function: Callable[..., Any],
    *,
    out: Any,
    like: Callable[..., Any] | None,
    name: str,
    style: Style,
    vmap: Vmap | Callable[..., Any],
    random: bool,
    enable_grad: bool,
    **options: Any,
  ) -> None:
    from callgate._torch import calls

    label = f"{self.kind} '{name}'"
    self.method = "each" if callable(vmap) else _options.choice(label, "vmap", vmap, _VMAPS)
    self.random = random
    self.run = calls.of_function(
      function, random=random, enable_grad=enable_grad, plain=style == "return"
    )
    call = calls.caller(self.run, ())
    functools.update_wrapper(call, function, updated=())
    super().__init__(
      None,
      (),
      call,
      out=self._infer if out is None and like is None else out,
      like=like,
      name=name,
      style=_options.choice(label, "style", style, ("return", "inplace")),
      vmap=vmap if callable(vmap) else "each",
      **options,
    )
    if style == "inplace" and out is None and like is None:
      raise GateDefinitionError(f"{self.label}: style='inplace' needs out=, what it writes into")

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the function, inside or outside compiled code.

    Args:
      *args: pytrees of arrays; torch tensors are copied.
      **kwargs: pytrees that hold an array are arguments too; anything else is static, must be
        hashable, and reaches the function as it is. `rng` is the key of a function with
        `random=True`.

    Returns:
      What the function returns, with jax.Arrays for tensors.
    """
    args, kwargs = jax.tree.map(_from_torch, (args, kwargs))
    if self.random and "rng" not in kwargs:
      raise GateDefinitionError(f"{self.label} has random=True: expected rng=, a JAX key")
    return super().__call__(*args, **kwargs)

  def _infer(self, *args: Any, **kwargs: Any) -> Any:
    from callgate._torch import types as _types

    types, self.drawn = _types.result_types(self.label, self.run, args, kwargs)
    if self.random:
      self.drawn = None  # both runs draw from the same key
    leaves, tree = jax.tree.flatten(types)
    return jax.tree.unflatten(tree, [self._canonical(leaf, i) for i, leaf in enumerate(leaves)])

  def _canonical(self, struct: Any, index: int) -> Any:
    dtype = tracing.canonical_dtype(struct.dtype)
    if dtype == struct.dtype:
      return struct
    if not self.cast:
      raise GateDefinitionError(
        f"{self.label}: result {index} is {struct.dtype.name}, which needs jax_enable_x64; "
        f"expected {dtype.name} without it: convert it in the function, .to(torch.{dtype.name}), "
        "or pass cast=True"
      )
    return jax.ShapeDtypeStruct(struct.shape, dtype)


class TorchModule(TorchFunction):
  """A `torch.nn.Module` as a JAX function of its parameters; made by `callgate.torch`.

  It is called as `model(params, *args)`, with `params` as `TorchModule.params` gives them.
  """

  kind = "torch module"

  def __init__(self, module: Any, *, mutable: bool, name: str, **options: Any) -> None:
    from callgate._torch.module import ModuleFunction

    self._module = ModuleFunction(f"{self.kind} '{name}'", module, mutable=mutable)
    _set_signature(self._module, module.forward, options["style"])
    super().__init__(self._module, name=name, **options)

  @property
  def params(self) -> dict[str, jax.Array]:
    """The module's parameters and buffers now, by name, as new JAX arrays."""
    return self._module.params()

  @property
  def trainable(self) -> dict[str, bool]:
    """For each name in `params` whether it has a gradient.

    Buffers, and parameters with `requires_grad=False`, have none: theirs is zero. An optimizer
    with weight decay should leave them alone (`optax.masked(optimizer, model.trainable)`).
    """
    return self._module.trainable()

  def load(self, params: Mapping[str, Any]) -> None:
    """Writes arrays back into the torch module: its parameters and buffers, in place.

    Args:
      params: a dict as `params` gives it.

    Raises:
      GateDefinitionError: a name or a shape is not the module's.
    """
    self._module.load(params)

  def __call__(self, params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls the module with these parameters and buffers; see `TorchFunction.__call__`.

    Args:
      params: a dict as `params` gives it.
      *args: of the module's forward.
      **kwargs: of the module's forward.

    Returns:
      What forward returns, with jax.Arrays for tensors; with `mutable=True` a pair of that and the
      dict of the buffers after the call.
    """
    self._module.check(params)
    return super().__call__(dict(params), *args, **kwargs)

  def frozen(self, args: Any, kwargs: Any) -> frozenset[int]:
    del kwargs
    trainable = self._module.trainable()
    return frozenset(
      i for name, leaf in args[0].items() if not trainable[name] for i in jax.tree.leaves(leaf)
    )


_VMAPS = ("auto", "whole", "each")


def _set_signature(function: Any, forward: Callable[..., Any], style: Style) -> None:
  if style != "return":
    raise GateDefinitionError(
      "callgate.torch: a module returns its results; expected style='return'"
    )
  own = inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)
  try:
    parameters = list(inspect.signature(forward).parameters.values())
    function.__signature__ = inspect.Signature([own, *parameters])
  except (TypeError, ValueError):
    return


def _from_torch(leaf: Any) -> Any:
  if isinstance(leaf, jax.Array) or not hasattr(leaf, "data_ptr"):
    return leaf
  return jax.numpy.asarray(_torch.to_numpy(leaf))


class _Options(TypedDict, total=False):
  """The options of `torch`, for the overloads' sake."""

  out: Any
  like: Callable[..., Any] | None
  name: str | None
  effect: Effect
  style: Style
  aliases: Mapping[int, int] | None
  vmap: Vmap | Callable[..., Any]
  sharding: Any
  thread: Thread
  timeout: float | None
  cast: bool
  gradient: Literal["finite-difference"] | None
  random: bool
  enable_grad: bool
  mutable: bool


@overload
def torch(fn: Callable[..., Any], /, **options: Unpack[_Options]) -> Any: ...


@overload
def torch(
  fn: None = None, /, **options: Unpack[_Options]
) -> Callable[[Callable[..., Any]], TorchFunction]: ...


def torch(
  fn: Callable[..., Any] | None = None,
  /,
  *,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  effect: Effect = "pure",
  style: Style = "return",
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] = "auto",
  sharding: Any = None,
  thread: Thread = "xla",
  timeout: float | None = None,
  cast: bool = False,
  gradient: Literal["finite-difference"] | None = None,
  random: bool = False,
  enable_grad: bool = False,
  mutable: bool = False,
) -> Any:
  """Makes a PyTorch function or module a JAX function, with its derivatives and batches.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, torch

  @cg.torch
  def distance(x, y):                  # tensors over XLA's own memory
    return torch.linalg.vector_norm(x - y)

  x, y = jnp.array([3.0, 4.0]), jnp.zeros(2)
  assert distance(x, y) == 5
  assert jnp.allclose(jax.jit(jax.grad(distance))(x, y), jnp.array([0.6, 0.8]))
  ```

  Derivatives of any order and in both modes are torch's own, from a second run of the function. A
  module is called as `model(params, *args)`, with the pytree `model.params`.

  Args:
    fn: takes and returns pytrees of tensors, and does not write into its arguments; or a
      `torch.nn.Module`. Leave it out to use the result as a decorator.
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one. Default: found by a run on tensors without values.
    like: a JAX-traceable reference of the same signature, which then gives the results' shapes, the
      derivatives, and the truth of `check`.
    name: what programs call the function by, as for `callgate.gate`.
    effect: "pure", "io" or "ordered", as for `callgate.gate`. Derivatives are always pure.
    style: "return", or "inplace" for `fn(out, *args)`, which writes into tensors over XLA's result
      memory, as torch's `out=` does; it needs `out` and has no derivative of its own.
    aliases: flat input position to flat output position, with style="inplace": both are one memory.
    vmap: "auto" (all lanes in one call through `torch.func.vmap` where it takes the function, which
      is tried when the program is traced; else lane by lane), "whole" (always `torch.func.vmap`),
      "each" (always lane by lane) or a rule as for `callgate.gate`.
    sharding: which dimensions of the arrays may stay split over devices, as for `callgate.gate`:
      None or "gather", "shard", a rule such as "i [j] -> i [j]", or a function.
    thread: "xla" or "own", as for `callgate.gate`.
    timeout: seconds, as for `callgate.gate`.
    cast: allow same-kind casts of results: int64 to int32 where JAX has no int64.
    gradient: "finite-difference": derivatives by central differences in the place of torch's.
    random: the function draws random numbers. Calls then take `rng=`, a JAX key, which seeds
      torch's generator for this call; the function does not get it.
    enable_grad: run the function with autograd on, for one that calls it itself.
    mutable: for modules that write into their buffers (batch normalisation in training): calls
      return `(result, buffers)`, the new values by name.

  Returns:
    A `TorchFunction`; for a module a `TorchModule`, with `params`, `trainable` and `load`.

  Raises:
    GateDefinitionError: an option is wrong or PyTorch is not installed; when called, that the
      results' types can't be found, or a parameter is missing.
    ValueError: the name is taken by another live gate.
  """
  options: dict[str, Any] = {
    "out": out,
    "like": like,
    "name": name,
    "effect": effect,
    "style": style,
    "aliases": aliases,
    "vmap": vmap,
    "sharding": sharding,
    "thread": thread,
    "timeout": timeout,
    "cast": cast,
    "gradient": gradient,
    "random": random,
    "enable_grad": enable_grad,
    "mutable": mutable,
  }
  name = _options.name("torch", name)
  _options.choice("torch", "style", style, ("return", "inplace"))
  _options.booleans("torch", cast=cast, random=random, enable_grad=enable_grad, mutable=mutable)
  if fn is None:
    return lambda function: _make(function, **options)
  return _make(fn, **options)


def _make(fn: Any, *, name: str | None, mutable: bool, **options: Any) -> TorchFunction:
  nn = extras.library("torch.nn", "PyTorch", "torch", by="callgate.torch")
  if not callable(fn):
    raise GateDefinitionError(f"callgate.torch: fn: expected a callable or a module, got {fn!r}")
  if isinstance(fn, nn.Module):
    kind = cast("type[Any]", type(fn))
    unique = name or registry.free_name(f"{kind.__module__}.{kind.__qualname__}")
    return TorchModule(fn, mutable=mutable, name=unique, **options)
  if mutable:
    raise GateDefinitionError("callgate.torch: mutable=True is for modules, got a function")
  return TorchFunction(fn, name=name or registry.unique_name(fn), **options)
