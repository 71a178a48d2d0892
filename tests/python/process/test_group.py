# SPDX-License-Identifier: Apache-2.0
"""Programs over 2 and 4 processes of `jax.distributed` on this machine: calls, files, barriers.

Starting a group takes seconds, so each runs all cases once (processes_worker.py); the tests look at
what the processes reported and wrote.
"""

from __future__ import annotations

import csv
import heapq
import json
import pathlib
import re

import numpy as np
import pytest
from interpreters import FOLDER, Module, run
from process_groups import Ended, run_group

import callgate as cg

WORKER = FOLDER / "processes_worker.py"
SOON = 60  # seconds in which an error has to come; a hang takes the group's limit, four times that


class Group:
  """A group that has ended, and the folder that it wrote to."""

  def __init__(self, count: int, ending: str, folder: pathlib.Path) -> None:
    self.folder = folder
    self.ended: list[Ended] = run_group(
      WORKER, count, ending, folder=folder, CALLGATE_SILENT_SECONDS="8"
    )

  def reports(self, name: str) -> list:
    """The reports of all processes under a name, in the order of their indices."""
    missing = [i for i, one in enumerate(self.ended) if name not in one.reports]
    assert not missing, (name, missing, self.ended[missing[0]].errors[-3000:])
    return [one.reports[name] for one in self.ended]


@pytest.fixture(scope="module", params=[2, 4])
def group(request, tmp_path_factory) -> Group:
  """2 processes, of which one ends by an exception, and 4, of which one dies."""
  ending = {2: "exception", 4: "death"}[request.param]
  return Group(request.param, ending, tmp_path_factory.mktemp(f"group{request.param}"))


def test_gates_and_kernels_run_on_the_shards_of_each_process(group):
  for index, place in enumerate(group.reports("place")):
    assert place == [index, index]
  assert group.reports("close") == [[True, True]] * len(group.ended)


def test_taps_are_delivered_where_their_shard_is_with_process_and_device(group):
  whole = np.arange(8.0 * len(group.ended)).reshape(-1, 4)
  devices = group.reports("devices")
  for index, shards in enumerate(group.reports("shards")):
    rows = whole[2 * index : 2 * index + 2].tolist()
    expected = [[index, d, row] for d, row in zip(devices[index], rows, strict=True)]
    assert shards == sorted(expected * 3)


