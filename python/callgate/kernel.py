"""Kernels: native functions that compiled JAX programs call, with no Python at run time.

`Kernel` is what `callgate.cpp`, `library`, `cfunc`, `numba` and `elementwise` return. A kernel is
one native function, or a family of them: templates and Numba functions are compiled for the types
of a call, as *variants* that programs name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from callgate import _attributes, _callgate, _derivatives, _names, _runtime, _shapes
from callgate._lowering import Level
from callgate._operation import Effect, Operation, Vmap
from callgate._parameters import (
  Kind,
  Parameter,
  as_operand,
  expected_text,
  fits,
  leaves_of,
  type_text,
)
from callgate._primitive import CallSite
from callgate.errors import GateDefinitionError, raise_deferred, raise_kept

Static = tuple[tuple[str, Any], ...]
Type = tuple[np.dtype[Any], int]  # dtype and rank of an array


@dataclasses.dataclass(frozen=True)
class CallTypes:
  """What a variant is compiled for: the types of a call's arrays, and its static values."""

  operands: tuple[Type, ...]
  results: tuple[Type, ...]
  static: Static


@dataclasses.dataclass(frozen=True)
class Variant:
  """One compiled function of a kernel.

  Attributes:
    callee: the runtime's handle, which programs call by its name.
    parameters: of the function.
  """

  callee: _callgate.Kernel
  parameters: tuple[Parameter, ...]

  def groups(self, operands: int, results: int) -> str:
    """How many arrays each variadic parameter takes, as programs hold it."""
    sizes: list[str] = []
    for parameter in self.parameters:
      if parameter.kind is Kind.INS:
        sizes.append(str(operands - sum(p.is_operand for p in self.parameters) + 1))
      if parameter.kind is Kind.OUTS:
        sizes.append(str(results - sum(p.is_result for p in self.parameters) + 1))
    return ",".join(sizes)


@dataclasses.dataclass(frozen=True)
class Function:
  """A native function of the form of kernel.h.

  Attributes:
    address: of the function.
    parameters: what it takes.
    keep: what keeps it loaded.
    user_data: an address that its context hands out.
  """

  address: int
  parameters: tuple[Parameter, ...]
  keep: Any = None
  user_data: int = 0


