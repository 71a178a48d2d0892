# SPDX-License-Identifier: Apache-2.0
"""Kernels with code for the CPU: their variants, and the calls of these in programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._call import shapes
from callgate._call.site import Backend, Call, CallSite, Emission
from callgate._core import registry, static_values
from callgate._core.dtypes import dtype_code
from callgate._core.failures import raise_kept
from callgate._kernel import launch
from callgate._kernel.callee import KernelCallee
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import STATIC, Parameter, check_types
from callgate._kernel.variants import Function, Static, Variant
from callgate._runtime import targets


class CpuKernel(KernelCallee):
  """A kernel that is compiled, or found, for the types of a call; see `Kernel`."""

  def __init__(
    self, name: str, signature: Iterable[Parameter] | None, options: KernelOptions
  ) -> None:
    self._variants: dict[str, Variant] = {}  # set before other threads find the kernel by its name
    super().__init__(name, signature, options)
    self._turn: _callgate.KernelTurn | None = None if self.thread_safe else _callgate.KernelTurn()

  def variant_key(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> str:
    """Returns the key of the variant for a call's arrays, or their types, and static values.

    It has everything that `compile` needs; "" for a kernel with one variant for all calls.
    """
    return ""

  def compile(self, key: str) -> Function:
    """Returns the function of a variant; raises GateDefinitionError for an impossible call."""
    raise NotImplementedError

  def define_variant(self, key: str) -> bool:
    if key.startswith(launch.PREFIX):
      return super().define_variant(key)
    self.variant(key)
    return True

  def variant(self, key: str) -> Variant:
    """Returns the variant of a key, compiled at its first use."""
    if known := self._variants.get(key):
      return known
    with self.defining:  # so that concurrent traces get the same variant
      if key not in self._variants:
        function = self.compile(key)
        known = function.parameters
        name = f"{self.name}[{key}]" if key else self.name
        registry.await_free(name)
        callee = _callgate.Kernel(
          name,
          function.address,
          [(int(p.kind), 0 if p.dtype is None else dtype_code(p.dtype), p.rank) for p in known],
          [p.name for p in known],
          user_data=function.user_data,
          thread_safe=self.thread_safe,
          repeatable=self.effect == "pure",
          on_stream=function.on_stream,
          keep=function.keep,
          turn=None if self.thread_safe else self.turn(function),
        )
        self._variants[key] = Variant(callee, known)
      return self._variants[key]

  def rename(self, name: str) -> None:
    super().rename(name)
    with self.defining:
      for variant in self._variants.values():
        variant.callee.give_up_name()
      self._variants.clear()

  def turn(self, function: Function) -> _callgate.KernelTurn | None:
    """Returns the lock of calls, shared by all variants; None if the kernel is thread-safe."""
    return self._turn

  def check_types(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> None:
    values = dict(site.static)
    for parameter in self.checked(site, operands, results).parameters.of(STATIC):
      if parameter.name in values:
        parameter.freeze(
          self.label, values[parameter.name]
        )  # raises if a template's value doesn't fit

  def checked(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> Variant:
    """Returns the variant for one lane of a call; raises unless its arrays fit."""
    variant = self.variant(self.variant_key(operands, results, site.static))
    check_types(self, variant.parameters, site, operands, results)
    return variant

  def held(
    self, variant: Variant, operands: Sequence[Any], results: Sequence[Any], static: Static,
    form: Callable[..., Any],
  ) -> dict[str, Any]:  # fmt: skip
    """Returns a call's static values for the variant, in a form of `static_values`."""
    return variant.held(static, form)

  def backend(self, platform: str) -> Backend:
    return self.emission if platform == "cpu" else super().backend(platform)

  def emission(self, call: Call) -> Emission:
    """Returns the attributes of a call in a program."""
    if self.vmap == "grid" and call.whole is not None:  # loops over its lanes
      call = dataclasses.replace(call, levels=(*call.levels, call.whole), whole=None)
    core, results = launch.lane(call.operands, call.results, [mask for _, mask in call.levels])
    variant = self.checked(call.site, core, results)
    groups = np.array(variant.parameters.groups(len(core), len(results)), np.int64)
    attributes: dict[str, Any] = {"signature": variant.callee.signature, "groups": groups}
    if held := self.held(variant, core, results, call.site.static, static_values.for_program):
      attributes["attributes"] = held
    return Emission(variant.callee, targets.KERNEL_TARGET, attributes, call)

  def on_host(self, out: Any, /, *args: Any, **static: Any) -> None:
    operands, results = jax.tree.leaves(args), jax.tree.leaves(out)
    values = tuple(sorted(static.items()))
    variant = self.variant(self.variant_key(operands, results, values))
    held = self.held(variant, operands, results, values, static_values.for_runtime)
    arrays = [np.ascontiguousarray(x).reshape(np.shape(x)) for x in operands]
    try:
      groups = variant.parameters.groups(len(arrays), len(results))
      variant.callee.call(arrays, results, groups, held)
    except ValueError as error:
      raise_kept(error)
      raise

  def batch_loop(self, size: int, batched: Sequence[bool], *args: Any, **static: Any) -> Any:
    """Makes one call for all lanes of a loop over elements, which get one more leading axis."""
    lanes = [jax.ShapeDtypeStruct(x.shape[b:], x.dtype) for x, b in zip(args, batched, strict=True)]
    core, moved = jnp.broadcast_shapes(*(lane.shape for lane in lanes)), list(args)
    for i, (x, lane) in enumerate(zip(args, lanes, strict=True)):
      if i in self.aliases:
        moved[i] = jnp.broadcast_to(x, (size, *core))  # memory for each lane
      elif batched[i]:
        moved[i] = x.reshape(size, *(1,) * (len(core) - len(lane.shape)), *lane.shape)
    frozen = {p.name: p.freeze(self.label, static[p.name]) for p in self.signature.of(STATIC)}
    held: Static = tuple(sorted({**static, **frozen}.items()))
    tree = jax.tree.structure((args, {}))
    types, out_tree = shapes.result_types(self, tree, lanes, held)
    results = tuple(((size, *shape), dtype) for shape, dtype in types)
    out = self.bind(CallSite(tree, out_tree, held, results), moved)
    return out, jax.tree.map(lambda _: True, out)
