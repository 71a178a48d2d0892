# SPDX-License-Identifier: Apache-2.0
"""Kernels' cores: the objects that programs, traces and rules refer to.

A template or a Numba function is a family of functions, compiled for the types of calls, as
*variants*.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from callgate._call import shapes
from callgate._call.operation import Operation
from callgate._call.options import Vmap
from callgate._call.site import Backend, CallSite
from callgate._core import options as check
from callgate._core import registry, static_values
from callgate._core.errors import GateDefinitionError
from callgate._core.signatures import places
from callgate._kernel import launch
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import (
  GIVEN,
  OPERANDS,
  RESULTS,
  Kind,
  Parameter,
  Signature,
  arguments,
  check_types,
  refuse_packed,
)
from callgate._kernel.source import TemplateParameter
from callgate._kernel.variants import Given, Static, from_json
from callgate._runtime import targets

Types = Sequence[tuple[tuple[int, ...], Any]]  # shapes and dtypes


class KernelCallee(Operation):
  """The core of a kernel.

  Attributes:
    parameters: names of the array arguments.
    thread_safe: the option of the kernel.
    loaded: True if the kernel comes from a file of `callgate.save_kernels`.
  """

  kind = "kernel"
  loaded = False
  arrays = "native"
  # Runs the kernel on CUDA devices, if it has code for them.
  cuda: launch.CudaPart | None = None
  linear: bool | tuple[int, ...]
  _template: tuple[
    TemplateParameter, ...
  ] = ()  # its C++ template parameters, which calls may pass by keyword

  def __init__(
    self, name: str, signature: Iterable[Parameter] | None, options: KernelOptions
  ) -> None:
    # `signature` has the parameters known before a call. It is None for a function that takes any
    # number of arrays, and static values by any keyword. `options.name` is ignored.
    label = f"kernel '{name}'"
    check.name("kernel", name)
    if "[" in name or "]" in name:
      mark = "brackets, which mark a kernel's variants"
      raise GateDefinitionError(f"{label}: expected a name without {mark}")
    options = options.checked(label)
    super().__init__(name, options)
    self.thread_safe = options.thread_safe
    self.takes_any = signature is None
    self.signature = Signature(signature or ())
    self.defining = threading.RLock()
    if not self.takes_any:
      inouts = self.signature.of((Kind.INOUT,))
      if inouts and self.signature.of((Kind.INS, Kind.OUTS)):
        raise GateDefinitionError(f"{label}: InOut can't be combined with Ins or Outs, got both")
      operands, results = self.signature.of(OPERANDS), self.signature.of(RESULTS)
      self.parameters = tuple(p.name for p in operands)
      self.aliases.update({operands.index(p): results.index(p) for p in inouts})
      if not isinstance(self.linear, bool):  # users count all arguments, rules only arrays
        given = enumerate(self.signature.of(GIVEN))
        arrays = {position: p for position, p in given if p in operands}
        if wrong := [position for position in self.linear if position not in arrays]:
          known = ", ".join(f"{position} ('{p.name}')" for position, p in arrays.items())
          expected = f"expected positions of array arguments, {known}"
          raise GateDefinitionError(f"{label}: linear: {expected}; got {wrong[0]}")
        self.linear = tuple(operands.index(arrays[position]) for position in self.linear)
    with registry.naming(name, self._replaces):
      registry.register(name, self)

  # -- platforms ---------------------------------------------------------------------------------
  def backend(self, platform: str) -> Backend:
    cuda = platform == "cuda"
    if cuda and self.cuda is not None:
      return functools.partial(launch.emission, self, self.cuda)
    own, got = ("the CPU", "CUDA") if cuda else ("platform cuda", f"platform {platform}")
    raise GateDefinitionError(
      f"{self.label}: the kernel has code only for {own}, got a program for {got}. Use "
      "callgate.cpp(source, cuda_source=...) for both platforms, callgate.cuda for CUDA, or "
      "jax.lax.platform_dependent to choose between functions"
    )

  def rename(self, name: str) -> None:
    self.name = name
    if self.cuda is not None:  # further programs make variants again, under the new name
      for handle in self.cuda.cuda_variants.values():
        handle.give_up_name()
      self.cuda.cuda_variants.clear()

  def define_variant(self, key: str) -> bool:
    """Makes the variant that a program from another process names; False if the key is not ours."""
    part = self.cuda
    if part is None or not key.startswith(launch.PREFIX):
      return False
    key = key.removeprefix(launch.PREFIX)
    images = () if key in part.cuda_variants else part.images(key, launch.capabilities(part))
    if images is not None:
      launch.variant(self, part, key, images)
    return images is not None

  def retile(
    self, held: dict[str, Any], lanes: Sequence[str], operands: Types, results: Types, target: str
  ) -> str:
    """Writes the plan for a call's tiles into its attributes, `held`, and returns their target.

    `lanes` are masks of the batch levels that the runtime loops over, outermost first.
    """
    part = self.cuda
    assert part is not None  # it made the call
    call = self.tile(part, held, lanes, operands, results)
    plan = launch.planned(self, part, call)
    held["plan"] = launch.encode(self.label, plan)
    held["name"] = launch.variant(self, part, plan.key, plan.images).name
    # A launch that only some devices run reads the device's number, which a graph must not do.
    return targets.KERNEL_SCRATCH_TARGET if "0" in held.get("shards", "") else target

  def tile(
    self, part: launch.CudaPart, held: dict[str, Any], lanes: Sequence[str], operands: Types,
    results: Types,
  ) -> launch.CudaCall:  # fmt: skip
    """Returns one lane of a call on a tile, from the call's attributes."""
    about, batch = json.loads(held["tiles"]), None
    if about["grid"]:
      batch, lanes = results[0][0][len(lanes)], [*lanes, "1" * len(operands)]
    tiles, outs = ([jax.ShapeDtypeStruct(*t) for t in side] for side in (operands, results))
    types = launch.lane(tiles, outs, [[digit == "1" for digit in mask] for mask in lanes])
    static = {name: from_json(value) for name, value in about["static"].items()}
    return launch.CudaCall(*types, static, batch, launch.capabilities(part))

  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap:
    return "broadcast" if self.vmap == "grid" else self.vmap

  # -- files -------------------------------------------------------------------------------------
  def saved_form(self) -> dict[str, Any] | None:
    """Returns the form for `callgate.save_kernels`; None for a kernel that can't be saved.

    "kind" selects the module in `files` whose `restore` makes the kernel again. The form has JSON's
    types, tuples and bytes. Forms that differ only in "compiled", which saves work, are of one
    kernel.
    """

  def _replaces(self, owner: Any) -> bool:
    """True if `owner` is the same kernel, from a file."""
    if not getattr(owner, "loaded", False):
      return False
    forms = [kernel.saved_form() or {"kind": None} for kernel in (owner, self)]
    return {**forms[0], "compiled": 0} == {**forms[1], "compiled": 0}

  def take_compiled(self, compiled: Any) -> None:
    """Takes "compiled" of the same kernel's form in a file; by default ignores it."""

  # -- calling -----------------------------------------------------------------------------------
  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in site.results]
    refuse_packed(self.label, structs, results)
    self.check_types(site, structs, results)

  def check_types(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Raises unless the arrays of one lane fit the parameters that are known before a call."""
    if not self.takes_any:
      check_types(self, self.signature, site, operands, results)

  def given(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], dict[str, Any], Static]:
    operands, static = self._arguments(args, kwargs)
    return operands, {}, static

  def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Returns a call's operands, in the order of the parameters, and its frozen static values."""
    if self.takes_any:
      arrays, static = shapes.split_static(self.label, kwargs)
      return shapes.to_positional(self, args, arrays), static
    given = [p for p in self._template if p.name in kwargs]
    bound = {p.name: p.frozen(self.label, kwargs.pop(p.name)) for p in given}
    operands, static = arguments(self.label, self.signature, args, kwargs)
    return operands, tuple(sorted({**dict(static), **bound}.items()))

  # -- rules and references ----------------------------------------------------------------------
  def call_rule(
    self,
    function: Callable[..., Any],
    lead: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Static,
  ) -> Any:
    """Passes static values by the function's parameter names, or by places in the signature."""
    values = {name: static_values.thaw(value) for name, value in static}
    positional, known = places(function, len(lead), values)
    ordered = self.signature.of(GIVEN)
    placed, rest = list[Any](), list(args)
    if values and not known and len(positional) == len(ordered) > len(args):
      placed = [rest.pop(0) if p.kind in OPERANDS else values[p.name] for p in ordered]
      return function(*lead, *placed, **kwargs)
    for name in positional:
      if not rest:
        break
      placed.append(known.pop(name) if name in known else rest.pop(0))
    return function(*lead, *placed, *rest, **kwargs, **known)

  def reference(self, *args: Any, **kwargs: Any) -> Any:
    assert self.like is not None
    operands, static = self._arguments(args, kwargs)
    return self.call_rule(self.like, (), operands, {}, static)

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    self.backend("cpu")  # raises, because CPU kernels override `on_host`
