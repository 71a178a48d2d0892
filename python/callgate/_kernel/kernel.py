"""Kernels: native functions that compiled JAX programs call, with no Python at run time.

`Kernel` is what `callgate.cpp`, `library`, `cfunc`, `numba` and `elementwise` return. A kernel is
one native function, or a family of them: templates and Numba functions are compiled for the types
of a call, as *variants* that programs name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from callgate import _callgate
from callgate._call import derivatives, shapes
from callgate._call.operation import Effect, Operation, Vmap
from callgate._call.site import CallSite
from callgate._core import options, registry, static_values
from callgate._core.encoding import Level
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred, raise_kept
from callgate._core.signatures import places
from callgate._kernel import program
from callgate._kernel.benchmark import BenchmarkResult, benchmark
from callgate._kernel.parameters import (
  Parameter,
  as_operand,
  check_argument,
  check_types,
  inout_aliases,
  leaves_of,
  linear_operands,
  named_arguments,
  refuse_packed,
)
from callgate._kernel.variants import CallTypes, Function, Static, Variant
from callgate._runtime import targets


class Kernel(Operation):
  """A native function as a JAX function; called like any JAX function.

  Made by `callgate.cpp`, `callgate.cuda`, `callgate.library`, `callgate.cfunc`, `callgate.numba`
  and `callgate.elementwise`.

  Attributes:
    name: what compiled programs call it by; unique among the live ones of the process.
    parameters: names of the arguments that are arrays.
    effect, vmap, thread_safe: as given when it was made.
  """

  kind = "kernel"
  arrays = "native"
  # What runs it on CUDA devices, for kernels that have code for them.
  cuda: program.CudaPart | None = None

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
      out: as for `callgate.gate`; also all that follow.
      like: a JAX function with the same meaning.
      effect: "pure", "io" or "ordered".
      aliases: results that share an operand's memory.
      vmap: "each", "whole", "broadcast", "grid" (of kernels for CUDA: the lanes are the grid's z
        axis; on the CPU as "each") or a rule.
      sharding: which dimensions may stay split over devices.
      linear: positions of the arguments in which it is linear.
      gradient: "finite-difference" or None.
      thread_safe: calls may run at once, on several devices and threads, and so may lanes of a
        vmap. By default they take turns.
    """
    options.name("kernel", name)
    if "[" in name or "]" in name:
      raise GateDefinitionError(
        f"kernel '{name}': expected a name without brackets, which mark a kernel's variants"
      )
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
    self.thread_safe = options.boolean(self.label, "thread_safe", thread_safe)
    self._turn: _callgate.KernelTurn | None = None if self.thread_safe else _callgate.KernelTurn()
    self.signature = None if signature is None else tuple(signature)
    self._variants: dict[str, Variant] = {}
    self.cuda_variants: dict[str, _callgate.CudaKernel] = {}
    self.defining = threading.RLock()
    if self.signature is not None:
      self.parameters = tuple(p.name for p in self.signature if p.is_operand)
      self.aliases.update(inout_aliases(self.label, self.signature))
      self.linear = linear_operands(self.label, self.linear, self.signature)
    taken = registry.get(name)
    if taken is not None:
      raise ValueError(
        f"callgate: the name '{name}' is taken by another live gate or kernel; choose another "
        "name=, or drop the other one and the programs that call it"
      )
    registry.register(self.name, self)

  # -- variants ----------------------------------------------------------------------------------
  def types_of(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> CallTypes:
    """What a call's variant is chosen by, from its arrays, or their types, and static values."""
    return CallTypes(
      tuple((np.dtype(x.dtype), len(x.shape)) for x in operands),
      tuple((np.dtype(x.dtype), len(x.shape)) for x in results),
      static,
    )

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
    known = self._variants.get(key)
    return known if known is not None else self._define(key, types)

  def retile(
    self,
    held: dict[str, Any],
    lanes: Sequence[str],
    operands: Sequence[tuple[tuple[int, ...], Any]],
    results: Sequence[tuple[tuple[int, ...], Any]],
    target: str,
  ) -> str:
    """What XLA's partitioner asks of a call on CUDA, whose grid depends on shapes."""
    return program.retile(self, held, lanes, operands, results, target)

  def define_variant(self, key: str) -> bool:
    """Makes the variant that a program from elsewhere names; False where it isn't one of ours."""
    if key.startswith(program.PREFIX):
      return program.define(self, key.removeprefix(program.PREFIX))
    if key not in self._variants:
      self._define(key, self.types_of_key(key))
    return True

  def _define(self, key: str, types: CallTypes) -> Variant:
    with self.defining:  # threads that trace at once get the same variant
      if key not in self._variants:
        self._variants[key] = self._defined(key, self.compile(types)[1])
      return self._variants[key]

  def _defined(self, key: str, function: Function) -> Variant:
    callee = _callgate.Kernel(
      f"{self.name}[{key}]" if key else self.name,
      function.address,
      [p.code for p in function.parameters],
      [p.name for p in function.parameters],
      user_data=function.user_data,
      thread_safe=self.thread_safe,
      repeatable=self.effect == "pure",
      keep=function.keep,
      turn=None if self.thread_safe else self.turn(function),
    )
    return Variant(callee, function.parameters)

  def turn(self, function: Function) -> _callgate.KernelTurn | None:
    """What calls take one at a time unless the kernel is thread-safe; its variants share it."""
    del function
    return self._turn

  # -- files -------------------------------------------------------------------------------------
  def saved_form(self) -> dict[str, Any] | None:
    """What `callgate.save_kernels` writes down of it; None for a kernel that can't travel.

    The form holds "kind", which names a function given to `kernel_files.register_kind` that makes
    the kernel again, "name", and whatever that function needs: JSON's types, tuples and bytes.
    What spares it work, compiled code, is under "compiled"; forms that differ in nothing else are
    those of one kernel.
    """
    return None

  def take_compiled(self, compiled: Any) -> None:
    """Takes the "compiled" of the same kernel's form in a file; by default it needs none."""

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
    return self.call_split(*self.split_call(args, kwargs))

  def call_split(self, operands: tuple[Any, ...], static: Static) -> Any:
    """Calls it with what `split_call` gave."""
    return derivatives.apply(self, self.rules, operands, {}, static)

  def split_call(
    self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    """A call's operands, in the order of the parameters, and its static values, frozen."""
    return self._arguments(args, dict(kwargs))

  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    if self.signature is None:
      arrays, static = shapes.split_static(self.label, kwargs)
      return shapes.to_positional(self, args, arrays)[0], static
    given = [p for p in self.signature if p.is_given]
    values = named_arguments(self.label, given, args, kwargs)
    operands = [as_operand(self.label, p, values[p.name]) for p in given if p.is_operand]
    for parameter, value in zip((p for p in given if p.is_operand), operands, strict=True):
      for leaf in leaves_of(self.label, parameter, value):
        check_argument(self, parameter, leaf)
    static = [(p.name, p.freeze(self.label, values[p.name])) for p in given if p.is_static]
    return tuple(operands), tuple(sorted(static))

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    """Raises unless the call's arrays are what the kernel takes."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in site.results]
    refuse_packed(self.label, structs, results)
    variant = self.variant(self.types_of(structs, results, site.static))
    self._check_types(variant.parameters, site, structs, results)
    values = dict(site.static)
    for parameter in variant.parameters:
      if parameter.is_static and parameter.name in values:
        parameter.freeze(self.label, values[parameter.name])  # a template's may not fit

  def _check_types(
    self,
    parameters: Sequence[Parameter],
    site: CallSite,
    operands: Sequence[Any],
    results: Sequence[Any],
    *,
    whole: bool = False,
  ) -> None:
    """Raises unless the arrays are what these parameters take; see `parameters.check_types`."""
    check_types(self, parameters, site, operands, results, whole=whole)

  # -- rules and references ----------------------------------------------------------------------
  def call_rule(
    self,
    function: Callable[..., Any],
    lead: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Static,
  ) -> Any:
    """Static values go where the function has their names, or to their places in the signature."""
    values = {name: static_values.thaw(value) for name, value in static}
    positional, known = places(function, len(lead), values)
    ordered = [p for p in self.signature or () if p.is_given]
    if values and not known and len(positional) == len(ordered) > len(args):
      operands = iter(args)
      args = [next(operands) if p.is_operand else values[p.name] for p in ordered]
      return function(*lead, *args, **kwargs)
    placed, rest = list[Any](), list(args)
    for name in positional:
      if not rest:
        break
      placed.append(known.pop(name) if name in known else rest.pop(0))
    return function(*lead, *placed, *rest, **kwargs, **known)

  def reference(self, *args: Any, **kwargs: Any) -> Any:
    assert self.like is not None
    operands, static = self.split_call(args, kwargs)
    return self.call_rule(self.like, (), operands, {}, static)

  def benchmark(self, *args: Any, seconds: float = 0.5, **kwargs: Any) -> BenchmarkResult:
    """Measures calls on real values, prints time, GB/s and the ratio to `like`, if there is one.

    ```python
    import callgate as cg, jax.numpy as jnp

    double = cg.cpp(\"\"\"
      void twice(cg::In<float, 1> x, cg::Out<float, 1> y) {
        for (int64_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i];
      }\"\"\", like=lambda x: 2 * x)

    measured = double.benchmark(jnp.ones(1000), seconds=0.01)
    assert measured.ratio > 0
    ```

    A call is one of the jitted function, with JAX's dispatch (some microseconds); the kernel's and
    the reference's calls take turns, and the fastest of each counts.

    Args:
      *args: as for a call.
      seconds: how long to measure, about.
      **kwargs: as for a call.

    Returns:
      What was measured, also as numbers.
    """
    return benchmark(self, args, kwargs, seconds)

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
    variant = self.variant(self.types_of(core, results, site.static))
    whole = tuple(len(r.shape) for r in results) != tuple(len(shape) for shape, _ in site.results)
    self._check_types(variant.parameters, site, core, results, whole=whole)
    declared = {p.name: p for p in variant.parameters}
    attributes: dict[str, Any] = {
      "signature": variant.callee.signature,
      "groups": variant.groups(len(core), len(results)),
    }
    held = {
      name: static_values.for_program(value, declared[name].dtype)
      for name, value in site.static
      if name in declared
    }
    if held:
      attributes["attributes"] = held
    return variant.callee, targets.KERNEL_TARGET, attributes

  def cuda_emission(
    self,
    site: CallSite,
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    levels: Sequence[Level],
    whole: Level | None,
    devices: int,
  ) -> Any:
    return program.emission(self, site, avals_in, avals_out, levels, whole, devices=devices)

  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap:
    del site, mask, lanes
    return "broadcast" if self.vmap == "grid" else self.vmap

  def on_host(self, out: Any, /, *args: Any, **static: Any) -> None:
    operands, results = jax.tree.leaves(args), jax.tree.leaves(out)
    values = tuple(sorted(static.items()))
    variant = self.variant(self.types_of(operands, results, values))
    declared = {p.name: p for p in variant.parameters}
    held = {
      name: static_values.for_runtime(value, declared[name].dtype)
      for name, value in values
      if name in declared
    }
    arrays = [np.ascontiguousarray(x).reshape(np.shape(x)) for x in operands]
    try:
      variant.callee.call(arrays, results, variant.groups(len(arrays), len(results)), held)
    except ValueError as error:
      raise_kept(error)
      raise
