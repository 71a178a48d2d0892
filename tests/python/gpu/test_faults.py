# SPDX-License-Identifier: Apache-2.0
"""Each function of CUDA's driver fails once where callgate calls it: on the virtual GPU alone.

callgate gets the driver through failing_driver.c, so that its calls fail and none of XLA's. The
programs, failing_programs.py, run in a process beside this one: one for all of them, and new ones
where callgate's first call of a process is to fail, or after a crash.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FUNCTIONS = re.findall(r'X\(\w+, "(\w+)"', (ROOT / "src" / "cuda" / "driver.h").read_text())
SECONDS = 30  # a case that takes longer hangs

pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif("VIRTUAL_GPU" not in os.environ, reason="needs the virtual GPU"),
  pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

NO_MEMORY, LOST, UNSUPPORTED = 2, 719, 801
TEXTS = {NO_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY", LOST: "CUDA_ERROR_LAUNCH_FAILED"}
RAISES, UNHARMED, EITHER, DROPPED = "raises", "unharmed", "either", "dropped"


@dataclasses.dataclass(frozen=True)
class Fault:
  """One call of callgate's that fails, and what has to come of it.

  RAISES: the program's error says the function and its result. UNHARMED: the program goes on
  another way, and is right. EITHER: one of these, by which thread was first. DROPPED: it is right,
  and its tap's record counts as dropped.
  """

  program: str
  function: str
  comes: str = RAISES
  after: int = 0
  result: int = LOST
  count: int = 1
  thread: str = "*"  # "c": the one that waits for what the device has done; "p": others
  also: tuple[tuple[str, int], ...] = ()  # what fails in the same run, with which result
  says: tuple[str, ...] = ()  # in place of the function and the result
  new_process: bool = False
  first: bool = False  # the program's first run, else its second
  new_size: bool = False  # for which no memory is kept
  before: str | None = None  # a program that runs before

  @property
  def id(self) -> str:
    words = [self.program, self.function, *(name for name, _ in self.also), str(self.after)]
    words += [str(self.result), {"*": "", "c": "waiting", "p": "calling"}[self.thread]]
    return "-".join(filter(None, words)).replace(" ", "_")

  @property
  def where(self) -> str:
    return "what any call begins with" if self.function in HANDLER else self.program

  @property
  def texts(self) -> tuple[str, ...]:
    return self.says or (self.function, TEXTS[self.result])

  def case(self) -> dict[str, Any]:
    faults = [(self.function, self.result, self.after, self.count, self.thread)]
    faults += [(function, result, 0, 1, "*") for function, result in self.also]
    case = {"program": self.program, "faults": faults, "new_size": self.new_size}
    case["first"] = self.first or self.new_process or self.new_size
    # XLA can't record a graph again after an error in the middle of it, whosever that was.
    case["recompiled"] = self.kind == "graphs"
    return case | ({} if self.before is None else {"before": self.before})

  @property
  def kind(self) -> str:
    """Which process runs it: after a tap in a graph all taps of a process go another way."""
    if "recorded" in f"{self.program} {self.before}":
      return "graphs"
    return "devices" if "two devices" in self.program else ""


def faults(program: str, *functions: str, **options: Any) -> list[Fault]:
  return [Fault(program, function, **options) for function in functions]


HANDLER = ("cuStreamGetCtx", "cuCtxGetCurrent")  # what any call of XLA's begins with
START = ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount")
DEVICE = (
  *("cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
  *("cuCtxGetDevice", "cuCtxSetCurrent", "cuMemHostAlloc", "cuEventCreate"),
)
TO_HOST, TO_DEVICE = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"
ON_DEVICE = "cuMemcpyDtoDAsync_v2"
CAPTURE = ("cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode")
OBJECTS = ("cuStreamGetCaptureInfo_v2", "cuUserObjectCreate", "cuGraphRetainUserObject")
MODULE = ("cuThreadExchangeStreamCaptureMode", "cuModuleLoadData", "cuModuleGetFunction")
WAIT, HOLD, CALL = "cuEventSynchronize", "cuStreamWaitValue32_v2", "cuLaunchHostFunc"
ASK = "cuEventQuery"
NO_ROOM: dict[str, Any] = {"result": NO_MEMORY, "count": 2, "new_size": True}  # it is asked twice

FAULTS = [
  # -- a gate on copies in the host's memory, from the first call of a process on
  *(
    Fault("gate", name, new_process=True, says=(f"expected {name} of", "error 719"))
    for name in START
  ),
  *faults("gate", *DEVICE, new_process=True),
  Fault("gate", "cuDeviceGetCount", after=1, new_process=True),
  Fault("gate", "cuCtxSetCurrent", after=1, new_process=True),
  *faults("gate", *HANDLER, "cuEventRecord", TO_HOST, TO_DEVICE),
  Fault("gate", "cuEventRecord", after=1),
  Fault("gate", ASK, thread="p", says=(WAIT, TEXTS[LOST])),
  Fault("gate", ASK, UNHARMED, thread="c"),  # no more than memory is let go
  Fault("gate", "cuMemHostAlloc", new_size=True),
  Fault("gate", "cuMemHostAlloc", **NO_ROOM),
  Fault(
    *("gate", "cuMemHostAlloc", UNHARMED),
    **{**NO_ROOM, "count": 1},
    also=(("cuMemFreeHost", LOST),),
    before="gate",
  ),
  *(
    Fault("gate", TO_HOST, also=((name, LOST),), says=(TO_HOST, "CUDA error 719"))
    for name in ("cuGetErrorName", "cuGetErrorString")
  ),
  # -- on a thread of its own
  Fault("own", "cuEventCreate", new_process=True),
  *faults("own", *HANDLER, "cuEventRecord", TO_HOST, TO_DEVICE, HOLD),
  Fault("own", "cuCtxGetCurrent", after=1),
  Fault("own", "cuEventRecord", after=1),
  Fault("own", "cuMemHostAlloc", **NO_ROOM),
  Fault("own", WAIT, thread="p"),
  Fault("own", ASK, UNHARMED, thread="c"),
  Fault("own", HOLD, UNHARMED, result=UNSUPPORTED),
  Fault("own", CALL, also=((HOLD, UNSUPPORTED),)),
  Fault("own", TO_DEVICE, also=(("cuStreamSynchronize", LOST),)),
  # -- on the device
  *faults("returned", *HANDLER, "cuCtxSetCurrent", "cuStreamWaitEvent", ON_DEVICE),
  Fault("returned", "cuStreamGetCtx", after=1),
  Fault("returned", "cuPointerGetAttribute"),
  *faults("recorded gate", *HANDLER, "cuCtxSetCurrent", "cuStreamIsCapturing", after=3),
  # -- taps: small ones, those whose copies go aside, those that stay on the device, in graphs
  Fault("tap", "cuEventCreate", new_process=True),
  *faults("tap", *HANDLER, "cuStreamIsCapturing", TO_HOST, "cuEventRecord"),
  Fault("tap", "cuMemHostAlloc", new_process=True),
  # The process's own memory may be kept; where the driver registers none, its own will do.
  Fault("tap", "cuMemHostRegister_v2", UNHARMED, new_size=True),
  Fault("tap", "cuMemHostRegister_v2", DROPPED, **NO_ROOM),
  Fault(
    *("tap", "cuMemHostRegister_v2", UNHARMED),
    **{**NO_ROOM, "count": 1},
    also=(("cuMemHostUnregister", LOST),),
    before="large tap",
  ),
  Fault("tap", ASK, DROPPED),
  Fault("large tap", "cuStreamCreate", new_process=True),
  *faults("large tap", *HANDLER, "cuStreamWaitEvent", ON_DEVICE, TO_HOST, "cuEventRecord"),
  Fault("large tap", "cuEventRecord", after=1),
  Fault("large tap", "cuMemAlloc_v2", new_size=True),
  *faults("large tap", "cuMemAlloc_v2", "cuMemHostRegister_v2", comes=DROPPED, **NO_ROOM),
  Fault(
    *("large tap", "cuMemAlloc_v2", UNHARMED),
    **{**NO_ROOM, "count": 1},
    also=(("cuMemFree_v2", LOST),),
    before="large tap",
  ),
  Fault("large tap", ASK, DROPPED),
  Fault("large tap", CALL, before="recorded tap"),
  *faults("device tap", *HANDLER, ON_DEVICE, "cuEventRecord"),
  Fault("device tap", "cuMemAlloc_v2", DROPPED, **NO_ROOM),
  *faults("recorded tap", *HANDLER, *CAPTURE, CALL, TO_HOST),
  *faults("recorded tap", *HANDLER, *CAPTURE[:1], CALL, TO_HOST, after=3),
  *faults("recorded tap", *OBJECTS, comes=UNHARMED),
  Fault("recorded tap", OBJECTS[-1], UNHARMED, also=(("cuUserObjectRelease", LOST),)),
  # -- kernels: what can't be known of the device is compiled for any
  *faults("kernel", *START, comes=UNHARMED, new_process=True),
  *faults("kernel", "cuDeviceGet", "cuDeviceGetAttribute", comes=UNHARMED, first=True),
  *faults("kernel", *HANDLER, *MODULE, "cuFuncGetAttribute", "cuLaunchKernel", first=True),
  *faults("kernel", *HANDLER, "cuLaunchKernel"),
  *faults("recorded kernel", *HANDLER, "cuLaunchKernel", after=3),
  *faults("shared kernel", "cuMemsetD8Async", "cuLaunchKernel"),
  Fault(
    *("shared kernel", "cuFuncSetAttribute"),
    first=True,
    says=("102400 bytes of dynamic shared memory", TEXTS[LOST]),
  ),
  Fault("clustered kernel", "cuLaunchKernelEx"),
  Fault("dropped kernel", "cuModuleUnload", UNHARMED),
  # -- feeds: a thread of theirs brings items to the device, or the program where it is first
  Fault("feed", "cuInit", new_process=True, says=("expected cuInit of", "error 719")),
  Fault("feed", "cuStreamCreate", EITHER, new_process=True),
  *faults("feed", *HANDLER),
  *faults("feed", "cuStreamWaitEvent", TO_DEVICE, ON_DEVICE, "cuEventQuery", comes=EITHER),
  *faults("feed", "cuMemHostAlloc", "cuMemAlloc_v2", comes=EITHER, **NO_ROOM),
  # -- with a collective behind it, for which another device waits
  *faults("gate on two devices", "cuEventRecord", TO_HOST, TO_DEVICE),
  *faults("gate on two devices", *HANDLER),
  *faults("kernel on two devices", *HANDLER, "cuLaunchKernel"),
]

# Functions in src/cuda/driver.h that no program here can make fail.
NEVER_CALLED = {
  "cuEventDestroy_v2": "only where the host has no memory to keep an event",
}


class Worker:
  """A process that runs failing_programs.py."""

  def __init__(self, driver: Path, devices: int) -> None:
    environment = {**os.environ, "CALLGATE_CUDA_DRIVER": str(driver)}
    environment["VIRTUAL_GPU_CAPABILITY"] = "9.0"  # for clusters
    environment["VIRTUAL_GPU_DEVICES"] = str(devices)
    support = str(ROOT / "tests" / "python" / "support")
    environment["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), support])
    self.process = subprocess.Popen(
      [sys.executable, str(HERE / "failing_programs.py"), *FUNCTIONS],
      env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip

  def ask(self, case: dict[str, Any]) -> dict[str, Any]:
    """The answer, or {"gone": what happened}."""
    assert self.process.stdin is not None
    assert self.process.stdout is not None
    self.process.stdin.write(json.dumps(case).encode() + b"\n")
    answer, end = b"", time.monotonic() + SECONDS
    while not answer.endswith(b"\n"):
      left = max(end - time.monotonic(), 0)
      if not select.select([self.process.stdout], [], [], left)[0]:
        return {"gone": f"it hung for {SECONDS} s"}
      some = os.read(self.process.stdout.fileno(), 1 << 16)
      if not some:
        return {"gone": f"it ended with {self.process.wait()}"}
      answer += some
    return json.loads(answer)

  def end(self) -> None:
    self.process.kill()
    self.process.wait()
    for pipe in (self.process.stdin, self.process.stdout):
      if pipe is not None:
        pipe.close()


class Workers:
  """The workers that live, and the answers that they gave."""

  def __init__(self, driver: Path) -> None:
    self.driver = driver
    self.by_kind: dict[str, Worker] = {}
    self.answers: dict[Fault, dict[str, Any]] = {}

  def ask(self, fault: Fault) -> dict[str, Any]:
    if fault not in self.answers:
      if fault.new_process:
        self.end(fault.kind)
      devices = 2 if fault.kind == "devices" else 1
      worker = self.by_kind.get(fault.kind) or Worker(self.driver, devices)
      self.by_kind[fault.kind] = worker
      answer = worker.ask(fault.case())
      if "gone" in answer:
        self.end(fault.kind)
      self.answers[fault] = answer
    return self.answers[fault]

  def end(self, kind: str) -> None:
    if kind in self.by_kind:
      self.by_kind.pop(kind).end()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
  driver = tmp_path_factory.mktemp("driver") / "libfailing.so"
  functions = " ".join(f"X({name})" for name in FUNCTIONS)
  command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", f"-DFUNCTIONS={functions}"]
  subprocess.run([*command, str(HERE / "failing_driver.c"), "-o", str(driver), "-ldl"], check=True)
  made = Workers(driver)
  yield made
  for kind in list(made.by_kind):
    made.end(kind)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_call_that_fails_is_told_of_or_does_no_harm(workers: Workers, fault: Fault) -> None:
  answer = workers.ask(fault)
  assert "gone" not in answer
  assert "TimeoutError" not in answer["error"]  # of barrier(), where a program hangs
  assert set(answer["failed"]) == {fault.function, *(name for name, _ in fault.also)}
  if fault.comes == RAISES or (fault.comes == EITHER and answer["error"]):
    assert answer["value"] != "right"
    for text in fault.texts:
      assert text in answer["error"]
  else:
    assert (answer["error"], answer["value"]) == ("", "right")
  counts = answer.get("counts")
  if counts is not None and fault.comes == UNHARMED:
    assert counts["sent"] == counts["delivered"] > 0
  if fault.comes == DROPPED:
    assert counts == {"sent": 1, "delivered": 0, "dropped": 1, "pending": 0}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_the_next_run_of_the_program_is_right(workers: Workers, fault: Fault) -> None:
  answer = workers.ask(fault)
  assert "gone" not in answer
  then = answer["next"]
  assert (then["error"], then["value"], then.get("records", "right")) == ("", "right", "right")


# Where there is no driver, that holds for the whole process.
RAISING = [fault for fault in FAULTS if fault.comes == RAISES and fault.function not in START]


@pytest.mark.parametrize("where", dict.fromkeys(fault.where for fault in RAISING))
def test_the_error_says_which_gate_or_kernel_it_comes_from(workers: Workers, where: str) -> None:
  errors = [workers.ask(fault).get("error", "") for fault in RAISING if fault.where == where]
  assert [error for error in errors if "faulty_" not in error] == []


def test_every_function_of_the_driver_has_an_entry() -> None:
  failing = {name for fault in FAULTS for name in (fault.function, *dict(fault.also))}
  assert failing | set(NEVER_CALLED) == set(FUNCTIONS)
  assert not failing & set(NEVER_CALLED)
