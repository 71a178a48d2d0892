# SPDX-License-Identifier: Apache-2.0
"""Kernels in files: `callgate.save_kernels` and `callgate.load_kernels`.

A file is a zip archive. `manifest.json` holds the kernels' forms (`Kernel.saved_form`) as JSON. An
object {"$bytes": digest} in it refers to the member `bytes/<digest>`; the digest is SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import platform
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from callgate import _callgate
from callgate._build import files, toolchain
from callgate._core import options, registry
from callgate._core.errors import CompileError, GateDefinitionError, GateError, KernelFileError
from callgate._core.paths import replaced
from callgate._core.public import core_of
from callgate._kernel.callee import KernelCallee
from callgate._kernel.kernel import Kernel

_FORMAT = "callgate kernels"
_VERSION = 1
_MANIFEST = "manifest.json"
# The modules with a `restore` function that makes a kernel of its form, by the form's "kind".
_KINDS = {"cpp": "callgate._kernel.cpp.cpp", "cuda": "callgate._kernel.cuda.cuda"}
_open: set[LoadedKernels] = set()  # atomic: single steps; emptied by `LoadedKernels.close`


def no_new_calls(name: str) -> Callable[..., NoReturn]:
  """The `out` of a loaded kernel: loaded programs have its results, and new code can't call it."""

  def out(*args: Any, **kwargs: Any) -> NoReturn:
    problem = "was loaded from a file; to call it in new programs, define it in this process"
    raise GateDefinitionError(f"kernel '{name}' {problem} before callgate.load_kernels")

  return out


def compiled_form(libraries: Mapping[str, Path], *, native: bool) -> dict[str, Any]:
  """Returns a kernel's libraries by template instance; native: compiled for this CPU only."""
  contents: dict[str, bytes] = {}
  for instance, path in libraries.items():
    with contextlib.suppress(OSError):  # the cache was emptied
      contents[instance] = path.read_bytes()
  return {"libraries": contents, "machine": _machine(native), "abi": _callgate.KERNEL_ABI}


def installed(compiled: Mapping[str, Any]) -> dict[str, Path]:
  """Writes a `compiled_form`'s libraries to files, by instance; {} if they don't fit here."""
  fits = compiled["machine"] in map(_machine, (True, False))
  if not fits or compiled["abi"] != _callgate.KERNEL_ABI:
    return {}
  return {instance: _install(content) for instance, content in compiled["libraries"].items()}


def _machine(native: bool) -> str:
  cpu = f" {hashlib.sha256(toolchain.cpu().encode()).hexdigest()}" if native else ""
  return f"{platform.machine()}{cpu}"


def _install(library: bytes) -> Path:
  """Writes a library to the cache, or to a folder of this process if the cache is not usable."""
  digest = hashlib.sha256(library).hexdigest()
  names, file = ("loaded", digest[:2]), f"{digest}.so"
  with contextlib.suppress(OSError):
    kept = files.kept_folder(*names) / file
    if files.read(kept) == library:
      return kept
  try:
    path = files.usable_folder(*names) / file
    files.write(path, library)
  except OSError as error:
    path = files.private_folder(error, *names, quiet=True) / file
    files.write(path, library)
  return path


# --- Saving -----------------------------------------------------------------------------------
def save_kernels(
  path: str | os.PathLike[str], kernels: Iterable[Kernel] | Kernel | None = None
) -> None:
  """Writes kernels to a file, for exported programs that run in other processes.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  from jax import export

  double = cg.cpp(\"\"\"
    void twice(cg::In<float> x, cg::Out<float> y) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i];
    }\"\"\", out=lambda x: x, name="save_kernels.double")

  exported = export.export(jax.jit(double), disabled_checks=cg.export_checks())(jnp.ones(3))
  with open("program.bin", "wb") as file:
    file.write(exported.serialize())
  cg.save_kernels("program.kernels", double)
  ```

  A process that loads the file with `load_kernels` can call the program without the code that
  defines the kernels. The file has their sources and their compiled code. A machine with the same
  CPU needs no compiler. Derivative rules, `out` and other options are not in the file.

  Args:
    path: the path of the file, which is replaced atomically.
    kernels: one kernel or several, of `callgate.cpp` or `callgate.cuda`. None saves all live
      kernels of these two.

  Raises:
    GateDefinitionError: a kernel is of another kind, such as a library's or a Numba kernel.
    OSError: the file can't be written.
  """
  path = options.path("save_kernels", "path", path)
  live = kernels is None
  given: Any = [kernel for _, kernel in sorted(registry.operations())] if live else kernels
  try:
    if isinstance(given, str):
      raise TypeError
    chosen: dict[Any, None] = dict.fromkeys([given] if isinstance(given, Kernel) else given)
  except TypeError:  # not an iterable of kernels
    options.refuse("save_kernels", "kernels", "a kernel or an iterable of kernels", kernels)
  forms = [(kernel, _saved_form(core_of(kernel))) for kernel in chosen]
  if not live and (other := [kernel for kernel, form in forms if form is None]):
    got = (
      f"{other[0]!r}, whose code callgate can't copy; define it in the other process, under "
      "the same name"
    )
    expected = "kernels of callgate.cpp or callgate.cuda"
    raise GateDefinitionError(f"callgate.save_kernels: kernels: expected {expected}, got {got}")
  saved = [form for _, form in forms if form is not None]
  text, members = _packed({"format": _FORMAT, "version": _VERSION, "kernels": saved})
  with replaced(Path(path)) as made, zipfile.ZipFile(made, "x") as archive:
    for name, content in [(_MANIFEST, text), *members.items()]:
      # A ZipInfo has a fixed date, so that equal kernels make equal files.
      archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def _saved_form(live: Any) -> dict[str, Any] | None:
  return live.saved_form() if isinstance(live, KernelCallee) else None