def test_sinks_write_a_file_for_each_process(group):
  count = len(group.ended)
  for stem in ("run-*.cgs", "lines-*.jsonl", "table-*.csv"):
    assert len(list(group.folder.glob(stem))) == count
  for index, devices in enumerate(group.reports("devices")):
    lines = (group.folder / f"lines-{index}.jsonl").read_text().splitlines()
    assert {json.loads(line)["device"] for line in lines} == set(devices)
    text = (group.folder / f"table-{index}.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == len(lines) == 6
    assert {float(row["first/first"]) for row in rows} == {8.0 * index, 8.0 * index + 4}


def test_streams_of_all_processes_are_read_as_one(group):
  devices = group.reports("devices")
  files = []
  for path in group.folder.glob("run-*.cgs"):
    with cg.open_stream(path) as stream:
      files.append(list(stream))
  merged = heapq.merge(*files, key=lambda r: (r.time_ns, r.process, r.device, r.seq))
  in_order = [(r.device, r.seq) for r in merged]
  for where in (
    str(group.folder / "run-*.cgs"),
    str(group.folder / "run-{process}.cgs"),
    sorted(group.folder.glob("run-*.cgs"), reverse=True),
  ):
    with cg.open_stream(where) as stream:
      assert stream.names() == ["first"]
      columns = stream.columns()
      records = list(stream)
    assert len(records) == 6 * len(devices)
    assert [r.process for r in records] == columns["process"].tolist()
    assert [(r.device, r.seq) for r in records] == in_order
    for index, mine in enumerate(devices):
      for local, device in enumerate(mine):
        picked = [r for r in records if r.device == device]
        assert [r.seq for r in picked] == [0, 1, 2]
        assert {r.process for r in picked} == {index}
        assert {float(r.leaves["['first']"]) for r in picked} == {8.0 * index + 4 * local}


def test_the_terminal_shows_the_merged_streams(group):
  done = run(Module("callgate"), "tail", "--json", "-n", "100", "run-*.cgs", cwd=group.folder)
  assert done.returncode == 0, done.stderr
  shown = [json.loads(line) for line in done.stdout.splitlines()]
  assert len(shown) == 6 * len(group.ended)
  assert {line["process"] for line in shown} == set(range(len(group.ended)))


def test_a_feed_gives_each_device_its_share_in_each_process(group):
  assert group.reports("fed") == [[[True, True], [True, True], True, 4]] * len(group.ended)


def test_partitioned_programs_call_on_the_shards_of_each_process(group):
  count, rows = len(group.ended), group.reports("rows")[0]
  assert all(all(right) for right in group.reports("right"))
  assert all(group.reports("total"))
  for index, called in enumerate(group.reports("called")):
    # A gate that gathers is called once, by the first device; the others get its results.
    whole = [["whole", 0]] if index == 0 else []
    assert sorted(called, key=str) == sorted([*whole, [2, 4], [2, 4]], key=str)
  devices = group.reports("devices")
  for index, ranks in enumerate(group.reports("ranks")):
    mine = range(2 * index, 2 * index + 2)
    assert ranks == [[r, rows // 2, r, d] for r, d in zip(mine, devices[index], strict=True)]
  assert group.reports("ordered") == [[0.0, 1.0, 2.0], *[[]] * (count - 1)]


def test_whole_arrays_come_from_the_merged_streams_of_shards(group):
  rows = group.reports("rows")[0]
  with cg.open_stream(str(group.folder / "shards-*.cgs")) as stream:
    records = list(stream)
  shards = [r for r in records if r.name == "shards"]
  assert len(shards) == rows // 2
  assert {r.process for r in shards} == set(range(len(group.ended)))
  np.testing.assert_array_equal(cg.assemble(shards), np.arange(4.0 * rows).reshape(rows, 4))
  (total,) = [r for r in records if r.name == "total"]
  assert float(total.leaves[""]) == np.arange(4.0 * rows).sum()


def test_an_exception_in_one_processs_shard_reaches_the_others(group):
  check_failure(group.reports("one_shard"), 1, "KeyError", "'shard of process 1'")
  assert {one[0] for one in group.reports("after_one_shard")} == {"fine"}
  assert all(group.reports("poisoned"))


def test_progress_bars_are_drawn_by_process_0_alone(group):
  first, *others = group.reports("drawn")
  assert re.match(r"steps: 100% 50/50 ", first)
  assert others == [""] * (len(group.ended) - 1)
  assert set(group.reports("sum")) == {sum(range(50))}


def test_a_barrier_of_all_processes_waits_for_each(group):
  assert all(group.reports("all_were_here"))
  assert {one[0] for one in group.reports("first")} == {"fine"}


def check_failure(outcomes: list, failed: int, kind: str, message: str) -> None:
  """One process raised its own exception, the others one that names it."""
  for index, outcome in enumerate(outcomes):
    *result, seconds = outcome
    assert seconds < SOON
    if index == failed:
      assert result == [kind, message]
    else:
      assert result[:4] == ["ProcessError", failed, kind, message]


def test_a_consumers_exception_in_one_process_reaches_the_others(group):
  outcomes = group.reports("consumer")
  check_failure(outcomes, 1, "ValueError", "bad record 7.0")
  assert "in process 1:\nTraceback" in outcomes[0][4]
  assert "raised in consumer raising of tap" in outcomes[0][4]
  assert {one[0] for one in group.reports("after_consumer")} == {"fine"}


def test_a_gates_exception_in_one_process_reaches_the_others(group):
  check_failure(group.reports("gate"), len(group.ended) - 1, "OSError", "no such sensor")
  assert {one[0] for one in group.reports("after_gate")} == {"fine"}


def test_a_timeout_in_one_process_ends_the_barrier_for_all(group):
  outcomes = group.reports("late")
  late = list(range(1, len(group.ended)))
  expected = (
    f"callgate.barrier: expected all {len(group.ended)} processes within 0.5 s, but "
    f"{late} did not arrive"
  )
  check_failure(outcomes, 0, "TimeoutError", expected)
  assert {one[0] for one in group.reports("after_late")} == {"fine"}


def test_a_process_that_is_gone_is_an_error_in_the_others(group):
  exception = len(group.ended) == 2
  gone = group.ended[1] if exception else group.ended[-1]
  assert gone.status != 0
  for one in group.ended:
    if one is gone:
      continue
    *result, notes, seconds = one.reports["end"]
    assert seconds < SOON
    if exception:
      assert result == ["ProcessError", 1, "RuntimeError", "gone for good"]
      assert "raise RuntimeError" in notes
      assert one.reports["again"][:4] == result  # it stays gone
      assert one.reports["stuck"]  # it did not wait for the collective that lacks a process
      assert "RuntimeError: gone for good" in gone.errors
    else:
      last = len(group.ended) - 1
      assert result == ["ProcessError", last, "", "has not responded for 8 s"]
