"""Puts the parts together: what `import callgate` does, in order.

What is below and has to reach up gets it handed down here.
"""

from __future__ import annotations

from callgate import (
  _compat,
  _config,
  _control,
  _delivery,
  _install,
  _names,
  _processes,
  _producer,
  _progress,
  _progress_draw,
  _progress_lowering,
  _runtime,
  channel,
  cpp,
  cuda,
  kernel_files,
  library,
)


def start() -> None:
  """Called once by `import callgate`."""
  _runtime.start()  # dtypes, hooks, FFI targets, partitioners, handlers of forks
  _runtime.at_end("hurry", _producer.limit_all)
  _runtime.at_end("leave", _processes.leave)
  _runtime.at_end("draw", _progress_draw.stop)
  _runtime.at_end("deliver", channel.close_all)
  _runtime.at_end("join", _producer.close_all)
  _processes.start()
  _progress_draw.start()
  _delivery.listen(_progress.note)
  _names.find_by(library.find)
  kernel_files.register_kind("cpp", cpp.restore)
  kernel_files.register_kind("cuda", cuda.restore)
  # Patches of JAX's rules, each in `_jax`.
  _control.start()
  _progress_lowering.start()
  _compat.keep_ordered_programs_off_cpp_path()
  # What the environment asks for.
  _config.start()
  _install.start()
