"""Kernels in files: `callgate.save_kernels` and `callgate.load_kernels`.

A file is a zip archive. `manifest.json` holds the kernels' forms (`Kernel.saved_form`) as JSON; an
object {"$bytes": digest} in it stands for the member `bytes/<digest>`, whose SHA-256 that is. A
kind of kernel registers the function that makes a kernel of its form again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import zipfile
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from callgate import _callgate
from callgate._build import toolchain
from callgate._build.files import kept_folder, made_folder, private_folder, read, write
from callgate._core import errors, options, registry
from callgate._core.errors import GateDefinitionError, GateError, KernelFileError
from callgate._core.paths import replaced
from callgate._kernel.kernel import Kernel

_FORMAT = "callgate kernels"
_VERSION = 1
_MANIFEST = "manifest.json"
_kinds: dict[str, Callable[[dict[str, Any]], Kernel]] = {}
_open: set[LoadedKernels] = set()


def register_kind(kind: str, restore: Callable[[dict[str, Any]], Kernel]) -> None:
  """Has `restore` make the kernels whose form says "kind": `kind`. Tuples come back as lists."""
  _kinds[kind] = restore


def no_new_calls(name: str) -> Callable[..., Any]:
  """The `out` of a loaded kernel: programs know their results, and nothing else calls it."""

  def out(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise GateDefinitionError(
      f"kernel '{name}' was loaded from a file, for programs that were traced elsewhere; expected "
      "it to be defined here for new calls"
    )

  return out


def compiled_form(libraries: Mapping[str, Path], *, native: bool) -> dict[str, Any]:
  """The form of a kernel's shared libraries, by the instance of its template that each has.

  Args:
    libraries: the files. One that is gone, of a cache that was emptied, is left out.
    native: they were compiled for this machine's CPU, not for its architecture.
  """
  contents: dict[str, bytes] = {}
  for instance, path in libraries.items():
    with contextlib.suppress(OSError):
      contents[instance] = path.read_bytes()
  machine = _machine(native=native)
  return {"libraries": contents, "machine": machine, "abi": _callgate.KERNEL_ABI}


def installed(compiled: Mapping[str, Any]) -> dict[str, Path]:
  """The libraries of a `compiled_form` as files, by instance; none where they don't fit."""
  fits = compiled["machine"] in (_machine(native=True), _machine(native=False))
  if not fits or compiled["abi"] != _callgate.KERNEL_ABI:
    return {}
  return {instance: _install(content) for instance, content in compiled["libraries"].items()}


def _machine(*, native: bool) -> str:
  if not native:
    return platform.machine()
  return f"{platform.machine()} {hashlib.sha256(toolchain.cpu().encode()).hexdigest()}"


def _install(library: bytes) -> Path:
  """The library as a file in the cache; in a folder of this process where there can't be one."""
  digest = hashlib.sha256(library).hexdigest()
  names, file = ("loaded", digest[:2]), f"{digest}.so"
  with contextlib.suppress(OSError):
    kept = kept_folder(*names) / file
    if hashlib.sha256(read(kept)).hexdigest() == digest:
      return kept
  path = made_folder(*names, quiet=True) / file
  try:
    write(path, library)
  except OSError as error:
    path = private_folder(error, *names, quiet=True) / file
    write(path, library)
  return path


# --- Saving -----------------------------------------------------------------------------------


