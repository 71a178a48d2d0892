# SPDX-License-Identifier: Apache-2.0
"""The process in which `verify` splits a call's arrays over four simulated devices."""

from __future__ import annotations

import json
import pathlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from callgate._verify.subject import Fault, NotAsked, Subject, difference, said


def answer(folder: str) -> None:
  """Reads a request from a folder, and writes the answer to it."""
  path = pathlib.Path(folder)
  found: dict[str, str]
  try:
    function, args, kwargs = pickle.loads((path / "request").read_bytes())
    found = {"message": compare(Subject(function, args, kwargs))}
  except NotAsked as reason:
    found = {"skipped": str(reason)}
  except Fault as fault:
    found = {"fault": str(fault)}
  except Exception as error:  # noqa: BLE001 - the answer
    found = {"fault": said(error)}
  (path / "answer").write_text(json.dumps(found), encoding="utf-8")


def compare(subject: Subject) -> str:
  """Compares split arguments with whole ones, for each split that the rule allows."""
  if subject.blocked:
    raise Fault(subject.blocked[1])
  devices = jax.devices()
  mesh = Mesh(np.array(devices), ("shard",))
  split = 0
  for places in _dimensions(subject):
    values = [_divisible(x, dims, len(devices)) for x, dims in zip(subject.values(), places,
                                                                   strict=True)]  # fmt: skip
    try:
      want = subject.run(subject.jitted, values)
    except Exception:  # noqa: BLE001 - the callable does not take such sizes
      continue
    specs = [PartitionSpec(*_spec(x.ndim, dims)) for x, dims in zip(values, places, strict=True)]
    lying = [NamedSharding(mesh, spec) for spec in specs]
    got = subject.run(jax.jit(subject.flat, in_shardings=lying), values)
    if found := difference(want, got):
      shown = ", ".join(map(str, specs))
      raise Fault(f"arguments split as ({shown}) over {len(devices)} devices: {found}")
    split += 1
  if not split:
    raise NotAsked(f"no dimension that may stay split is divisible by {len(devices)}")
  return f"{split} way{'' if split == 1 else 's'} to split over {len(devices)} devices"


def _dimensions(subject: Subject) -> Iterator[list[list[int]]]:
  """Yields the dimensions of each array that are split at once, for each way to split."""
  core, values = subject.core, subject.values()
  if callable(core.sharding):  # its result depends on the shardings: try the leading dimensions
    yield [[0] if x.ndim else [] for x in values]
    return
  results = [shape for shape, _ in subject.site.results]
  rule = core.sharding_rule(subject.site, [x.shape for x in values], results)
  for factor in sorted({n for term in rule.operands for n in term} - rule.whole):
    yield [[d for d, n in enumerate(term) if n == factor] for term in rule.operands]


def _spec(rank: int, dims: Sequence[int]) -> list[str | None]:
  return ["shard" if d in dims[:1] else None for d in range(rank)]


def _divisible(x: Any, dims: Sequence[int], count: int) -> Any:
  """Returns the array, repeated along dimensions whose extent is not a multiple of `count`."""
  for d in dims:
    if x.shape[d] % count:
      x = np.concatenate([x] * count, d)
  return x
