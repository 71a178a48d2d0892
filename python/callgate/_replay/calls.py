# SPDX-License-Identifier: Apache-2.0
"""A recorded call, and its form in a stream (include/callgate/stream.h).

A call is a record of a tap that has the gate's name. Its description has the call's place, the
names and types of the operands, and the static arguments. Its leaves are `at` (lane and shard), the
operands or their digests, and the results, or `error` (JSON) and perhaps `pickle`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callgate._core.dtypes import Value, array_of, dtype_code, dtype_of, type_text, value_of
from callgate._core.tape import Type
from callgate._replay import static as statics
from callgate._replay.static import Static
from callgate._stream.records import StreamRecord

VERSION = 1
KEY = "callgate_recording"  # a description's key with the version
_DIGEST_BYTES = 16
Leaf = tuple[str, int, list[int], bytes]  # as for `RecordWriter.write`


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
  """A call, with its arguments and results.

  Attributes:
    gate, site, lane, device, shard: identify the call.
    number: the call's index in the recording, in the order in which calls began.
    effect: the gate's effect.
    names: the operands' names, as messages write them.
    types: the operands' types.
    operands: None if the recording has only digests.
    known_digests: the operands' digests; None if they follow from the operands.
    static: the static arguments by name.
    results: None if the call raised an exception.
    error: the exception, as `raised.py` writes it.
    pickled: the pickled exception, if possible.
    waits: True for the wait for a started call, which doesn't count as a call.
    time_ns: wall clock when the file got it, in nanoseconds since the Unix epoch.
  """

  gate: str
  site: str
  lane: int
  device: int
  shard: int
  number: int
  effect: str
  names: tuple[str, ...]
  types: tuple[Type, ...]
  operands: tuple[Value, ...] | None
  known_digests: tuple[bytes, ...] | None = None
  static: Static = ()
  results: tuple[Value, ...] | None = None
  error: str = ""
  pickled: bytes = b""
  waits: bool = False
  time_ns: int = 0

  @functools.cached_property
  def digests(self) -> tuple[bytes, ...]:
    """The operands' digests."""
    return self.known_digests or tuple(map(digest, self.operands or ()))

  @functools.cached_property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """The operands, if the recording has them."""
    return tuple(map(array_of, self.operands or ()))

  @property
  def all_names(self) -> tuple[str, ...]:
    """The names of operands and of static arguments."""
    return *self.names, *(name for name, _ in self.static)

  @property
  def equality(self) -> tuple[object, ...]:
    """The parts that are equal in calls of a gate with equal arguments."""
    return self.digests, self.static

  # A user's `match` reads these.
  @property
  def name(self) -> str:
    """The gate's name."""
    return self.gate

  @property
  def args(self) -> tuple[np.ndarray, ...]:
    """The operands as arrays, in order."""
    return self.arrays

  @property
  def kwargs(self) -> dict[str, Any]:
    """All arguments by name, also those passed by position: "day", "params['w']"."""
    named = [*zip(self.names, self.arrays, strict=True)]
    named += [(name, statics.value_of(code)) for name, code in self.static]
    return {
      name.replace("'", "", 2) if name.startswith("'") else name: value for name, value in named
    }

  def without(self, parameters: frozenset[str]) -> Recorded:
    """Returns the call without the arguments of some parameters."""
    kept = [i for i, name in enumerate(self.names) if parameter_of(name) not in parameters]
    static = tuple(one for one in self.static if parameter_of(one[0]) not in parameters)
    if len(kept) == len(self.names) and static == self.static:
      return self
    return dataclasses.replace(
      self,
      names=tuple(self.names[i] for i in kept),
      types=tuple(self.types[i] for i in kept),
      operands=None if self.operands is None else tuple(self.operands[i] for i in kept),
      known_digests=tuple(self.digests[i] for i in kept),
      static=static,
    )

  def digested(self) -> Recorded:
    """Returns the call as a recording of digests has it."""
    if self.operands is None:
      return self
    static = statics.digested(self.static)
    return dataclasses.replace(self, operands=None, known_digests=self.digests, static=static)


def parameter_of(name: str) -> str:
  """Returns the parameter in an operand's name: "params" in "'params'['w']"; "" if it has none."""
  return name.split("'")[1] if name.startswith("'") else ""


def digest(value: Value) -> bytes:
  """Returns a hash of an operand's type and elements, bit by bit."""
  code, shape, data = value
  made = hashlib.blake2b(f"{code}{shape}".encode(), digest_size=_DIGEST_BYTES)
  made.update(data)
  return made.digest()


