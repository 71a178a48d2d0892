# SPDX-License-Identifier: Apache-2.0
"""Runs for the gates of `callgate.torch`: a PyTorch function, its derivatives, its batches.

A *run* is `run(functional, args, kwargs)`: it calls the function, or a transform of it, on tensors.
A transform takes a run and returns a run, so transforms nest to any order. There are two ways to
differentiate:

- classical: `torch.autograd.grad`. Forward mode is the transpose of reverse mode.
- functional: `torch.func`, which nests with its forward mode and with `torch.func.vmap`. It rejects
  some functions: old-style `torch.autograd.Function`s, and calls of `torch.autograd.grad` inside.

Runs on torch's fake tensors, which have no values, find the result types, and show if
`torch.func.vmap` supports the function. This module imports torch, so it is imported when the first
function is made.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch._subclasses import fake_tensor  # pyright: ignore[reportMissingImports]
from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

from callgate._core import foreign
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._torch.options import TorchOptions

Tensor = Any
Run = Callable[[bool, tuple[Any, ...], dict[str, Any]], Any]
# ("jvp" | "vjp" | "vmap", positions): the positions are those of the arguments that tangents or
# cotangents belong to, or that have a batch axis.
Step = tuple[str, tuple[int, ...]]
RNG = "rng"  # the keyword that carries the key of a function that draws random numbers
# All threads share torch's random number generator.
_generator_lock = threading.RLock()
# All threads share the levels of torch's forward mode; two threads at once would get zero tangents.
_forward_lock = threading.RLock()


def of_function(function: Callable[..., Any], options: TorchOptions) -> Run:
  """Returns the run of a user's function of pytrees of tensors."""

  def run(functional: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del functional
    own = dict(kwargs)
    seeded = _seeded(own.pop(RNG)) if options.random else contextlib.nullcontext()
    with torch.enable_grad() if options.enable_grad else contextlib.nullcontext(), seeded:
      result = function(*args, **own)
    return jax.tree.map(_as_tensor, result) if options.style == "return" else result

  return run


def _as_tensor(leaf: Any) -> Any:
  """Returns a result's leaf as a tensor; makes tuples of torch's named tuples, unknown to JAX."""
  if isinstance(leaf, torch.Tensor):
    return leaf
  if isinstance(leaf, tuple):
    return tuple(map(_as_tensor, leaf))
  if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
    return torch.as_tensor(leaf)
  got = type(leaf).__qualname__
  raise TypeError(f"result: expected tensors in tuples, lists and dicts, got {got}")


@contextlib.contextmanager
def _seeded(key: Tensor) -> Generator[None]:
  if is_abstract(key):
    yield
    return
  words = bytes(key.detach().cpu().contiguous().view(torch.uint8).tolist())
  with _generator_lock, torch.random.fork_rng(devices=[]):
    seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(seed)
    yield


def is_abstract(tensor: Tensor) -> bool:
  """Returns True if the function runs for its types only, on tensors without values."""
  return isinstance(tensor, fake_tensor.FakeTensor)


def transformed(run: Run, steps: Sequence[Step], *, random: bool) -> Run:
  """Returns the run with transforms around it, innermost first."""
  for kind, positions in steps:
    if kind == "vmap":
      run = _batched(run, positions, "same" if random else "error")
    else:
      run = _derivative(_jvp if kind == "jvp" else _vjp, run, positions)
  return run


def caller(run: Run, steps: Sequence[Step]) -> Callable[..., Any]:
  """Makes the gate's function of a run, with autograd off, and chooses classical or functional."""
  kinds = [kind for kind, _ in steps]
  batched = "vmap" in kinds
  # A single step of reverse mode is fastest, and supports most, with autograd itself.
  classical = batched or kinds in ([], ["vjp"])

  def call(*args: Any, **kwargs: Any) -> Any:
    nonlocal classical
    with torch.no_grad():
      if classical:
        return run(batched, args, kwargs)
      try:
        return run(True, args, kwargs)
      except RuntimeError:  # includes NotImplementedError
        # torch.func rejects the function, or an operation lacks forward mode. If the error is the
        # function's own, it is raised again here.
        result = run(False, args, kwargs)
        classical = True
        return result

  return call


# A run's function of the tensors to differentiate by; its first argument selects torch.func.
Inner = Callable[[bool, Sequence[Tensor]], tuple[Tensor, ...]]


def _derivative(kind: Callable[..., Any], run: Run, wanted: Sequence[int]) -> Run:
  """Returns the run of `(args, kwargs, vectors)`; static keywords stay keywords of the run."""

  def derive(functional: bool, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
    leaves, tree = jax.tree.flatten(args[:2])

    def inner(functional: bool, primals: Sequence[Tensor]) -> tuple[Tensor, ...]:
      own, kwargs = _filled(tree, leaves, wanted, primals)
      results = jax.tree.leaves(run(functional, own, {**kwargs, **static}))
      return tuple(x for x in results if x.is_floating_point() or x.is_complex())

    return kind(functional, inner, [leaves[i] for i in wanted], args[2])

  return derive


def _vjp(
  functional: bool, inner: Inner, primals: Sequence[Tensor], vectors: Sequence[Tensor]
) -> Any:
  """Returns the primals' cotangents in JAX's convention: the conjugates of torch's if complex."""

  def cotangents(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # The dtypes differ if `cast` makes float32 results of float64 ones.
    return tuple(_conj(ct).to(x.dtype) for x, ct in zip(results, vectors, strict=True))

  if functional:
    results, pullback = cast("Any", torch.func.vjp)(lambda *xs: inner(True, xs), *primals)
    return tuple(map(_conj, pullback(cotangents(results))))
  again = torch.is_grad_enabled()  # True inside another derivative
  with torch.enable_grad():
    results = inner(False, primals := _tracked(primals))
    return tuple(map(_conj, _grad(results, primals, cotangents(results), again)))


def _jvp(
  functional: bool, inner: Inner, primals: Sequence[Tensor], vectors: Sequence[Tensor]
) -> Any:
  if functional:
    with _forward_lock:
      prepare_forward_mode()
      run = cast("Any", torch.func.jvp)
      results, tangents = run(lambda *xs: inner(True, xs), tuple(primals), tuple(vectors))
    # torch makes a float64 tangent of a float32 scalar that Python's numbers multiply.
    return tuple(t.to(x.dtype) for x, t in zip(results, tangents, strict=True))
  again = torch.is_grad_enabled()
  with torch.enable_grad():
    results = inner(False, primals := _tracked(primals))
    # The transpose of the transpose: reverse mode is linear in its cotangents u.
    u = [torch.zeros_like(x, requires_grad=True) for x in results]
    return _grad(_grad(results, primals, u, again=True), u, vectors, again)


@functools.cache
def prepare_forward_mode() -> None:
  """Makes torch load its forward mode, and ignores its deprecation warnings."""
  one = torch.ones(())
  with _forward_lock, warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.func.jvp(torch.neg, (one,), (one,))


def _tracked(tensors: Sequence[Tensor]) -> list[Tensor]:
  """Returns new tensors to differentiate by, connected to the graph of the given ones."""
  return [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in tensors]


def _grad(
  results: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], again: bool
) -> tuple[Tensor, ...]:
  """Calls `torch.autograd.grad`; returns zeros for inputs that no result depends on."""
  pairs = [(x, ct) for x, ct in zip(results, cotangents, strict=True) if x.requires_grad]
  if not pairs:
    return tuple(map(torch.zeros_like, inputs))
  xs, cts = zip(*pairs, strict=True)
  return torch.autograd.grad(
    xs, inputs, cts, create_graph=again, allow_unused=True, materialize_grads=True
  )


def _conj(x: Tensor) -> Tensor:
  return x.conj() if x.is_complex() else x


def _batched(run: Run, mask: Sequence[int], randomness: str) -> Run:
  """Returns the run of all lanes at once; the flat arguments in `mask` have a leading axis."""

  def whole(functional: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del functional
    leaves, tree = jax.tree.flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    out_tree: Any = None

    def lane(*tensors: Tensor) -> tuple[Tensor, ...]:
      nonlocal out_tree
      own, keywords = _filled(tree, leaves, where, tensors)
      flat, out_tree = jax.tree.flatten(run(True, own, keywords))
      return tuple(flat)

    axes = tuple(0 if i in mask else None for i in range(len(where)))
    found = torch.func.vmap(lane, axes, randomness=randomness)(*(leaves[i] for i in where))
    return jax.tree.unflatten(out_tree, found)

  return whole


def _filled(tree: Any, leaves: Sequence[Any], where: Sequence[int], tensors: Sequence[Any]) -> Any:
  given = dict(zip(where, tensors, strict=True))
  return jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])


# -- without values ------------------------------------------------------------------------------
def torch_dtype(dtype: np.dtype[Any]) -> Any:
  """Returns torch's dtype of the same name; None if torch lacks it."""
  found = getattr(torch, dtype.name, None)
  return found if isinstance(found, torch.dtype) else None


# Its batching rule assumes contiguous memory without a check, and returns zeros or uninitialized
# memory (torch 2.13: `torch.func.jacrev` of `torch.cdist`).
_WRONG_UNDER_VMAP = "aten::_cdist_backward"


def _run_abstract(
  run: Run, functional: bool, args: Any, kwargs: Any, look: Callable[[Any], None]
) -> Any:
  """Runs on tensors without values for ShapeDtypeStructs; calls `look` before each operation."""

  class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
      look(func)
      return func(*args, **(kwargs or {}))

  def fake(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf
    return torch.empty(tuple(leaf.shape), dtype=torch_dtype(np.dtype(leaf.dtype)))

  # torch logs errors of tensors without values, which the caller gets anyway.
  logger = logging.getLogger("torch._subclasses.fake_tensor")
  before, logger.disabled = logger.disabled, True
  try:
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
      args, kwargs = jax.tree.map(fake, (args, kwargs))
      with Watched(), torch.no_grad():
        return run(functional, args, kwargs)
  finally:
    logger.disabled = before


def result_types(
  label: str, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
  """Returns the result types, and an operation that draws random numbers, or None."""
  seen: list[Any] = []
  try:
    result = _run_abstract(run, False, args, kwargs, seen.append)
  except GateDefinitionError:
    raise
  except Exception as error:  # the user's function may raise anything
    text = " ".join(foreign.text_of(error).split())
    advice = "If it needs values to determine its results, declare them with out="
    if "does not require grad" in text:
      advice = "If the function calls torch.autograd itself, pass enable_grad=True"
    why = f"the function did not run on tensors without values ({type(error).__name__}"
    known = f"{label}: the results' types are not known"
    raise GateDefinitionError(f"{known}: {why}: {text[:300]}). {advice}") from error

  def struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), dtype_named(str(x.dtype).removeprefix("torch.")))

  draws = (str(one) for one in seen if torch.Tag.nondeterministic_seeded in one.tags)
  return jax.tree.map(struct, result), next(draws, None)


def takes_vmap(batched: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
  """Returns True if `torch.func.vmap` supports the run, without a hidden loop over the lanes."""

  def look(operation: Any) -> None:
    if operation.name().partition(".")[0] == _WRONG_UNDER_VMAP:
      raise NotImplementedError(operation.name())

  try:
    with warnings.catch_warnings():
      # torch warns of operations that it batches by a loop.
      warnings.filterwarnings("error", message="There is a performance drop")
      _run_abstract(batched, True, args, kwargs, look)
  except Exception:  # noqa: BLE001 - torch refuses in many ways, and the lanes then run in turn
    return False
  return True
