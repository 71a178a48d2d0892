# SPDX-License-Identifier: Apache-2.0
"""`every=`, `rate=` and `where=` of sinks: which of a channel's records they get."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sink_records import lines_of, losses, table_of

import callgate as cg
from callgate import sinks


class Kept(sinks.Sink):
  """A sink of a user's own."""

  def __init__(self, **choice: Any) -> None:
    super().__init__(**choice)
    self.seqs: list[int] = []

  def write(self, records: Sequence[sinks.Record]) -> None:
    self.seqs += [record.info.seq for record in records]


def seqs_of(sink: Any, path: Path) -> list[int]:
  if isinstance(sink, Kept):
    return sink.seqs
  if isinstance(sink, sinks.CSV):
    return [int(row["seq"]) for row in table_of(path)]
  return [line["seq"] for line in lines_of(path)]


@pytest.mark.parametrize("kind", ["JSONL", "CSV", "Kept"])
@pytest.mark.parametrize(
  ("choice", "want"),
  [
    ({"every": 30}, range(0, 200, 30)),
    ({"rate": 1e-9}, [0]),
    ({"rate": 1e15}, range(200)),
    ({"where": lambda record: record.value > 0.9}, [*range(90, 100), *range(190, 200)]),
    ({"every": 25, "where": lambda record: record.value >= 0.5}, [50, 75, 150, 175]),
    ({"every": 7, "rate": 1e-9, "where": lambda record: record.info.seq == 0}, [0]),
  ],
)  # fmt: skip
def test_a_sink_gets_what_it_chooses(kind: str, choice: Any, want: Any, tmp_path: Path) -> None:
  path = tmp_path / "file"
  sink = Kept(**choice) if kind == "Kept" else getattr(sinks, kind)(path, **choice)

  def program() -> Any:  # another program each time, of the same tap
    def step(i: Any, c: Any) -> Any:
      return cg.tap((i.astype(float) + 0.5) / 100, "chosen", name="x"), c

    return jax.jit(lambda: jax.lax.fori_loop(0, 100, lambda i, c: (step(i, c), c)[1], 0))

  everything: list[float] = []
  with cg.channel("chosen", to=[sink, everything.append]):
    for _ in range(2):
      program()()
  assert seqs_of(sink, path) == list(want)
  assert len(everything) == 200


def test_taps_devices_and_lanes_are_counted_by_themselves() -> None:
  sink = Kept(every=2)
  records: list[Any] = []
  sink.write = lambda given: records.extend(given)  # pyright: ignore[reportAttributeAccessIssue]

  @jax.jit
  def program(x: Any) -> Any:
    def step(i: Any, c: Any) -> Any:
      jax.vmap(lambda lane: cg.tap(lane + i, "chosen", name="lanes"))(x)
      cg.tap(i, "chosen", name="alone")
      return c

    return jax.lax.fori_loop(0, 5, step, 0)

  with cg.channel("chosen", to=sink):
    program(jnp.arange(3))
  alone = [int(r.value) for r in records if r.info.name == "alone"]
  lanes = [int(r.value) for r in records if r.info.name == "lanes"]
  assert alone == [0, 2, 4]
  assert lanes == [0, 1, 2, 2, 3, 4, 4, 5, 6]


def test_native_sinks_look_at_each_record_where_they_are_asked_to(tmp_path: Path) -> None:
  stats = sinks.Stats(where=lambda record: record.value % 2 == 1)
  stream = sinks.Stream(tmp_path / "run.cgs", where=lambda record: record.value < 3)
  npy = sinks.Npy(tmp_path / "x.npy", every=4)
  program = jax.jit(lambda: jax.lax.fori_loop(0, 10, lambda i, c: (cg.tap(i, "chosen"), c)[1], 0))
  with cg.channel("chosen", to=[stats, stream, npy]):
    program()
  assert stats.result()["chosen"]["records"] == 5
  with cg.open_stream(tmp_path / "run.cgs") as read:
    assert [int(one.leaves[""]) for one in read] == [0, 1, 2]
  assert np.load(tmp_path / "x.npy").tolist() == [0, 4, 8]


def test_a_where_that_raises_loses_its_record_alone(tmp_path: Path) -> None:
  def where(record: sinks.Record) -> bool:
    if record.value == 4:
      raise ZeroDivisionError("four")
    return True

  sink = sinks.JSONL(tmp_path / "a.jsonl", where=where)
  program = jax.jit(lambda: jax.lax.fori_loop(0, 8, lambda i, c: (cg.tap(i, "chosen"), c)[1], 0))
  channel = cg.channel("chosen", to=sink)
  program()
  with pytest.raises(ZeroDivisionError, match="four"):
    cg.barrier()
  assert channel.stats()["lost"] == 1
  channel.close()
  assert [line["value"] for line in lines_of(tmp_path / "a.jsonl")] == [0, 1, 2, 3, 5, 6, 7]


def test_records_that_are_written_by_hand_are_written(tmp_path: Path) -> None:
  with sinks.JSONL(tmp_path / "a.jsonl", every=3, where=lambda record: False) as sink:
    sink.write(losses(4))
  assert len(lines_of(tmp_path / "a.jsonl")) == 4


@pytest.mark.parametrize(
  ("choice", "text"),
  [
    ({"every": 0}, r"every: expected an integer of at least 1, got 0"),
    ({"every": 1.5}, "every: expected"),
    ({"rate": 0}, "rate: expected records a second, above 0, got 0"),
    ({"rate": "fast"}, "rate: expected"),
    ({"where": 3}, "where: expected a callable, got 3"),
  ],
)
def test_wrong_choices_are_refused_by_every_sink(choice: Any, text: str, tmp_path: Path) -> None:
  made = {
    "CSV": tmp_path / "a", "HDF5": tmp_path / "b", "JSONL": tmp_path / "c", "MLflow": "d",
    "Npy": tmp_path / "e", "Parquet": tmp_path / "f", "Plot": tmp_path / "g.png", "Print": None,
    "Stats": None, "Stream": tmp_path / "h", "TensorBoard": tmp_path / "i", "Zarr": tmp_path / "j",
    "ClearML": "l", "WandB": "k",
  }  # fmt: skip
  kinds = [
    n
    for n in sinks.__all__
    if isinstance(getattr(sinks, n), type) and issubclass(getattr(sinks, n), sinks.Sink)
  ]
  assert {*kinds} - {"Sink"} == {*made}
  for name, argument in made.items():
    try:
      with pytest.raises(cg.GateDefinitionError, match=f"sinks.{name}: {text}"):
        getattr(sinks, name)(argument, **choice)
    except ImportError:  # its library is not there
      continue
  with pytest.raises(TypeError, match="evry"):
    sinks.JSONL(tmp_path / "k", evry=2)  # pyright: ignore[reportCallIssue]