def text_of(type: Type) -> str:
  """Returns a type as text, such as "float32[3,4]"."""
  return type_text(dtype_of(type[0]), type[1])


# -- to a stream -----------------------------------------------------------------------------------
def describe(call: Recorded) -> str:
  """Returns the common part of the records of one call site."""
  is_digests = call.operands is None
  head = (call.site, call.effect, call.names, call.types, is_digests, call.static, call.waits)
  return _described(*head)


@functools.lru_cache(maxsize=1024)
def _described(
  site: str, effect: str, names: tuple[str, ...], types: tuple[Type, ...], is_digests: bool,
  static: Static, waits: bool,
) -> str:  # fmt: skip
  operands = [[name, code, list(shape)] for name, (code, shape) in zip(names, types, strict=True)]
  held: dict[str, Any] = {
    KEY: VERSION, "site": site, "effect": effect, "operands": operands, "digests": is_digests,
  }  # fmt: skip
  if static:
    held["static"] = static
  if waits:
    held["waits"] = True
  return json.dumps(held, separators=(",", ":"))


def leaves_of(
  call: Recorded, results: tuple[Value, ...] | None, error: str, pickled: bytes
) -> list[Leaf]:
  """Returns the arrays of a call's record; `results` is None if it raised `error`."""
  leaves: list[Leaf] = [("at", _INT64, [2], _AT.pack(call.lane, call.shard))]
  if call.operands is None:
    leaves += [_bytes(f"digests[{i}]", data) for i, data in enumerate(call.digests)]
  else:
    leaves += [_leaf(f"operands[{i}]", value) for i, value in enumerate(call.operands)]
  if results is not None:
    return leaves + [_leaf(f"results[{i}]", value) for i, value in enumerate(results)]
  leaves.append(_bytes("error", error.encode()))
  return leaves + ([_bytes("pickle", pickled)] if pickled else [])


_AT = struct.Struct("=qq")
_INT64 = dtype_code(np.dtype(np.int64))


def _leaf(path: str, value: Value) -> Leaf:
  code, shape, data = value
  return path, code, list(shape), data


def _bytes(path: str, data: bytes) -> Leaf:
  return _leaf(path, value_of(np.frombuffer(data, np.uint8)))


# -- from a stream ---------------------------------------------------------------------------------
def read(record: StreamRecord) -> Recorded:
  """Returns the call of a record.

  Raises:
    ValueError: the record isn't a call, or has another version.
  """
  about: Mapping[str, Any] = record.description
  if KEY not in about:
    raise ValueError(f"expected a recording, got a stream with records of tap {record.name!r}")
  if (version := about[KEY]) != VERSION:
    raise ValueError(f"expected version {VERSION} of a recording, got {version!r}; record again")
  try:
    return _read(record, about)
  except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
    raise ValueError(
      f"expected a call that callgate.record wrote, got a record of {record.name!r} with leaves "
      f"{list(record.leaves)}: {error}"
    ) from error


def _read(record: StreamRecord, about: Mapping[str, Any]) -> Recorded:
  leaves = record.leaves
  names, types = list[str](), list[Type]()
  for name, code, shape in about["operands"]:
    dtype_of(code)
    names.append(str(name))
    types.append((int(code), tuple(map(int, shape))))
  lane, shard = map(int, leaves["at"])
  operands, digests = None, None
  if about["digests"]:
    digests = tuple(leaves[f"digests[{i}]"].tobytes() for i in range(len(types)))
  else:
    operands = tuple(value_of(leaves[f"operands[{i}]"]) for i in range(len(types)))
  results, error, pickled = None, "", b""
  if "error" in leaves:
    error = leaves["error"].tobytes().decode()
    pickled = leaves["pickle"].tobytes() if "pickle" in leaves else b""
  else:
    results = tuple(_results(leaves))
  head = (record.name, str(about["site"]), lane, record.device, shard, record.seq)
  about_call = (str(about["effect"]), tuple(names), tuple(types))
  static = tuple((str(name), str(code)) for name, code in about.get("static", ()))
  waits = about.get("waits") is True
  return Recorded(
    *head, *about_call, operands, digests, static, results, error, pickled, waits, record.time_ns
  )


def _results(leaves: Mapping[str, np.ndarray]) -> Sequence[Value]:
  count = sum(path.startswith("results[") for path in leaves)
  return [value_of(leaves[f"results[{i}]"]) for i in range(count)]
