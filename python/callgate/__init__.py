"""callgate: compiled JAX programs call anything, in microseconds, under every transformation."""

from callgate import _config, _control, _install, _progress_draw, _progress_lowering, _runtime
from callgate._callgate import Buffer, Context, ExecutionStage
from callgate._config import config
from callgate._install import install, uninstall
from callgate._progress import Progress, progress
from callgate.errors import (
  EscapedViewError,
  GateDefinitionError,
  GateError,
  GateTimeoutError,
  InputWriteError,
  ResultError,
  barrier,
  errors,
  last_error,
)
from callgate.export import export_checks
from callgate.gate import Gate, call, gate
from callgate.loops import fori_loop, scan, while_loop
from callgate.stats import stats, trace

__version__ = "0.1.0"

__all__ = [
  "Buffer",
  "Context",
  "EscapedViewError",
  "ExecutionStage",
  "Gate",
  "GateDefinitionError",
  "GateError",
  "GateTimeoutError",
  "InputWriteError",
  "Progress",
  "ResultError",
  "barrier",
  "call",
  "config",
  "errors",
  "export_checks",
  "fori_loop",
  "gate",
  "install",
  "last_error",
  "progress",
  "scan",
  "stats",
  "trace",
  "uninstall",
  "while_loop",
]

_runtime.start()
_config.start()
_install.start()
_control.start()
_progress_lowering.start()
_progress_draw.start()