def save_kernels(
  path: str | os.PathLike[str], kernels: Iterable[Kernel] | Kernel | None = None
) -> None:
  """Writes kernels to a file, for programs that `jax.export` takes to other processes.

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

  A process that loads the file with `load_kernels` can call the program, without the code that
  defined the kernels. It holds their sources and what has been compiled of them: where the CPU is
  the same no compiler is needed. Derivative rules, `out` and the like stay behind: a program holds
  what it needs of them.

  Args:
    path: of the file, which is replaced in one step.
    kernels: a kernel or several; None for all that are alive and can travel: those that
      `callgate.cpp` and `callgate.numba` made.

  Raises:
    GateDefinitionError: a kernel that was given can't travel: a library of yours, or C code at an
      address.
    OSError: the file can't be written.
  """
  path = options.path("save_kernels", "path", path)
  if isinstance(kernels, Kernel):
    kernels = [kernels]
  elif kernels is not None:
    if isinstance(kernels, str):
      options.refuse("save_kernels", "kernels", "a kernel or several", kernels)
    try:
      kernels = list(dict.fromkeys(kernels))
    except TypeError:  # no iterable, or one of something else
      options.refuse("save_kernels", "kernels", "a kernel or several", kernels)
  chosen = list(kernels) if kernels is not None else _travelling()
  forms: list[dict[str, Any]] = []
  for kernel in chosen:
    form = kernel.saved_form() if isinstance(kernel, Kernel) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if form is None:
      raise GateDefinitionError(
        f"callgate.save_kernels: kernels: expected kernels that callgate.cpp or "
        f"callgate.numba made, got {kernel!r}, whose code is not callgate's to copy; make it "
        "anew, under the same name, where the program is loaded"
      )
    forms.append(form)
  members: dict[str, bytes] = {}
  manifest = {
    "format": _FORMAT,
    "version": _VERSION,
    "kernels": [_without_bytes(form, members) for form in forms],
  }
  text = json.dumps(manifest, indent=1)
  with replaced(Path(path)) as made, zipfile.ZipFile(made, "x") as archive:
    _write(archive, text, members)


def _travelling() -> list[Kernel]:
  live = [kernel for _, kernel in sorted(registry.operations()) if isinstance(kernel, Kernel)]
  return [kernel for kernel in live if kernel.saved_form() is not None]


def _without_bytes(value: Any, members: dict[str, bytes]) -> Any:
  """The value as JSON has it; bytes go to the archive's members."""
  if isinstance(value, bytes):
    digest = hashlib.sha256(value).hexdigest()
    members[digest] = value
    return {"$bytes": digest}
  if isinstance(value, dict):
    entries = cast("dict[str, Any]", value)
    return {key: _without_bytes(entry, members) for key, entry in entries.items()}
  if isinstance(value, (list, tuple)):
    return [_without_bytes(entry, members) for entry in cast("list[Any]", value)]
  return value


def _write(archive: zipfile.ZipFile, manifest: str, members: Mapping[str, bytes]) -> None:
  contents: dict[str, Any] = {_MANIFEST: manifest}
  contents.update((f"bytes/{digest}", content) for digest, content in members.items())
  for name, content in contents.items():
    # A ZipInfo has a fixed date: the same kernels make the same file.
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


# --- Loading ----------------------------------------------------------------------------------


class LoadedKernels:
  """The kernels that `load_kernels` has loaded; a context manager.

  They stay until `close()`, whether or not this object is kept; programs that were loaded before
  keep what they call beyond that.

  Attributes:
    names: of the kernels.
  """

  def __init__(self, kernels: Iterable[Kernel]) -> None:
    self._kernels = list(kernels)
    self.names = tuple(kernel.name for kernel in self._kernels)
    _open.add(self)

  def close(self) -> None:
    """Gives the names free for other kernels, once no program calls these any more."""
    self._kernels.clear()
    _open.discard(self)

  def __enter__(self) -> LoadedKernels:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close()

  def __repr__(self) -> str:
    return f"<loaded kernels: {', '.join(self.names)}>"


def load_kernels(path: str | os.PathLike[str]) -> LoadedKernels:
  """Loads the kernels of a file that `save_kernels` wrote, for programs that name them.

  ```python
  import callgate as cg, jax.numpy as jnp
  from jax import export

  cg.load_kernels("program.kernels")
  with open("program.bin", "rb") as file:
    program = export.deserialize(bytearray(file.read()))
  program.call(jnp.ones(3))
  ```

  What was compiled is used where the CPU is the same; the source is compiled otherwise, templates
  when a program is loaded that names them. **Loading a file runs code that is in it**, as importing
  a module does: load files that you trust. The checks find damage, not intent.

  Args:
    path: of the file.

  Returns:
    A `LoadedKernels`. The kernels stay until its `close()`; it need not be kept.

  Raises:
    KernelFileError: the file is damaged, of another version, or no file of kernels.
    ValueError: a name is taken by another live gate or kernel. (The same kernel, defined or loaded
      before, is used as it is.)
    CompileError: the source had to be compiled, and there is no compiler or it refuses it.
    FileNotFoundError: there is no such file.
  """
  forms = _read_archive(Path(options.path("load_kernels", "path", path)))
  known = {form["name"]: _known(path, form) for form in forms}
  kernels: list[Kernel] = []
  for form in forms:
    kernel = known[form["name"]]
    if kernel is None:
      kernel = _restored(path, form)
    else:
      with _taking(path, form):
        kernel.take_compiled(form.get("compiled"))
    kernels.append(kernel)
  return LoadedKernels(kernels)


