"""callgate: compiled JAX programs call anything, in microseconds, under every transformation."""

from callgate import _config, _control, _install, _runtime, sinks
from callgate._callgate import Buffer, Context, ExecutionStage
from callgate._config import config
from callgate._install import install, uninstall
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
  "ResultError",
  "barrier",
  "call",
  "config",
  "errors",
  "export_checks",
  "gate",
  "install",
  "last_error",
  "sinks",
  "stats",
  "trace",
  "uninstall",
]

_runtime.start()
_config.start()
_install.start()
_control.start()
