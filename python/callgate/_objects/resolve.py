# SPDX-License-Identifier: Apache-2.0
"""Gives the functions of `callgate.use` objects instead of handles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from callgate._core import foreign, tape
from callgate._core.errors import HandleError
from callgate._core.public import core
from callgate._objects import table
from callgate._objects.handle import TYPE, Handle
from callgate._objects.remote import RemoteObject


def is_handle(value: Any) -> bool:
  return isinstance(value, Handle)


def resolved(user: str, value: Any) -> Any:
  """Replaces the handles in a pytree by their objects; a batched handle by a list of them."""
  kind = type(value)
  if kind is Handle:
    return _object(user, value)
  if kind is np.ndarray:
    return value
  # Most arguments are flat, and JAX's functions would dominate the time of a call.
  if kind is tuple:
    return tuple([resolved(user, each) for each in value])
  if kind is dict:
    return {name: resolved(user, each) for name, each in value.items()}
  return jax.tree.map(functools.partial(_object, user), value, is_leaf=is_handle)


def _object(user: str, leaf: Any) -> Any:
  if not isinstance(leaf, Handle):
    return leaf
  words = np.asarray(core(leaf).words)
  if words.dtype != TYPE.dtype or words.shape[-1:] != TYPE.shape:
    raise HandleError(
      f"{user}: expected a handle's words, uint32[2], got {words.dtype}{list(words.shape)}"
    )
  if words.ndim == 1:
    held = table.get(words, user)
    if isinstance(held.value, tape.Standin):
      held.value.refuse(user)
    if isinstance(held.value, RemoteObject):
      raise HandleError(
        f"{user}: expected an object of this process, got object #{held.number}, made by "
        f"{held.maker}, which lives in {held.value.where()}"
      )
    return held.value
  return [_object(user, Handle(one)) for one in words]


def name_objects(error: BaseException, args: Any) -> None:
  names: list[str] = []
  for handle in jax.tree.leaves(args, is_leaf=is_handle):
    if is_handle(handle) and np.ndim(core(handle).words) == 1:
      held = table.get(core(handle).words, "")
      names.append(f"{type(held.value).__name__} #{held.number}, made by {held.maker}")
  if names:
    foreign.add_note(error, f"callgate: called with {'; '.join(names)}")