def _known(path: Any, form: dict[str, Any]) -> Kernel | None:
  """The live kernel of that name, if it is this one; raises where it is another."""
  live = registry.get(form["name"])
  if live is None:
    return None
  own = live.saved_form() if isinstance(live, Kernel) else None
  if own is None or _definition(own) != _definition(form):
    raise ValueError(
      f"callgate.load_kernels: '{path}' has a kernel '{form['name']}', a name that another live "
      f"{getattr(live, 'kind', 'gate')} of this process has; expected the file's names to be free, "
      "or to be those of the same kernels"
    )
  return live


def _definition(form: dict[str, Any]) -> dict[str, Any]:
  """What tells kernels apart, the same for a form before and after it was in a file."""
  return _without_bytes({key: value for key, value in form.items() if key != "compiled"}, {})


def _restored(path: Any, form: dict[str, Any]) -> Kernel:
  restore = _kinds.get(form["kind"])
  if restore is None:
    raise KernelFileError(
      f"callgate.load_kernels: '{path}', kernel '{form['name']}': expected a kind that this "
      f"callgate knows ({', '.join(sorted(_kinds))}), got '{form['kind']}'"
    )
  with _taking(path, form):
    return restore(form)


@contextlib.contextmanager
def _taking(path: Any, form: dict[str, Any]) -> Generator[None]:
  """What a form of the wrong shape makes fail is the file's fault."""
  try:
    yield
  except (errors.CompileError, KernelFileError):
    raise
  except (AttributeError, LookupError, TypeError, ValueError, RecursionError, GateError) as error:
    problem = f"no {error} in it" if isinstance(error, KeyError) else error
    raise KernelFileError(
      f"callgate.load_kernels: '{path}', kernel '{form['name']}': expected what "
      f"callgate.save_kernels wrote, got something damaged: {problem}"
    ) from error


def _read_archive(path: Path) -> list[dict[str, Any]]:
  content = path.read_bytes()
  try:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
      manifest = json.loads(archive.read(_MANIFEST))
      _check_version(path, manifest)
      return [_checked_form(_with_bytes(form, archive)) for form in manifest["kernels"]]
  except KernelFileError:
    raise
  except Exception as error:  # any bytes: each compression and each field has errors of its own
    raise KernelFileError(
      f"callgate.load_kernels: expected a file that callgate.save_kernels wrote, got '{path}', "
      f"which is damaged or something else: {error}"
    ) from error


def _checked_form(form: Any) -> dict[str, Any]:
  for key in ("name", "kind"):
    if not isinstance(form[key], str):
      raise ValueError(f"a kernel's {key} is {form[key]!r}")
  return form


def _check_version(path: Path, manifest: Any) -> None:
  if manifest["format"] != _FORMAT:
    raise ValueError(f"its format is {manifest['format']!r}")
  if manifest["version"] != _VERSION:
    raise KernelFileError(
      f"callgate.load_kernels: '{path}': expected version {_VERSION} of the format, got "
      f"{manifest['version']}; save the kernels again with this version of callgate"
    )


def _with_bytes(value: Any, archive: zipfile.ZipFile) -> Any:
  if isinstance(value, list):
    return [_with_bytes(entry, archive) for entry in cast("list[Any]", value)]
  if not isinstance(value, dict):
    return value
  entries = cast("dict[str, Any]", value)
  if "$bytes" not in entries:
    return {key: _with_bytes(entry, archive) for key, entry in entries.items()}
  content = archive.read(f"bytes/{entries['$bytes']}")
  if hashlib.sha256(content).hexdigest() != entries["$bytes"]:
    raise ValueError(f"the checksum of 'bytes/{entries['$bytes']}' differs")
  return content
