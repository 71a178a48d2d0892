# SPDX-License-Identifier: Apache-2.0
"""Draws programs, runs them in another process, and shrinks those that go wrong."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import blocks  # noqa: F401
import calls
import checks
import counts
import forms
import in_order
import judge
import lanes
import loops
import numpy as np
import old_interfaces
import parts
import refusals
from cases import Case, cases
from counts import Counts
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from oracle import Ambiguous, Event, Lane, Machine
from program import DRAWN, Program
from ways import HEAD, NEEDS_ERRORS, OVER_DEVICES, SPLIT, TWINS

TIMEOUT = 60.0  # seconds on an idle machine, after which a program counts as hanging
SHRINKING = 90.0  # seconds at most for one finding
PROGRAMS_A_CHILD = 150
OF_ARMED = ("AssertionError", "Planned", "KeyboardInterrupt")  # which a twin may raise otherwise
OF_VALUES = ("results", "events", "order")
ROUNDING = 1e-6  # relative
LOOKED_THROUGH = 8  # of so many programs one is looked through for what it keeps
JAX = importlib.metadata.version("jax")
HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Finding:
  kind: str  # "results", "events", "order", "raised", "died", "hangs", "threads"
  said: str
  ops: frozenset[str]
  source: str

  def like(self) -> tuple[str, str]:
    """Equal for findings that may have the same cause."""
    said = self.said if self.kind == "raised" else self.said.partition(" ")[0]
    return self.kind, re.sub(r"[\d.]+|0x[0-9a-f]+", "#", said)[:200]


@dataclasses.dataclass
class Found:
  programs: int = 0
  refused: int = 0
  ambiguous: int = 0
  findings: list[Finding] = dataclasses.field(default_factory=list)
  counts: Counts = dataclasses.field(default_factory=Counts)

  def add(self, other: Found) -> None:
    self.programs += other.programs
    self.refused += other.refused
    self.ambiguous += other.ambiguous
    self.findings += other.findings
    self.counts.add(other.counts)


class Child:
  """A process that runs programs; another takes its place when it dies."""

  def __init__(self) -> None:
    self._process: subprocess.Popen[bytes] | None = None
    self._runs = 0

  def _start(self) -> None:
    self.close()
    ours, theirs = multiprocessing.Pipe()
    self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
    flags = "--xla_force_host_platform_device_count=4"
    # On a busy machine devices meet late; XLA ends the process after 40 seconds.
    flags += f" --xla_cpu_collective_call_terminate_timeout_seconds={8 * TIMEOUT:.0f}"
    environment = {**os.environ, "XLA_FLAGS": flags, "CALLGATE_TEST_XLA": "quick"}
    environment["JAX_PLATFORMS"] = "cpu"
    self._process = subprocess.Popen(
      [sys.executable, str(HERE / "child.py"), str(theirs.fileno())],
      pass_fds=[theirs.fileno()],
      stdout=self._output,
      stderr=subprocess.STDOUT,
      env=environment,
      start_new_session=True,
    )
    theirs.close()
    self._connection, self._runs = ours, 0

  def run(self, source: str, keeps: bool = False) -> dict[str, Any]:
    """Runs a program; with `keeps` it says which of its functions are alive afterwards."""
    if self._process is None or self._runs >= PROGRAMS_A_CHILD:
      self._start()
    self._runs += 1
    try:
      self._connection.send((source, self._runs, keeps))
      if self._connection.poll(TIMEOUT * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))):
        return self._connection.recv()
      kind = "hangs"
    except (EOFError, OSError):
      kind = "died"
    assert self._process is not None
    if kind == "hangs":
      self._process.send_signal(signal.SIGUSR1)  # it writes the stacks of its threads
      time.sleep(1)
      self._kill()
    status = self._process.wait()
    self._output.seek(0)
    output = self._output.read().decode(errors="replace")[-3000:]
    self.close()
    return {"raised": kind, "message": f"exit status {status}: {output}", "traceback": output}

  def _kill(self) -> None:
    """Kills the process, and those that its program has started."""
    if self._process is not None and self._process.poll() is None:
      os.killpg(self._process.pid, signal.SIGKILL)

  def close(self) -> None:
    if self._process is not None:
      self._kill()
      self._process.wait()
      self._connection.close()
      self._output.close()
      self._process = None


class _FoundOne(Exception):
  pass


class Explorer:
  """Explores programs until its time is over, or as far as the first finding, as it was drawn.

  Args:
    seconds: its time.
    to_first: True to end at the first finding.
    among: runs those programs alone of which it is true.
    most: begins no round of programs after so many.
  """

  def __init__(
    self, seconds: float, to_first: bool = False, among: Callable[[Case], bool] = lambda _: True,
    most: int = sys.maxsize,
  ) -> None:  # fmt: skip
    self.end, self._most = time.monotonic() + seconds, most
    self.drawn = 0  # programs, those included that `among` leaves out
    self.wrong_case: Case | None = None  # the latest
    self._to_first, self._among = to_first, among
    self.found = Found()
    self._child = Child()
    self._outcomes: dict[str, Finding | None] = {}
    self._shrinks_until = 0.0
    self._last: Finding | None = None

  def explore(self, first_seed: int) -> Found:
    number = 0
    while time.monotonic() < self.end and self.found.programs < self._most:
      if self._to_first and self.found.findings:
        break
      self._round(first_seed * 10_000 + number)
      number += 1
    self._child.close()
    return self.found

  def is_wrong(self, case: Case) -> bool:
    """Runs one case; True if it goes wrong."""
    finding = self._try(case)
    self._child.close()
    return finding is not None

  def _round(self, number: int) -> None:
    self._last, self._shrinks_until = None, 0.0

    @seed(number)
    @settings(
      max_examples=8,
      database=None,
      deadline=None,
      phases=[Phase.generate, *([] if self._to_first else [Phase.shrink])],
      suppress_health_check=list(HealthCheck),
      report_multiple_bugs=False,
      print_blob=False,
    )
    @given(cases())
    def one(case: Case) -> None:
      self.drawn += 1
      finding = self._try(case) if self._among(case) else None
      if finding is not None:
        self._last, self.wrong_case = finding, case
        raise _FoundOne

    try:
      one()
    except _FoundOne:
      assert self._last is not None
      self.found.findings.append(self._last)
      program = self._last.source.removeprefix(HEAD).strip()
      print(f"--- {self._last.kind}: {self._last.said[:1500]}\n\n{program}\n", flush=True)

  def _try(self, case: Case) -> Finding | None:
    """Gives the finding of a case, if it is the first of its kind."""
    now = time.monotonic()
    shrinking = self._last is not None
    if shrinking and not self._shrinks_until:
      self._shrinks_until = now + SHRINKING
    machine = Machine()
    try:
      results, events = machine.call(case.program)
    except Ambiguous:
      self.found.ambiguous += 1
      reject()
    ran = sum(event.name == case.armed for event, _ in events)
    source = case.source(twin=False, machine=machine, ran=ran)
    if source in self._outcomes:
      return self._outcomes[source]
    if now > (self._shrinks_until if shrinking else self.end):
      return None
    finding = self._judge(case, source, results, events)
    if finding is not None and finding.kind in OF_VALUES and _is_chaotic(case.program, results):
      self.found.ambiguous += 1
      finding = None
    if finding is not None and any(
      other.like() == finding.like() and other.ops <= finding.ops for other in self.found.findings
    ):
      finding = None
    if shrinking and finding is not None and self._last and finding.kind != self._last.kind:
      finding = None  # another fault
    self._outcomes[source] = finding
    return finding

  def _judge(
    self, case: Case, source: str, results: list[np.ndarray], events: list[tuple[Event, Lane]]
  ) -> Finding | None:
    # Which programs are looked through is the text's: a shrunk one is, too.
    keeps = self._last is not None and self._last.kind == "kept"
    keeps = keeps or zlib.crc32(source.encode()) % LOOKED_THROUGH == 0
    # `last_error()` keeps what failed, and JAX keeps functions of a `checkpoint` in a `shard_map`.
    keeps = keeps and case.way not in (*NEEDS_ERRORS, *checks.WAYS)
    keeps = keeps and not any(
      "shard_map" in around and "remat" in op.transformation
      for op, around in case.program.body.ops_within()
    )
    answer = self._child.run(source, keeps)
    self.found.programs += 1
    ops = case.ops()
    wrong = lambda kind, said: Finding(kind, said, ops, source)
    if "raised" in answer:
      said = f"{answer['raised']}: {answer['message']}"
      if words := refusals.known(said):
        self.found.refused += 1
        self.found.counts.add_refused(words, ops)
        return None
      if answer["raised"] in ("died", "hangs"):
        return wrong(answer["raised"], answer["message"])
      of_twin = dataclasses.replace(case, way=TWINS.get(case.way, case.way))
      twin = self._child.run(of_twin.source(twin=True, machine=Machine()))
      own = case.armed != "" and answer["raised"] in OF_ARMED
      if not own and twin.get("raised") == answer["raised"]:
        self.found.refused += 1
        return None
      return wrong("raised", f"{said}\n{answer['traceback']}")
    ordered = _ordered(case.program)
    devices = case.way in SPLIT or any(
      isinstance(op, lanes.ShardMap) for op in case.program.body.ops()
    )
    for executions, came in answer["calls"]:
      if said := judge.wrong_results(executions, results):
        return wrong("results", said)
      if said := judge.wrong_events(came, events, len(executions), devices):
        return wrong("events", said)
      for names in ordered if len(executions) == 1 and not devices else ():
        if said := judge.wrong_order(came, events, names):
          return wrong("order", said)
    if answer.get("kept"):
      return wrong("kept", f"{answer['kept']} are alive after their program")
    feeds = sum(op.part.startswith("feed") for op in case.program.body.ops())
    if answer["threads"] > 8 + feeds:  # each has a thread
      return wrong("threads", f"{answer['threads']} more than before")
    self.found.counts.add_right(JAX, case.pairs(), devices or case.way in OVER_DEVICES)
    return None


def _is_chaotic(program: Program, results: Sequence[np.ndarray]) -> bool:
  """True if a rounding of the inputs decides the results, as in a loop that squares its carry."""
  inputs = [x * (1 + ROUNDING) if x.dtype.kind == "f" else x for x in program.inputs]
  try:
    others, _ = Machine().call(dataclasses.replace(program, inputs=tuple(inputs)))
  except Ambiguous:
    return True
  return any(
    not np.allclose(a, b, judge.RTOL / 4, judge.ATOL / 4)
    for a, b in zip(results, others, strict=True)
  )


def _ordered(program: Program) -> list[set[str]]:
  """Sets of names whose events come in the program's order: gates, the taps of a channel, ..."""
  gates, callbacks, functions, old, channels = set(), set(), set(), set(), []
  far = set()  # in workers, whose notes come at the end
  for op in program.body.ops():
    if isinstance(op, (calls.Call, forms.FormCall)) and op.effect == "ordered":
      installed = isinstance(op, calls.Call) and op.form == "install"
      in_workers = isinstance(op, forms.FormCall) and op.kind == "in workers"
      (callbacks if installed else far if in_workers else gates).add(op.name)
    if isinstance(op, loops.Tickets) and op.is_named and "scan" in op.kind:
      channels.append({op.name})
    if isinstance(op, old_interfaces.IdTap):
      old.add(op.name)
    if isinstance(op, in_order.InOrder):
      {"tap ordered": functions, "gate ordered": gates, "id_tap": old}[op.kind].add(op.name)
    if isinstance(op, parts.Tap) and op.ordered:
      if op.channel:
        channels.append({op.name})
      else:
        functions.add(op.name)
  return [gates, far, callbacks, functions, old, *channels]


