"""callgate: compiled JAX programs call anything, in microseconds, under every transformation."""

from callgate import _start, sinks
from callgate._barrier import barrier
from callgate._callgate import Buffer, Context, ExecutionStage
from callgate._config import config
from callgate._install import install, uninstall
from callgate._print import print
from callgate._progress import Progress, progress
from callgate._records import BatchInfo, Record, TapInfo
from callgate._stream import StreamReader, open_stream
from callgate._stream_records import StreamRecord
from callgate._toolchain import CompileError
from callgate.cfunc import cfunc
from callgate.channel import Channel, channel
from callgate.check import check
from callgate.cpp import cpp
from callgate.cuda import cuda
from callgate.cupy import cupy
from callgate.elementwise import elementwise
from callgate.errors import (
  CaptureError,
  CheckError,
  ConsumerError,
  EndOfFeed,
  EscapedViewError,
  GateDefinitionError,
  GateError,
  GateTimeoutError,
  InputWriteError,
  KernelError,
  ProcessError,
  ResultError,
  errors,
  last_error,
)
from callgate.export import export_checks
from callgate.feed import Feed, feed
from callgate.gate import Gate, call, gate
from callgate.kernel import Kernel
from callgate.kernel_files import KernelFileError, LoadedKernels, load_kernels, save_kernels
from callgate.library import Library, library
from callgate.loops import fori_loop, scan, while_loop
from callgate.numba import numba
from callgate.numba_cuda import numba_cuda
from callgate.shards import assemble
from callgate.stats import stats, trace
from callgate.tap import channel_stats, tap
from callgate.torch import TorchFunction, TorchModule, torch
from callgate.triton import triton

__version__ = "0.1.0"

__all__ = [
  "BatchInfo",
  "Buffer",
  "CaptureError",
  "Channel",
  "CheckError",
  "CompileError",
  "ConsumerError",
  "Context",
  "EndOfFeed",
  "EscapedViewError",
  "ExecutionStage",
  "Feed",
  "Gate",
  "GateDefinitionError",
  "GateError",
  "GateTimeoutError",
  "InputWriteError",
  "Kernel",
  "KernelError",
  "KernelFileError",
  "Library",
  "LoadedKernels",
  "ProcessError",
  "Progress",
  "Record",
  "ResultError",
  "StreamReader",
  "StreamRecord",
  "TapInfo",
  "TorchFunction",
  "TorchModule",
  "assemble",
  "barrier",
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
  "errors",
  "export_checks",
  "feed",
  "fori_loop",
  "gate",
  "install",
  "last_error",
  "library",
  "load_kernels",
  "numba",
  "numba_cuda",
  "open_stream",
  "print",
  "progress",
  "save_kernels",
  "scan",
  "sinks",
  "stats",
  "tap",
  "torch",
  "trace",
  "triton",
  "uninstall",
  "while_loop",
]

_start.start()