def _packed(value: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
  """Returns the value as JSON, and the bytes in it, for the archive's members."""
  members: dict[str, bytes] = {}

  def member(content: bytes) -> dict[str, str]:
    digest = hashlib.sha256(content).hexdigest()
    members[f"bytes/{digest}"] = content
    return {"$bytes": digest}

  return json.dumps(value, default=member, indent=1, sort_keys=True), members


# --- Loading ----------------------------------------------------------------------------------
class LoadedKernels(contextlib.AbstractContextManager["LoadedKernels"]):
  """The kernels that `load_kernels` has loaded, with their `names`; a context manager.

  The kernels stay until `close()` or the end of the `with` block, even if you don't keep this
  object. Programs that you loaded earlier keep their kernels.
  """

  def __init__(self, kernels: list[KernelCallee]) -> None:
    self._kernels = kernels
    self.names = tuple(kernel.name for kernel in kernels)
    _open.add(self)

  def close(self) -> None:
    """Releases the kernels' names for other kernels, once no program calls the kernels anymore."""
    self._kernels.clear()
    _open.discard(self)

  def __exit__(self, *error: object) -> None:
    self.close()

  def __repr__(self) -> str:
    return f"<loaded kernels: {', '.join(self.names)}>"


def load_kernels(path: str | os.PathLike[str]) -> LoadedKernels:
  """Loads the kernels of a file that `save_kernels` wrote, for programs that call them.

  ```python
  import callgate as cg, jax.numpy as jnp
  from jax import export

  cg.load_kernels("program.kernels")
  with open("program.bin", "rb") as file:
    program = export.deserialize(bytearray(file.read()))
  program.call(jnp.ones(3))
  ```

  Compiled code is used on a machine with the same CPU. On other machines callgate compiles the
  sources again; templates are compiled when you load a program that calls them.

  **Loading a file runs code that is in it**, like importing a module. Load only files that you
  trust. The checksums detect damage, not a malicious author.

  Args:
    path: the path of the file.

  Returns:
    A `LoadedKernels`. You need not keep it: the kernels stay until its `close()`.

  Raises:
    KernelFileError: the file is damaged, of another version, or not a file of kernels.
    ValueError: another gate or kernel has one of the names. An identical kernel is shared instead.
    CompileError: the source had to be compiled, and there is no compiler, or the compiler rejects
      it.
    FileNotFoundError: there is no such file.
  """
  forms = _read_archive(Path(options.path("load_kernels", "path", path)))
  known: list[Any] = [registry.get(form["name"]) for form in forms]
  for form, live in zip(forms, known, strict=True):  # before making any kernel
    own = _saved_form(live)
    # Forms without "compiled" identify kernels, before and after a kernel was in a file.
    same = own is not None and _packed({**own, "compiled": 0}) == _packed({**form, "compiled": 0})
    if live is not None and not same:
      other = f"another live {getattr(live, 'kind', 'gate')} of this process has"
      fault = f"'{path}' has a kernel '{form['name']}', a name that {other}"
      raise ValueError(
        f"callgate.load_kernels: {fault}; delete that one, or load the file in another process"
      )
  return LoadedKernels([_kernel_of_form(path, *pair) for pair in zip(forms, known, strict=True)])


def _kernel_of_form(path: Any, form: dict[str, Any], known: KernelCallee | None) -> KernelCallee:
  """Makes the kernel of a form. Reports a form of the wrong shape as damage of the file."""
  place = f"callgate.load_kernels: '{path}', kernel '{form['name']}'"
  if known is None and form["kind"] not in _KINDS:
    expected = f"one of {', '.join(sorted(_KINDS))}"
    raise KernelFileError(f"{place}: expected {expected}, got '{form['kind']}'")
  try:
    if known is None:
      made = importlib.import_module(_KINDS[form["kind"]]).restore(form)
      made.loaded = True
      return made
    known.take_compiled(form.get("compiled"))
    return known
  except (CompileError, KernelFileError):
    raise
  except (AttributeError, LookupError, TypeError, ValueError, RecursionError, GateError) as error:
    problem = f"{error} is missing" if isinstance(error, KeyError) else error
    expected = "expected a kernel that callgate.save_kernels wrote, got a damaged one"
    raise KernelFileError(f"{place}: {expected}: {problem}") from error


def _read_archive(path: Path) -> list[dict[str, Any]]:
  content = path.read_bytes()
  try:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
      text = archive.read(_MANIFEST)
      manifest = json.loads(text)
      if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}")
      if (version := manifest["version"]) != _VERSION:
        got = f"{version}; save the kernels again with this version of callgate"
        expected = f"expected version {_VERSION} of the format"
        raise KernelFileError(f"callgate.load_kernels: '{path}': {expected}, got {got}")

      def unpacked(entries: dict[str, Any]) -> Any:
        if "$bytes" not in entries:
          return entries
        content = archive.read(f"bytes/{entries['$bytes']}")
        if hashlib.sha256(content).hexdigest() != entries["$bytes"]:
          raise ValueError(f"the checksum of 'bytes/{entries['$bytes']}' differs")
        return content

      forms = json.loads(text, object_hook=unpacked)["kernels"]
      for form in forms:
        if not (isinstance(form["name"], str) and isinstance(form["kind"], str)):
          raise ValueError(f"a kernel has the name {form['name']!r} and the kind {form['kind']!r}")
      return forms
  except KernelFileError:
    raise
  except Exception as error:  # damaged bytes may raise anything
    got = f"'{path}', which is damaged or another kind of file: {error}"
    expected = "expected a file that callgate.save_kernels wrote"
    raise KernelFileError(f"callgate.load_kernels: {expected}, got {got}") from error
