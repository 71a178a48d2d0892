"""What a PyTorch function returns and whether `torch.func.vmap` takes it, without running it.

It runs on torch's fake tensors: they have shapes and dtypes, and no values. Tensors that it has
from elsewhere (weights in a closure) become fake ones while it runs, so nothing of them changes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
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


# Its batching rule takes memory as contiguous that is not, and gives zeros or what lies there
# (torch 2.13: `torch.func.jacrev` of `torch.cdist`).
_WRONG_UNDER_VMAP = "aten::_cdist_backward"


class _Watched(TorchDispatchMode):
  """Has `look` see each operation before it runs."""

  def __init__(self, look: Callable[[Any], None]) -> None:
    super().__init__()
    self._look = look

  def __torch_dispatch__(
    self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
  ) -> Any:
    del types
    self._look(func)
    return func(*args, **(kwargs or {}))


def _run_abstract(
  run: Run, functional: bool, args: Any, kwargs: Any, look: Callable[[Any], None]
) -> Any:
  """The run on tensors without values, in the place of ShapeDtypeStructs."""

  def fake(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf
    return torch.empty(tuple(leaf.shape), dtype=torch_dtype(np.dtype(leaf.dtype)))

  # torch logs errors of tensors without values, which the caller hears of anyway.
  logger = logging.getLogger("torch._subclasses.fake_tensor")
  before, logger.disabled = logger.disabled, True
  try:
    with FakeTensorMode(allow_non_fake_inputs=True):
      args, kwargs = jax.tree.map(fake, (args, kwargs))
      with _Watched(look), torch.no_grad():
        return run(functional, args, kwargs)
  finally:
    logger.disabled = before


def result_types(
  label: str, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
  """The results' types, and an operation that draws random numbers if there is one.

  Arguments have ShapeDtypeStructs for arrays; static ones are as they are.
  """
  draws: list[str] = []

  def look(operation: Any) -> None:
    if torch.Tag.nondeterministic_seeded in operation.tags:
      draws.append(str(operation))

  try:
    result = _run_abstract(run, False, args, kwargs, look)
  except GateDefinitionError:
    raise
  except Exception as error:  # whatever the user's function raises
    text = " ".join(str(error).split())
    advice = (
      "If it is right, and only needs values to know what it returns, say what that is with out= "
      "(a pytree of ShapeDtypeStructs, or a function from the arguments' to one)"
    )
    if "does not require grad" in text:
      advice = "A function that calls torch.autograd itself needs enable_grad=True"
    raise GateDefinitionError(
      f"{label}: the results' types are not known: the function did not run on tensors without "
      f"values ({type(error).__name__}: {text[:300]}). {advice}"
    ) from error

  def struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(x.shape), dtype_named(str(x.dtype).removeprefix("torch.")))

  return jax.tree.map(struct, result), next(iter(draws), None)


def takes_vmap(batched: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
  """Whether the run of all lanes works under `torch.func.vmap`, not as a loop in disguise."""

  def look(operation: Any) -> None:
    if operation.name().partition(".")[0] == _WRONG_UNDER_VMAP:
      raise NotImplementedError(operation.name())

  try:
    with warnings.catch_warnings():
      # torch warns of an operation that it can't batch but in a loop of its own.
      warnings.filterwarnings("error", message="There is a performance drop")
      _run_abstract(batched, True, args, kwargs, look)
  except Exception:  # noqa: BLE001 - torch refuses in many ways, and the lanes then run in turn
    return False
  return True