def search(
  seconds: float, first: int, jobs: int, save: str = "", counts_file: str = "", only: str = "",
  most: int = sys.maxsize,
) -> Found:  # fmt: skip
  """Explores in several processes, `most` programs in each; saves what is found."""
  found = Found()
  if jobs == 1:
    found.add(_explore(seconds, first, only, most))
  else:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
      seeds = range(first, first + jobs)
      for part in pool.map(_explore, [seconds] * jobs, seeds, [only] * jobs, [most] * jobs):
        found.add(part)
  if save:
    folder = pathlib.Path(save)
    folder.mkdir(parents=True, exist_ok=True)
    for i, finding in enumerate(found.findings):
      said = "".join(f"# {line}\n" for line in finding.said.splitlines())
      (folder / f"{first}_{i}_{finding.kind}.py").write_text(said + finding.source)
  if counts_file:
    whole = counts.read(pathlib.Path(counts_file))
    whole.add(found.counts)
    whole.write(pathlib.Path(counts_file))
  return found


def _explore(seconds: float, first: int, only: str, most: int) -> Found:
  for kind in ("part", "transformation"):
    some = [d for d in DRAWN[kind] if re.search(only, f"{d.__module__}.{d.__name__}")]
    DRAWN[kind][:] = some or DRAWN[kind]
  return Explorer(seconds, most=most).explore(first)
