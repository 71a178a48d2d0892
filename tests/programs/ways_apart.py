# SPDX-License-Identifier: Apache-2.0
"""Ways that cost seconds each, so few programs take one: in processes of their own, mostly.

The program's file runs again there, with what stands in `PROGRAMS_FOLDER`, and leaves its calls.
"""

from __future__ import annotations

import asked

_ELSEWHERE = """
import pickle
import subprocess
import sys
import tempfile
folder = os.environ.get("PROGRAMS_FOLDER", "")
at = lambda name: os.path.join(folder, name)
def elsewhere(first=""):
  source = globals().get("SOURCE") or open(__file__).read()
  with open(at("program.py"), "w") as file:
    file.write(f"{first}\\nNAMES = {NAMES!r}\\n{source}")
  environment = {**os.environ, "PROGRAMS_FOLDER": folder}
  done = subprocess.run([sys.executable, at("program.py")], env=environment, capture_output=True,
    text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  with open(at("calls"), "rb") as file:
    calls.extend(pickle.load(file))
def three(run):
  for _ in range(3):
    execute(1, lambda: [run(*inputs)])
  with open(at("calls"), "wb") as file:
    pickle.dump(calls, file)
is_first = not folder
folder = folder or tempfile.mkdtemp()
"""

APART = {
  **asked.APART,
  "exported to another process": _ELSEWHERE
  + """
from jax import export
if is_first:
  exported = export.export(jax.jit(program), disabled_checks=cg.export_checks())(*inputs)
  with open(at("exported"), "wb") as file:
    file.write(exported.serialize())
  elsewhere()
else:
  with open(at("exported"), "rb") as file:
    three(jax.jit(export.deserialize(bytearray(file.read())).call))
""",
  "persistent cache": _ELSEWHERE
  + """
if is_first:
  elsewhere()
  elsewhere()
else:
  jax.config.update("jax_compilation_cache_dir", at("cache"))
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  three(jax.jit(program))
""",
  "jitted before the import": _ELSEWHERE
  + """
if is_first:
  elsewhere("import jax; before = jax.jit(lambda x: x + 1); before(1.0)")
else:
  before(1.0)
  three(jax.jit(program))
""",
}
