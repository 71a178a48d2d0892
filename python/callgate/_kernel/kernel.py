"""Kernels: native functions that compiled JAX programs call, with no Python at run time.

`Kernel` is what `callgate.cpp`, `library`, `cfunc`, `numba` and `elementwise` return. A kernel is
one native function, or a family of them: templates and Numba functions are compiled for the types
of a call, as *variants* that programs name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from callgate._call import derivatives, shapes
from callgate._call.operation import Operation
from callgate._call.options import Vmap
from callgate._call.site import Backend, CallSite
from callgate._core import options as check
from callgate._core import registry, static_values
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._core.signatures import places
from callgate._kernel import parameters as _parameters
from callgate._kernel import program
from callgate._kernel.benchmark import BenchmarkResult, benchmark
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import Parameter
from callgate._kernel.variants import Static


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
    self, name: str, signature: Sequence[Parameter] | None, options: KernelOptions
  ) -> None:
    """See the functions that make kernels.

    `signature` are the parameters as far as they are known before a call; None for a function that
    takes any number of arrays, and static values by any keyword. `options.name` is not looked at.
    """
    check.name("kernel", name)
    if "[" in name or "]" in name:
      raise GateDefinitionError(
        f"kernel '{name}': expected a name without brackets, which mark a kernel's variants"
      )
    super().__init__(name, options.checked(f"kernel '{name}'", grid=True))
    self.thread_safe = check.boolean(self.label, "thread_safe", options.thread_safe)
    self.signature = None if signature is None else tuple(signature)
    self.defining = threading.RLock()
    if self.signature is not None:
      self.parameters = tuple(p.name for p in self.signature if p.is_operand)
      self.aliases.update(_parameters.inout_aliases(self.label, self.signature))
      self.linear = _parameters.linear_operands(self.label, self.linear, self.signature)
    if registry.get(name) is not None:
      raise ValueError(
        f"callgate: the name '{name}' is taken by another live gate or kernel; choose another "
        "name=, or drop the other one and the programs that call it"
      )
    registry.register(self.name, self)

  # -- platforms ---------------------------------------------------------------------------------
  def backend(self, platform: str) -> Backend:
    if platform == "cuda" and self.cuda is not None:
      return functools.partial(program.emission, self, self.cuda)
    only = f"{self.label}: expected a program for %s, which is all that the kernel has code for;"
    if platform == "cuda":
      raise GateDefinitionError(
        f"{only % 'the CPU'} got one for CUDA. callgate.cuda makes kernels for CUDA, and "
        "callgate.cpp ones for both with cuda_source="
      )
    raise GateDefinitionError(
      f"{only % 'platform cuda'} got one for platform {platform}. callgate.cpp(source, "
      "cuda_source=...) makes kernels for both, and jax.lax.platform_dependent chooses between "
      "functions"
    )

  def define_variant(self, key: str) -> bool:
    """Makes the variant that a program from elsewhere names; False where it isn't one of ours."""
    if self.cuda is None or not key.startswith(program.PREFIX):
      return False
    return program.define(self, self.cuda, key.removeprefix(program.PREFIX))

  def retile(
    self,
    held: dict[str, Any],
    lanes: Sequence[str],
    operands: Sequence[tuple[tuple[int, ...], Any]],
    results: Sequence[tuple[tuple[int, ...], Any]],
    target: str,
  ) -> str:
    """What XLA's partitioner asks of a call on CUDA, whose grid depends on shapes."""
    assert self.cuda is not None  # which made the call
    return program.retile(self, self.cuda, held, lanes, operands, results, target)

  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap:
    del site, mask, lanes
    return "broadcast" if self.vmap == "grid" else self.vmap

  # -- files -------------------------------------------------------------------------------------
  def saved_form(self) -> dict[str, Any] | None:
    """What `callgate.save_kernels` writes down of it; None for a kernel that can't travel.

    "kind" names a function given to `files.register_kind` that makes the kernel again, of "name"
    and whatever it needs: JSON's types, tuples and bytes. What spares it work, compiled code, is
    under "compiled"; forms that differ in nothing else are those of one kernel.
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
    operands, static = self._arguments(args, kwargs)
    return derivatives.apply(self, self.rules, operands, {}, static)

  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    """A call's operands, in the order of the parameters, and its static values, frozen."""
    if self.signature is None:
      arrays, static = shapes.split_static(self.label, kwargs)
      return shapes.to_positional(self, args, arrays)[0], static
    given = [p for p in self.signature if p.is_given]
    values = _parameters.named_arguments(self.label, given, args, kwargs)
    arrays = [p for p in given if p.is_operand]
    operands = [_parameters.as_operand(self.label, p, values[p.name]) for p in arrays]
    for parameter, value in zip(arrays, operands, strict=True):
      _parameters.check_operand(self.label, parameter, value)
    static = [(p.name, p.freeze(self.label, values[p.name])) for p in given if p.is_static]
    return tuple(operands), tuple(sorted(static))

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
    placed, rest = list[Any](), list(args)
    if values and not known and len(positional) == len(ordered) > len(args):
      placed = [rest.pop(0) if p.is_operand else values[p.name] for p in ordered]
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
    return benchmark(self, *self._arguments(args, kwargs), seconds)

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    self.backend("cpu")  # raises: kernels with code for the CPU have an `on_host`
