# SPDX-License-Identifier: Apache-2.0
"""Channels of programs for CUDA, on the fake driver: policies, sinks, errors, the process's end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fake_programs
import numpy as np
import pytest
from fake_cuda import FakeCuda
from interpreters import FOLDER, run, same_path

import callgate as cg
from callgate import _callgate

LARGE = 20_000  # float32: more than goes by the program's own stream


def numbers(*shape: int) -> np.ndarray[Any, Any]:
  return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("policy", ["block", "drop_new", "drop_old"])
def test_policies_hold_when_the_ring_is_full(fake: FakeCuda, policy: Any) -> None:
  count, seen = 64, list[int]()
  begun, go = threading.Event(), threading.Event()

  def slow(value: Any) -> None:
    begun.set()
    assert go.wait(60)
    seen.append(int(value[0]))

  with cg.channel(f"full-{policy}", capacity=4096, on_full=policy, to=slow) as channel:
    program = fake_programs.load(fake, lambda x: cg.tap(x, channel), np.zeros(64, np.int32))
    stream = fake.stream()
    program(np.full(64, 0, np.int32), stream=stream)
    assert begun.wait(60)
    for i in range(1, count):  # the program goes on, whatever the policy
      program(np.full(64, i, np.int32), stream=stream)
    if policy != "block":
      assert _callgate.drain_devices(60)
    go.set()
    cg.barrier()
    stats = channel.stats()
  assert stats["sent"] == count == stats["delivered"] + stats["dropped"]
  assert seen == sorted(seen)
  assert len(seen) == stats["delivered"]
  if policy == "block":
    assert seen == list(range(count))
  else:
    assert 0 < len(seen) < count
    assert (count - 1 in seen) == (policy == "drop_old")


def test_a_consumer_that_raises_gets_the_next_record_too(fake: FakeCuda) -> None:
  seen: list[int] = []

  def consumer(value: Any) -> None:
    seen.append(int(value))
    if value == 1:
      raise KeyError("no such value")

  program = fake_programs.load(fake, lambda x: cg.tap(x, consumer), np.int32(0))
  for i in range(3):
    program(np.int32(i))
  with pytest.raises(KeyError, match="no such value"):
    cg.barrier()
  assert seen == [0, 1, 2]


def test_batches_and_records_are_as_on_the_cpu(fake: FakeCuda) -> None:
  stacks: list[Any] = []
  with cg.channel("stacked", to=stacks.append, batch=True) as channel:
    records = channel.records()
    program = fake_programs.load(fake, lambda x: cg.tap(x, "stacked"), numbers(3))
    for i in range(5):
      program(numbers(3) + i)
    cg.barrier()
  np.testing.assert_array_equal(np.concatenate(stacks), numbers(3) + np.arange(5)[:, None])
  assert [record.info.seq for record in records] == list(range(5))


def test_sinks_write_what_the_gpu_sends(fake: FakeCuda, tmp_path: Path) -> None:
  path = tmp_path / "out.jsonl"
  with cg.channel("written", to=cg.sinks.JSONL(str(path))):
    program = fake_programs.load(fake, lambda x: cg.tap({"a": x}, "written"), numbers(2))
    program(numbers(2))
    cg.barrier()
  assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("size", [3, LARGE])
def test_records_on_the_stream_at_exit_are_delivered(fake: FakeCuda, size: int) -> None:
  script = f"""
    import threading
    import numpy as np
    from fake_cuda import open_fake
    import fake_programs
    import callgate as cg

    fake = open_fake()
    show = lambda v: print("got", v.sum(), flush=True)
    program = fake_programs.load(fake, lambda x: cg.tap(x, show), np.ones({size}, np.float32))
    stream = fake.stream()
    stream.hold()
    pending = program.start(np.ones({size}, np.float32), stream=stream)
    threading.Timer(0.2, stream.release).start()
  """
  path = same_path(FOLDER)
  done = run(script, environment={**path, "CALLGATE_CUDA_DRIVER": str(fake.path)})
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ["got", str(np.float32(size))]
