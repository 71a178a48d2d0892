# SPDX-License-Identifier: Apache-2.0
"""The gates behind `callgate.torch`: a function's gate, and gates of its transforms.

A gate's *path* is the transforms around the function (`calls.Step`), innermost first: empty for the
function, `(("vjp", (0,)),)` for its gradient. Each gate is a *part* of the function's gate, the
root, and has the name `root[path]` in programs. So a process can make it without having traced the
call. A derivative's gate takes `(args, kwargs, vectors)`, returns a tuple, and is linear in the
vectors.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.options import Vmap
from callgate._call.primitive import bind
from callgate._call.site import BoundCall, CallSite, TangentCall
from callgate._core import registry
from callgate._core.dtypes import is_inexact
from callgate._core.errors import GateDefinitionError
from callgate._core.levels import Level
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions

Path = tuple[tuple[str, tuple[int, ...]], ...]
_STEP = re.compile(r"(?:jvp|vjp|vmap):\d+(?:,\d+)*")  # part of a name: "vjp:0,2/vmap:1"
_lock = threading.RLock()  # two threads may trace the first derivative of a function at once
_VECTORS = 2  # the position of a derivative's tangents or cotangents


class TorchCallee(GateCallee):
  """The gate of a PyTorch function (the root) or of a transform of it; see this module's text."""

  traits = GateCallee.traits.but(autograd=True, splits=False)  # derivatives are of all leaves

  def __init__(
    self, root: TorchCallee | None, path: Path, call: Callable[..., Any], options: GateOptions
  ) -> None:
    self._parts: dict[Path, TorchCallee] = {}  # set before other threads find the gate by its name
    super().__init__(call, options)
    self.root: TorchCallee = root if root is not None else self
    self.part_of = root
    self.path, self._options = path, options
    self._batchings: dict[Any, bool] = {}  # True if one call takes all lanes

  # The root has these.
  run: Any
  method = "auto"
  random = False
  drawn: str | None = None

  def frozen(self, args: Any) -> frozenset[int]:
    """Returns the arguments' leaves without a derivative, as flat positions."""
    del args
    return frozenset()

  # -- parts -------------------------------------------------------------------------------------
  def rename(self, name: str) -> None:
    super().rename(name)
    for path, part in self._parts.items():
      registry.rename(part, f"{name}[{_key(path)}]")

  def part(self, *steps: tuple[str, tuple[int, ...]]) -> TorchCallee:
    from callgate._torch import calls

    root, path = self.root, (*self.path, *steps)
    with _lock:
      if path in root._parts:
        return root._parts[path]
      key = _key(path)
      call = calls.caller(calls.transformed(root.run, path, random=root.random), path)
      call.__name__ = call.__qualname__ = key
      options = dataclasses.replace(  # the user's vmap rule is for the function itself
        root._options, name=f"{root.name}[{key}]", out=_known, like=None, gradient=None,
        effect="pure" if any(kind != "vmap" for kind, _ in path) else root.effect,
        linear=_VECTORS if path[-1][0] != "vmap" else False, aliases=None, vmap="each",
      )  # fmt: skip
      made = root._parts[path] = TorchCallee(root, path, call, options)
    return made

  def define_variant(self, key: str) -> bool:
    """Makes the part that a program from another process names; False if the key is no path."""
    if not all(map(_STEP.fullmatch, key.split("/"))):
      return False
    steps = (text.split(":") for text in key.split("/"))
    self.part(*((kind, tuple(map(int, where.split(",")))) for kind, where in steps))
    return True

  # -- the primitive's questions -----------------------------------------------------------------
  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    from callgate._torch import calls

    for index, dtype in enumerate(np.dtype(struct.dtype) for struct in structs):
      if calls.torch_dtype(dtype) is None:
        what = f"{self.label}: argument {registry.argument(self.name, site.spec, index)}"
        advice = f"PyTorch doesn't support {dtype.name}; convert it before the call"
        raise GateDefinitionError(f"{what}: {advice}")

  def tangent_call(self, site: CallSite, moved: Sequence[int]) -> TangentCall:
    root = self.root
    if root.style != "return":
      why = f"style='{root.style}' writes results, which autograd doesn't track"
      expected = "Use style='return', or define a rule by defjvp, defvjp or like="
      raise GateDefinitionError(f"{root.label} has no derivative: {why}. {expected}")
    if root.drawn is not None:
      why = f"({root.drawn}), and its derivative runs it again with other numbers"
      expected = "Pass random=True, and rng=key, a JAX key, in calls; or call module.eval()"
      raise GateDefinitionError(f"{root.label} draws random numbers {why}. {expected}")
    args, kwargs = jax.tree.unflatten(site.in_tree, range(site.in_tree.num_leaves))
    frozen = root.frozen(_of_root(self.path, args, kwargs)[0])
    wanted = tuple(i for i in moved if i not in frozen)
    outputs = tuple(i for i, (_, dtype) in enumerate(site.results) if is_inexact(dtype))
    if not wanted or not outputs:
      return TangentCall(self, site, (), ())
    types = tuple(site.results[i] for i in outputs)
    made = _site_of_part(site, args, kwargs, len(wanted), types)
    return TangentCall(self.part(("jvp", wanted)), made, wanted, outputs)

  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap:
    if self.root.method == "each" or site.by_jax or self.style != "return":
      return "each"
    if self.root.method == "whole":
      return "whole"
    key = (site, tuple(mask), tuple((x.shape, np.dtype(x.dtype)) for x in lanes))
    if key not in self._batchings:
      self._batchings[key] = self._takes_vmap(site, mask, lanes)
    return "whole" if self._batchings[key] else "each"

  def _takes_vmap(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> bool:
    from callgate._torch import calls

    batched = _of_root(self.path, *jax.tree.unflatten(site.in_tree, mask))[1]
    if self.effect != "pure" or (self.root.random and batched.get(calls.RNG)):
      return False  # one call for each lane, with its own key
    path = (*self.path, _vmap(mask))
    if any(kind == "jvp" for kind, _ in path):
      calls.prepare_forward_mode()  # not on tensors without values
    run = calls.transformed(self.root.run, path, random=self.root.random)
    pairs = zip(lanes, mask, strict=True)
    structs = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) if flag else x for x, flag in pairs]
    args, kwargs = jax.tree.unflatten(site.in_tree, structs)
    return calls.takes_vmap(run, args, {**kwargs, **dict(site.static)})

  def batched(self, whole: Level | None) -> GateCallee:
    return self if whole is None else self.part(_vmap(whole[1]))

  def transpose_call(
    self, site: CallSite, cotangents: Sequence[Any], flat: Sequence[Any], linear: Sequence[int]
  ) -> Sequence[Any]:
    """Returns cotangents of the vectors at positions `linear` of a derivative's flat arguments."""
    kind, wanted = self.path[-1]
    (args, kwargs, vectors), _ = jax.tree.unflatten(site.in_tree, range(len(flat)))
    first = len(flat) - len(vectors)
    kept = [i - first for i in linear]
    step, taken = ("jvp", wanted), flat[first:]
    if kind == "jvp":
      step, taken = ("vjp", tuple(wanted[i] for i in kept)), [flat[i] for i in linear]
    part = self.root.part(*self.path[:-1], step)
    types = tuple((tuple(jnp.shape(x)), np.dtype(x.dtype)) for x in taken)
    made = _site_of_part(site, args, kwargs, len(cotangents), types)
    found = bind(*flat[:first], *cotangents, call=BoundCall(part, made))
    return found if kind == "jvp" else [found[i] for i in kept]


def _site_of_part(
  site: CallSite, args: Any, kwargs: Any, count: int, types: tuple[Any, ...]
) -> CallSite:
  ins, outs = ((args, kwargs, (0,) * count), {}), (0,) * len(types)
  in_tree, out_tree = jax.tree.structure(ins), jax.tree.structure(outs)
  return dataclasses.replace(site, in_tree=in_tree, out_tree=out_tree, results=types)


def _key(path: Path) -> str:
  """Returns a path as part of a name."""
  return "/".join(f"{kind}:{','.join(map(str, positions))}" for kind, positions in path)


def _of_root(path: Path, args: Any, kwargs: Any) -> tuple[Any, Any]:
  """Returns the function's own arguments from a derivative's."""
  for kind, _ in path:
    if kind != "vmap":
      args, kwargs, _ = args
  return args, kwargs


def _vmap(mask: Sequence[bool]) -> tuple[str, tuple[int, ...]]:
  return "vmap", tuple(i for i, flag in enumerate(mask) if flag)


def _known(*args: Any, **kwargs: Any) -> Any:
  raise AssertionError("the types of a transform's results are known from its call site")
