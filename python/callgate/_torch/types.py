"""What a PyTorch function returns and whether `torch.func.vmap` takes it, without running it.

It runs on torch's fake tensors: they have shapes and dtypes, and no values. Tensors that it has
from elsewhere (weights in a closure) become fake ones while it runs, so nothing of them changes.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch._subclasses.fake_tensor import FakeTensorMode  # pyright: ignore[reportMissingImports]
from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._torch.calls import Run


def torch_dtype(dtype: np.dtype[Any]) -> Any:
  """torch's dtype of the same name; None where it has none."""
  found = getattr(torch, dtype.name, None)
  return found if isinstance(found, torch.dtype) else None


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
  """The dtype of a tensor as JAX has it."""
  name = str(dtype).removeprefix("torch.")
  return dtype_named(name)


# Its batching rule takes memory as contiguous that is not, and gives zeros or what lies there
# (torch 2.13: `torch.func.jacrev` of `torch.cdist`).
_WRONG_UNDER_VMAP = frozenset({"aten::_cdist_backward"})


class _Refusals(TorchDispatchMode):
  """Raises where torch would map an operation and give wrong values."""

  def __torch_dispatch__(
    self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
  ) -> Any:
    del types
    if func.name().partition(".")[0] in _WRONG_UNDER_VMAP:
      raise NotImplementedError(func.name())
    return func(*args, **(kwargs or {}))


class _Draws(TorchDispatchMode):
  """Writes down which operations draw random numbers."""

  def __init__(self) -> None:
    super().__init__()
    self.seen: list[str] = []

  def __torch_dispatch__(
    self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
  ) -> Any:
    del types
    if torch.Tag.nondeterministic_seeded in func.tags:
      self.seen.append(str(func))
    return func(*args, **(kwargs or {}))


def result_types(
  label: str, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
  """The results' types, and an operation that draws random numbers if there is one.

  Args:
    label: what messages call the function.
    run: the function.
    args: the arguments, with ShapeDtypeStructs for arrays.
    kwargs: likewise; static ones as they are.
  """
  draws = _Draws()
  try:
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
      fake_args, fake_kwargs = _fakes(args, kwargs)
      with draws, torch.no_grad():
        result = run(False, fake_args, fake_kwargs)
  except GateDefinitionError:
    raise
  except Exception as error:  # whatever the user's function raises
    raise GateDefinitionError(_cannot_infer(label, error)) from error
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(tuple(x.shape), numpy_dtype(x.dtype)), result
  )
  return structs, draws.seen[0] if draws.seen else None


def _cannot_infer(label: str, error: Exception) -> str:
  text = " ".join(str(error).split())
  if "does not require grad" in text:
    advice = "A function that calls torch.autograd itself needs enable_grad=True"
  else:
    advice = (
      "If it is right, and only needs values to know what it returns, say what that is with out= "
      "(a pytree of ShapeDtypeStructs, or a function from the arguments' to one)"
    )
  return (
    f"{label}: the results' types are not known: the function did not run on tensors without "
    f"values ({type(error).__name__}: {text[:300]}). {advice}"
  )


def takes_vmap(batched: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
  """Whether a run under `torch.func.vmap` works, and is not a loop over the lanes in disguise.

  Args:
    batched: the run of all lanes.
    args: its arguments, with ShapeDtypeStructs for arrays.
    kwargs: likewise.
  """
  try:
    with warnings.catch_warnings(), _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
      # torch warns of an operation that it can't batch but in a loop of its own.
      warnings.filterwarnings("error", message="There is a performance drop")
      fake_args, fake_kwargs = _fakes(args, kwargs)
      with _Refusals(), torch.no_grad():
        batched(True, fake_args, fake_kwargs)
  except Exception:  # noqa: BLE001 - torch refuses in many ways, and the lanes then run in turn
    return False
  return True


@contextlib.contextmanager
def _quiet() -> Generator[None]:
  """torch logs errors of tensors without values, which the caller hears of anyway."""
  logger = logging.getLogger("torch._subclasses.fake_tensor")
  before, logger.disabled = logger.disabled, True
  try:
    yield
  finally:
    logger.disabled = before


def _fakes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
  def fake(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf
    return torch.empty(tuple(leaf.shape), dtype=torch_dtype(np.dtype(leaf.dtype)))

  leaves, tree = jax.tree.flatten((args, kwargs))
  return jax.tree.unflatten(tree, [fake(leaf) for leaf in leaves])


def batch(structs: Sequence[Any], mask: Sequence[bool], size: int) -> list[Any]:
  """ShapeDtypeStructs of all lanes from those of one."""
  return [
    jax.ShapeDtypeStruct((size, *x.shape), x.dtype) if flag else x
    for x, flag in zip(structs, mask, strict=True)
  ]
