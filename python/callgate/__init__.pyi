# SPDX-License-Identifier: Apache-2.0
"""The names of the package for type checkers; `_names.py` says where each comes from."""

from callgate import executors, sinks
from callgate._breakpoint.breakpoint import breakpoint
from callgate._callgate import Buffer, Context, ExecutionStage
from callgate._checkpoints.checkpoints import Checkpoints
from callgate._core.errors import (
  CaptureError,
  CheckError,
  CompileError,
  ConsumerError,
  EndOfFeed,
  EscapedViewError,
  GateDefinitionError,
  GateError,
  GateTimeoutError,
  HandleError,
  InputWriteError,
  KernelError,
  KernelFileError,
  ProcessError,
  RecordedError,
  ReplayError,
  ResultError,
  VerifyError,
  WorkerError,
)
from callgate._core.failures import last_error
from callgate._envs.envs import Envs, envs
from callgate._envs.wrapped import WrappedEnvs
from callgate._explain.call import ExplainedCall
from callgate._explain.explain import Explanation, explain
from callgate._feed.feed import Feed, feed
from callgate._futures.ticket import Ticket
from callgate._gate.check import check
from callgate._gate.gate import Gate, call, gate
from callgate._gate.stats import stats, trace
from callgate._kernel.c.cfunc import cfunc
from callgate._kernel.cpp.cpp import cpp
from callgate._kernel.cuda.cuda import cuda
from callgate._kernel.cuda.cupy import cupy
from callgate._kernel.cuda.numba_cuda import numba_cuda
from callgate._kernel.cuda.triton import triton
from callgate._kernel.elementwise.elementwise import ElementwiseKernel, elementwise
from callgate._kernel.files import LoadedKernels, load_kernels, save_kernels
from callgate._kernel.kernel import BenchmarkResult, Kernel
from callgate._kernel.library import Library, library
from callgate._kernel.numba.numba import numba
from callgate._kernel.peers.kernel import kernel
from callgate._loops.everywhere import bars
from callgate._loops.loops import fori_loop, scan, while_loop
from callgate._loops.progress import Progress, progress
from callgate._nan.find import NanReport, find_nan
from callgate._objects.collect import held
from callgate._objects.handle import Handle
from callgate._objects.hold import Hold, hold
from callgate._objects.linear import LinearSolver, linear_solver
from callgate._objects.root import root
from callgate._objects.use import use
from callgate._places.threads import Thread, thread
from callgate._places.workers import Workers, workers
from callgate._replay.record import Recording, record
from callgate._replay.replay import Replay, replay
from callgate._runs.run import Run, run
from callgate._runtime.barrier import barrier, errors
from callgate._runtime.config import config
from callgate._runtime.targets import export_checks
from callgate._serve.serve import Server, serve
from callgate._steer.knob import Knob, knob
from callgate._steer.stop import stop, stop_reason, stop_requested
from callgate._stream.assemble import assemble
from callgate._stream.reader import StreamReader, open_stream
from callgate._stream.records import StreamRecord
from callgate._tap.alert import Alert, AlertListener, alert, on_alert
from callgate._tap.channel import Channel, channel
from callgate._tap.print import print
from callgate._tap.records import BatchInfo, Record, TapInfo
from callgate._tap.tap import channel_stats, tap
from callgate._torch.torch import TorchFunction, TorchModule, torch
from callgate._verify.report import VerifyReport, VerifyResult
from callgate._verify.verify import verify_all
from callgate.compat._callbacks.install import install, uninstall

__version__: str

__all__ = [
  "Alert",
  "AlertListener",
  "BatchInfo",
  "BenchmarkResult",
  "Buffer",
  "CaptureError",
  "Channel",
  "CheckError",
  "Checkpoints",
  "CompileError",
  "ConsumerError",
  "Context",
  "ElementwiseKernel",
  "EndOfFeed",
  "Envs",
  "EscapedViewError",
  "ExecutionStage",
  "ExplainedCall",
  "Explanation",
  "Feed",
  "Gate",
  "GateDefinitionError",
  "GateError",
  "GateTimeoutError",
  "Handle",
  "HandleError",
  "Hold",
  "InputWriteError",
  "Kernel",
  "KernelError",
  "KernelFileError",
  "Knob",
  "Library",
  "LinearSolver",
  "LoadedKernels",
  "NanReport",
  "ProcessError",
  "Progress",
  "Record",
  "RecordedError",
  "Recording",
  "Replay",
  "ReplayError",
  "ResultError",
  "Run",
  "Server",
  "StreamReader",
  "StreamRecord",
  "TapInfo",
  "Thread",
  "Ticket",
  "TorchFunction",
  "TorchModule",
  "VerifyError",
  "VerifyReport",
  "VerifyResult",
  "WorkerError",
  "Workers",
  "WrappedEnvs",
  "alert",
  "assemble",
  "barrier",
  "bars",
  "breakpoint",
  "call",
  "cfunc",
  "channel",
  "channel_stats",
  "check",
  "config",
  "cpp",
  "cuda",
  "cupy",
  "elementwise",
  "envs",
  "errors",
  "executors",
  "explain",
  "export_checks",
  "feed",
  "find_nan",
  "fori_loop",
  "gate",
  "held",
  "hold",
  "install",
  "kernel",
  "knob",
  "last_error",
  "library",
  "linear_solver",
  "load_kernels",
  "numba",
  "numba_cuda",
  "on_alert",
  "open_stream",
  "print",
  "progress",
  "record",
  "replay",
  "root",
  "run",
  "save_kernels",
  "scan",
  "serve",
  "sinks",
  "stats",
  "stop",
  "stop_reason",
  "stop_requested",
  "tap",
  "thread",
  "torch",
  "trace",
  "triton",
  "uninstall",
  "use",
  "verify_all",
  "while_loop",
  "workers",
]
