# SPDX-License-Identifier: Apache-2.0
"""The public names of the package, and the modules that define them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from callgate._core import shown

MODULES = {
  "breakpoint": "callgate._breakpoint.breakpoint",
  "Buffer": "callgate._callgate",
  "Context": "callgate._callgate",
  "ExecutionStage": "callgate._callgate",
  "Checkpoints": "callgate._checkpoints.checkpoints",
  "CaptureError": "callgate._core.errors",
  "CheckError": "callgate._core.errors",
  "CompileError": "callgate._core.errors",
  "ConsumerError": "callgate._core.errors",
  "EndOfFeed": "callgate._core.errors",
  "EscapedViewError": "callgate._core.errors",
  "GateDefinitionError": "callgate._core.errors",
  "GateError": "callgate._core.errors",
  "GateTimeoutError": "callgate._core.errors",
  "HandleError": "callgate._core.errors",
  "InputWriteError": "callgate._core.errors",
  "KernelError": "callgate._core.errors",
  "KernelFileError": "callgate._core.errors",
  "ProcessError": "callgate._core.errors",
  "RecordedError": "callgate._core.errors",
  "ReplayError": "callgate._core.errors",
  "ResultError": "callgate._core.errors",
  "VerifyError": "callgate._core.errors",
  "WorkerError": "callgate._core.errors",
  "last_error": "callgate._core.failures",
  "Envs": "callgate._envs.envs",
  "envs": "callgate._envs.envs",
  "WrappedEnvs": "callgate._envs.wrapped",
  "ExplainedCall": "callgate._explain.call",
  "Explanation": "callgate._explain.explain",
  "explain": "callgate._explain.explain",
  "Feed": "callgate._feed.feed",
  "feed": "callgate._feed.feed",
  "Ticket": "callgate._futures.ticket",
  "check": "callgate._gate.check",
  "Gate": "callgate._gate.gate",
  "call": "callgate._gate.gate",
  "gate": "callgate._gate.gate",
  "stats": "callgate._gate.stats",
  "trace": "callgate._gate.stats",
  "cfunc": "callgate._kernel.c.cfunc",
  "cpp": "callgate._kernel.cpp.cpp",
  "cuda": "callgate._kernel.cuda.cuda",
  "cupy": "callgate._kernel.cuda.cupy",
  "numba_cuda": "callgate._kernel.cuda.numba_cuda",
  "triton": "callgate._kernel.cuda.triton",
  "ElementwiseKernel": "callgate._kernel.elementwise.elementwise",
  "elementwise": "callgate._kernel.elementwise.elementwise",
  "LoadedKernels": "callgate._kernel.files",
  "load_kernels": "callgate._kernel.files",
  "save_kernels": "callgate._kernel.files",
  "BenchmarkResult": "callgate._kernel.kernel",
  "Kernel": "callgate._kernel.kernel",
  "Library": "callgate._kernel.library",
  "library": "callgate._kernel.library",
  "numba": "callgate._kernel.numba.numba",
  "kernel": "callgate._kernel.peers.kernel",
  "bars": "callgate._loops.everywhere",
  "fori_loop": "callgate._loops.loops",
  "scan": "callgate._loops.loops",
  "while_loop": "callgate._loops.loops",
  "Progress": "callgate._loops.progress",
  "progress": "callgate._loops.progress",
  "NanReport": "callgate._nan.find",
  "find_nan": "callgate._nan.find",
  "held": "callgate._objects.collect",
  "Handle": "callgate._objects.handle",
  "Hold": "callgate._objects.hold",
  "hold": "callgate._objects.hold",
  "use": "callgate._objects.use",
  "LinearSolver": "callgate._objects.linear",
  "linear_solver": "callgate._objects.linear",
  "root": "callgate._objects.root",
  "Recording": "callgate._replay.record",
  "record": "callgate._replay.record",
  "Replay": "callgate._replay.replay",
  "replay": "callgate._replay.replay",
  "barrier": "callgate._runtime.barrier",
  "errors": "callgate._runtime.barrier",
  "config": "callgate._runtime.config",
  "export_checks": "callgate._runtime.targets",
  "Run": "callgate._runs.run",
  "run": "callgate._runs.run",
  "Server": "callgate._serve.serve",
  "serve": "callgate._serve.serve",
  "Knob": "callgate._steer.knob",
  "knob": "callgate._steer.knob",
  "stop": "callgate._steer.stop",
  "stop_reason": "callgate._steer.stop",
  "stop_requested": "callgate._steer.stop",
  "assemble": "callgate._stream.assemble",
  "StreamReader": "callgate._stream.reader",
  "open_stream": "callgate._stream.reader",
  "StreamRecord": "callgate._stream.records",
  "Alert": "callgate._tap.alert",
  "AlertListener": "callgate._tap.alert",
  "alert": "callgate._tap.alert",
  "on_alert": "callgate._tap.alert",
  "Channel": "callgate._tap.channel",
  "channel": "callgate._tap.channel",
  "print": "callgate._tap.print",
  "BatchInfo": "callgate._tap.records",
  "Record": "callgate._tap.records",
  "TapInfo": "callgate._tap.records",
  "channel_stats": "callgate._tap.tap",
  "tap": "callgate._tap.tap",
  "TorchFunction": "callgate._torch.torch",
  "TorchModule": "callgate._torch.torch",
  "torch": "callgate._torch.torch",
  "VerifyReport": "callgate._verify.report",
  "VerifyResult": "callgate._verify.report",
  "verify_all": "callgate._verify.verify",
  "Thread": "callgate._places.threads",
  "thread": "callgate._places.threads",
  "Workers": "callgate._places.workers",
  "workers": "callgate._places.workers",
  "install": "callgate.compat._callbacks.install",
  "uninstall": "callgate.compat._callbacks.install",
}


def get(name: str) -> Any:
  """Imports a public object at its first use."""
  return getattr(importlib.import_module(MODULES[name]), name)


def publish() -> dict[str, Any]:
  """Returns the imported public objects, after setting their module to "callgate"."""
  modules = {name: sys.modules.get(module) for name, module in MODULES.items()}
  found = {name: getattr(module, name) for name, module in modules.items() if hasattr(module, name)}
  with shown.changing:
    for value in found.values():
      if getattr(value, "__module__", "").startswith("callgate."):
        shown.show(value)
        value.__module__ = "callgate"
  return found