class Kernel(Operation):
  """A native function as a JAX function; called like any JAX function.

  Made by `callgate.cpp`, `callgate.library`, `callgate.cfunc`, `callgate.numba` and
  `callgate.elementwise`.

  Attributes:
    name: what compiled programs call it by; unique among the live ones of the process.
    parameters: names of the arguments that are arrays.
    effect, vmap, thread_safe: as given when it was made.
  """

  kind = "kernel"
  arrays = "native"

  def __init__(
    self,
    name: str,
    signature: Sequence[Parameter] | None,
    *,
    out: Any = None,
    like: Callable[..., Any] | None = None,
    effect: Effect = "pure",
    aliases: Mapping[int, int] | None = None,
    vmap: Vmap | Callable[..., Any] = "each",
    sharding: Any = None,
    linear: bool | int | Sequence[int] = False,
    gradient: Literal["finite-difference"] | None = None,
    thread_safe: bool = False,
  ) -> None:
    """See the functions that make kernels.

    Args:
      name: unique among the live operations of the process.
      signature: the parameters as far as they are known before a call; None for a function that
        takes any number of arrays, and static values by any keyword.
      out, like, effect, aliases, vmap, sharding, linear, gradient: as for `callgate.gate`.
      thread_safe: lanes of a vmap may run on several threads at once.
    """
    super().__init__(
      name,
      out=out,
      like=like,
      effect=effect,
      aliases=aliases,
      vmap=vmap,
      sharding=sharding,
      linear=linear,
      gradient=gradient,
    )
    self.thread_safe = thread_safe
    self.signature = None if signature is None else tuple(signature)
    self._variants: dict[str, Variant] = {}
    if self.signature is not None:
      self.parameters = tuple(p.name for p in self.signature if p.is_operand)
      self._alias_inouts(self.signature)
    taken = _names.get(name)
    if taken is not None:
      raise ValueError(
        f"callgate: the name '{name}' is taken by another live gate or kernel; choose another "
        "name=, or drop the other one and the programs that call it"
      )
    _names.register(self.name, self)

  def _alias_inouts(self, signature: Sequence[Parameter]) -> None:
    """An InOut is an operand and a result in one memory."""
    variadic = [p.kind in (Kind.INS, Kind.OUTS) for p in signature]
    if any(p.kind is Kind.INOUT for p in signature) and any(variadic):
      raise GateDefinitionError(f"{self.label}: expected no InOut beside Ins or Outs, got both")
    operands = [p for p in signature if p.is_operand]
    results = [p for p in signature if p.is_result]
    for parameter in signature:
      if parameter.kind is Kind.INOUT:
        self.aliases[operands.index(parameter)] = results.index(parameter)

  # -- variants ----------------------------------------------------------------------------------
  def compile(self, types: CallTypes) -> tuple[str, Function]:
    """The function for a call, and the key that tells it from the kernel's others.

    Raises:
      GateDefinitionError: the kernel can't take these types.
    """
    raise NotImplementedError

  def variant_key(self, types: CallTypes) -> str:
    """The key of the variant for a call; "" for a kernel that has one for all."""
    del types
    return ""

  def types_of_key(self, key: str) -> CallTypes:
    """What `variant_key` was given, as far as `compile` needs it."""
    del key
    return CallTypes((), (), ())

  def variant(self, types: CallTypes) -> Variant:
    """The variant for a call, compiled at its first use."""
    key = self.variant_key(types)
    if key not in self._variants:
      self._define(key, types)
    return self._variants[key]

  def define_variant(self, key: str) -> bool:
    """Makes the variant that a program from elsewhere names; False where it isn't one of ours."""
    if key not in self._variants:
      self._define(key, self.types_of_key(key))
    return True

  def _define(self, key: str, types: CallTypes) -> None:
    _, function = self.compile(types)
    callee = _callgate.Kernel(
      f"{self.name}[{key}]" if key else self.name,
      function.address,
      [p.code for p in function.parameters],
      [p.name for p in function.parameters],
      user_data=function.user_data,
      thread_safe=self.thread_safe,
      keep=function.keep,
    )
    self._variants[key] = Variant(callee, function.parameters)

  # -- calling -----------------------------------------------------------------------------------
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the kernel, inside or outside compiled code.

    Args:
      *args: arrays (or Python scalars, which take the parameter's dtype), in the order of the
        parameters; a sequence of arrays for a variadic one. Static values have their place, too.
      **kwargs: arrays and static values by the parameters' names.

    Returns:
      The pytree that `out` (or `like`) declares, of jax.Arrays.
    """
    raise_deferred()
    operands, static = self._arguments(args, kwargs)
    return _derivatives.apply(self, self.rules, operands, {}, static)

  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    if self.signature is None:
      arrays, static = _shapes.split_static(self.label, kwargs)
      return _shapes.to_positional(self, args, arrays)[0], static
    given = [p for p in self.signature if p.is_given]
    if len(args) > len(given):
      raise GateDefinitionError(
        f"{self.label}: expected {len(given)} arguments ({', '.join(p.name for p in given)}), got "
        f"{len(args)}"
      )
    values = dict(zip((p.name for p in given), args, strict=False))
    for name, value in kwargs.items():
      if name in values or name not in {p.name for p in given}:
        what = "twice" if name in values else "which it doesn't have"
        raise GateDefinitionError(
          f"{self.label}: got argument '{name}' {what}; expected {', '.join(p.name for p in given)}"
        )
      values[name] = value
    missing = [p.name for p in given if p.name not in values]
    if missing:
      raise GateDefinitionError(f"{self.label}: expected argument '{missing[0]}', got none")
    operands = [as_operand(p, values[p.name]) for p in given if p.is_operand]
    for parameter, value in zip((p for p in given if p.is_operand), operands, strict=True):
      leaves_of(self.label, parameter, value)
    static = [(p.name, p.freeze(self.label, values[p.name])) for p in given if p.is_static]
    return tuple(operands), tuple(sorted(static))

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    """Raises unless the call's arrays are what the kernel takes."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in site.results]
    for index, value in enumerate((*structs, *results)):
      if _shapes.is_packed(value.dtype):
        what = f"argument {index}" if index < len(structs) else f"result {index - len(structs)}"
        raise GateDefinitionError(
          f"{self.label}: {what}: {np.dtype(value.dtype).name} has several elements in a byte, "
          "which kernels don't take; convert to int8 before the call"
        )
    variant = self.variant(_types(structs, results, site.static))
    self._check_types(variant.parameters, site, structs, results)

  def _check_types(
    self,
    parameters: Sequence[Parameter],
    site: CallSite,
    operands: Sequence[Any],
    results: Sequence[Any],
  ) -> None:
    ins = _expand([p for p in parameters if p.is_operand], len(operands))
    outs = _expand([p for p in parameters if p.is_result], len(results))
    if ins is None or outs is None:
      side, have = ("arguments", len(operands)) if ins is None else ("results", len(results))
      want = [p.name for p in parameters if (p.is_operand if ins is None else p.is_result)]
      hint = "" if ins is None else f" from {'out' if self.out is not None else 'like'}"
      raise GateDefinitionError(
        f"{self.label}: expected {len(want)} {side} ({', '.join(want)}), got {have}{hint}"
      )
    for index, (parameter, value) in enumerate(zip(ins, operands, strict=True)):
      if not fits(parameter, value.dtype, len(value.shape)):
        raise GateDefinitionError(
          f"{self.label}: argument {_names.argument(self.name, site.spec, index)}: expected "
          f"{expected_text(parameter)}, got {type_text(value.dtype, value.shape)}"
        )
    for index, (parameter, value) in enumerate(zip(outs, results, strict=True)):
      if not fits(parameter, value.dtype, len(value.shape)):
        raise GateDefinitionError(
          f"{self.label}: result {index} ('{parameter.name}'): expected "
          f"{expected_text(parameter)}, got {type_text(value.dtype, value.shape)} from "
          f"{'out' if self.out is not None else 'like'}"
        )

  # -- programs ----------------------------------------------------------------------------------
  def emission(
    self,
    site: CallSite,
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    levels: Sequence[Level],
  ) -> Any:
    core = [
      jax.ShapeDtypeStruct(aval.shape[sum(mask[i] for _, mask in levels) :], aval.dtype)
      for i, aval in enumerate(avals_in)
    ]
    results = [jax.ShapeDtypeStruct(aval.shape[len(levels) :], aval.dtype) for aval in avals_out]
    variant = self.variant(_types(core, results, site.static))
    self._check_types(variant.parameters, site, core, results)
    declared = {p.name: p for p in variant.parameters}
    attributes: dict[str, Any] = {
      "signature": variant.callee.signature,
      "groups": variant.groups(len(core), len(results)),
    }
    held = {
      name: _attributes.for_program(value, declared[name].dtype)
      for name, value in site.static
      if name in declared
    }
    if held:
      attributes["attributes"] = held
    return variant.callee, _runtime.KERNEL_TARGET, attributes

  def on_host(self, out: Any, /, *args: Any, **static: Any) -> None:
    operands, results = jax.tree.leaves(args), jax.tree.leaves(out)
    values = tuple(sorted(static.items()))
    variant = self.variant(_types(operands, results, values))
    declared = {p.name: p for p in variant.parameters}
    held = {
      name: _attributes.for_runtime(value, declared[name].dtype)
      for name, value in values
      if name in declared
    }
    arrays = [np.ascontiguousarray(x).reshape(np.shape(x)) for x in operands]
    try:
      variant.callee.call(arrays, results, variant.groups(len(arrays), len(results)), held)
    except ValueError as error:
      raise_kept(error)
      raise


def _types(operands: Sequence[Any], results: Sequence[Any], static: Static) -> CallTypes:
  return CallTypes(
    tuple((np.dtype(x.dtype), len(x.shape)) for x in operands),
    tuple((np.dtype(x.dtype), len(x.shape)) for x in results),
    static,
  )


def _expand(parameters: Sequence[Parameter], count: int) -> list[Parameter] | None:
  """One parameter for each of `count` arrays; None where they don't fit."""
  variadic = sum(p.kind in (Kind.INS, Kind.OUTS) for p in parameters)
  extra = count - len(parameters)
  if variadic > 1 or (variadic == 0 and extra != 0) or (variadic == 1 and extra < -1):
    return None
  expanded: list[Parameter] = []
  for parameter in parameters:
    times = extra + 1 if parameter.kind in (Kind.INS, Kind.OUTS) else 1
    expanded.extend([parameter] * times)
  return expanded


def undefined(name: str) -> bool:
  """The runtime's hook: defines a variant that a loaded program names."""
  base, bracket, key = name.partition("[")
  define = getattr(_names.get(base), "define_variant", None)
  return define is not None and define(key.removesuffix("]") if bracket else "")
