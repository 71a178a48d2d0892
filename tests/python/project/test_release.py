# SPDX-License-Identifier: Apache-2.0
"""The pieces of a release agree: versions, addresses, licenses, workflows."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shutil
import struct
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import callgate as cg

ROOT = Path(__file__).resolve().parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
VERSION: str = PROJECT["project"]["version"]
URLS: dict[str, str] = PROJECT["project"]["urls"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
IN_CHECKOUT = pytest.mark.skipif(not WORKFLOWS, reason="a source archive has no workflows")


def read(path: str | Path) -> str:
  return (ROOT / path).read_text(encoding="utf-8")


# --- version -----------------------------------------------------------------------------------
def test_the_version_is_that_of_the_installed_package() -> None:
  assert cg.__version__ == importlib.metadata.version("callgate")
  assert "__version__" not in vars(cg)  # it is read when it is asked for


def test_no_other_file_says_another_version() -> None:
  assert re.search(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE)[1] == VERSION
  assert "file(STRINGS pyproject.toml CALLGATE_VERSION_LINE" in read("CMakeLists.txt")
  headings = re.findall(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.MULTILINE)
  assert headings[0] in ("Unreleased", VERSION)
  released = [tuple(map(int, name.split("."))) for name in headings if name != "Unreleased"]
  assert released == sorted(released, reverse=True)
  assert not released or released[0] <= tuple(map(int, VERSION.split(".")))


def notes(folder: Path, changelog: str, *arguments: str) -> subprocess.CompletedProcess[str]:
  (folder / "tools").mkdir(exist_ok=True)
  script = folder / "tools" / "release_notes.py"
  script.write_text(read("tools/release_notes.py"))
  (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
  (folder / "CHANGELOG.md").write_text(changelog)
  command = [sys.executable, str(script), *arguments]
  return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_release_notes_are_the_changelogs_section_of_the_tag(tmp_path: Path) -> None:
  dated = "# C\n\n## [1.2.0] - 2030-01-02\n\n- New.\n\n## [1.1.0] - 2029-01-02\n\n- Old.\n"
  done = notes(tmp_path, dated, "v1.2.0")
  assert (done.returncode, done.stdout) == (0, "- New.\n")
  assert "expected the tag v1.2.0" in notes(tmp_path, dated, "v1.3.0").stderr
  assert "no section" in notes(tmp_path, dated.replace("1.2.0", "Unreleased")).stderr


# --- addresses, licenses -----------------------------------------------------------------------
SAYING_ADDRESSES = [
  ROOT / name
  for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff")
] + [ROOT / "mkdocs.yml", *(ROOT / ".github").rglob("*.yml"), *(ROOT / "docs").rglob("*.md")]


def test_callgates_addresses_are_those_of_pyproject() -> None:
  known = (URLS["Documentation"], URLS["Repository"])
  addresses = re.compile(r"https?://[^\s)>\"'`]*callgate[^\s)>\"'`]*")
  for file in SAYING_ADDRESSES:
    for address in addresses.findall(file.read_text(encoding="utf-8")):
      own = (*known, "https://pypi.org/project/callgate/")
      assert address.startswith(own), f"{file.name}: {address}"


def test_the_links_of_the_readme_hold_on_pypi() -> None:
  links = re.findall(r"\]\(([^)\s]+)\)", read("README.md"))
  assert [link for link in links if not link.startswith("https://")] == []


def test_the_license_names_who_gives_it() -> None:
  (owner,) = PROJECT["project"]["authors"]
  assert re.search(rf"^   Copyright \d{{4}} {owner['name']}$", read("LICENSE"), re.MULTILINE)


XLA_HEADERS = ROOT / "build" / "xla-headers" / "include"
IN_BUILD = pytest.mark.skipif(
  not XLA_HEADERS.is_dir(),
  reason="no XLA headers in build/xla-headers: tools/fetch_xla_headers.py brings them",
)


@IN_BUILD
def test_the_sbom_lists_what_the_build_compiles_in(tmp_path: Path) -> None:
  nanobind = pytest.importorskip("nanobind")
  write_sbom("1.2.3", tmp_path)
  sbom = json.loads((tmp_path / "sboms" / "callgate.cdx.json").read_text(encoding="utf-8"))
  assert (sbom["bomFormat"], sbom["metadata"]["component"]["version"]) == ("CycloneDX", "1.2.3")
  found = {part["name"]: part for part in sbom["components"]}
  assert set(found) == {"nanobind", "robin-map", "numpy", "xla"}
  assert found["nanobind"]["purl"] == f"pkg:pypi/nanobind@{nanobind.__version__}"
  assert all(part["licenses"][0]["license"]["id"] for part in found.values())


def write_sbom(version: str, folder: Path) -> None:
  tool = ROOT / "tools" / "third_party.py"
  command = [sys.executable, str(tool), "sbom", version, str(XLA_HEADERS), str(folder)]
  subprocess.run(command, check=True, timeout=60)


@IN_BUILD
def test_the_licenses_in_packages_are_those_of_the_builds_packages() -> None:
  pytest.importorskip("nanobind")
  parts = tool("third_party").parts(XLA_HEADERS)
  files = {file.stem: file.read_text("utf-8") for file in ROOT.glob("packaging/licenses/*.txt")}
  assert files == {part.name: part.text + "\n" for part in parts}
  spdx = {PROJECT["project"]["license"].split(" AND ")[0], *(part.spdx for part in parts)}
  assert spdx == set(PROJECT["project"]["license"].split(" AND "))


def test_every_source_file_names_its_license() -> None:
  own = PROJECT["project"]["license"].split(" AND ")[0]
  license = f"SPDX-License-Identifier: {own}\n"
  folders = ("benchmarks", "cmake", "examples", "include", "python", "src", "tests", "tools")
  sources = [file for folder in folders for file in (ROOT / folder).rglob("*.*")]
  sources = [file for file in sources if file.suffix in (".c", ".cc", ".cmake", ".h", ".py", ".sh")]
  assert len(sources) > 600
  assert not [file for file in sources if license not in file.read_text(encoding="utf-8")[:200]]


def test_the_installed_package_says_what_is_compiled_in() -> None:
  files = {"/".join(file.parts[1:]) for file in importlib.metadata.files("callgate") or []}
  listed = importlib.metadata.metadata("callgate").get_all("License-File") or []
  assert "LICENSE" in listed
  assert {f"licenses/{name}" for name in listed} <= files
  assert "sboms/callgate.cdx.json" in files


# --- wheels, source archives -------------------------------------------------------------------
def tool(name: str) -> Any:
  """A module of tools/, whose modules import one another."""
  sys.path.insert(0, str(ROOT / "tools"))
  try:
    return importlib.import_module(name)
  finally:
    sys.path.pop(0)


def build(kind: str, folder: Path) -> Path:
  """A package by the project's own backend: a source archive, or a wheel without the module."""
  pytest.importorskip("scikit_build_core")
  settings = {"wheel.cmake": "false", "wheel.py-api": "py3"}
  code = f"import scikit_build_core.build as b; b.build_{kind}({str(folder)!r}, {settings!r})"
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 0, done.stderr
  (package,) = folder.glob("callgate-*")
  return package


@IN_CHECKOUT
def test_a_source_archive_has_the_licenses_and_what_builds_a_wheel(tmp_path: Path) -> None:
  check = tool("check_package")
  archive = build("sdist", tmp_path)
  assert check.problems(archive) == []
  needed = {
    "pyproject.toml",
    "CMakeLists.txt",
    "tools/third_party.py",
    "packaging/licenses/xla.txt",
  }
  assert needed <= check.contents(archive).keys()


@IN_CHECKOUT
@IN_BUILD
def test_a_wheel_says_its_licenses_and_what_is_compiled_in(tmp_path: Path) -> None:
  check = tool("check_package")
  wheel = build("wheel", tmp_path)
  assert check.problems(wheel) == ["no SBOM"]  # CMake writes it beside the module
  write_sbom(VERSION, tmp_path)
  info = f"callgate-{VERSION}.dist-info"
  with zipfile.ZipFile(wheel, "a") as archive:
    archive.write(tmp_path / "sboms" / "callgate.cdx.json", f"{info}/sboms/callgate.cdx.json")
  assert check.problems(wheel) == []


@IN_CHECKOUT
@IN_BUILD
def test_a_wheel_that_links_more_in_says_so(tmp_path: Path) -> None:
  check, third_party = tool("check_package"), tool("third_party")
  with zipfile.ZipFile(build("wheel", tmp_path)) as archive:
    archive.extractall(tmp_path / "unpacked")
  (info,) = (tmp_path / "unpacked").glob("*.dist-info")
  write_sbom(VERSION, info)
  spdx = "Apache-2.0 WITH LLVM-exception"
  part = third_party.Part("libcxx", "1", "pkg:github/llvm/llvm-project", spdx, "text")
  third_party.add_to_wheel(tmp_path / "unpacked", [part])
  wheel = Path(shutil.make_archive(str(tmp_path / "made"), "zip", tmp_path / "unpacked"))
  assert check.problems(wheel.rename(tmp_path / "made.whl")) == []
  metadata = (info / "METADATA").read_text("utf-8")
  assert f"License-Expression: {PROJECT['project']['license']} AND {spdx}\n" in metadata
  (info / "METADATA").write_text(metadata.replace(f" AND {spdx}", ""), encoding="utf-8")
  (info / "licenses" / "LICENSE").unlink()
  wheel = Path(shutil.make_archive(str(tmp_path / "faulty"), "zip", tmp_path / "unpacked"))
  assert check.problems(wheel.rename(tmp_path / "faulty.whl")) == [
    "the License-File LICENSE is not there",
    f"the license expression lacks libcxx's {spdx}",
  ]


def mach_o_module(names: dict[str, int], macos: int = 12) -> bytes:
  """The least of a library for macOS on arm64 that binds names to libraries."""
  binds = b"".join(
    bytes([0x30 | library % 16 if library < 0 else 0x10 | library, 0x40])
    + name.encode()
    + b"\0\x51\x72\x80\x01\x90"  # a pointer, in segment 2, at 128: bind
    for name, library in names.items()
  )
  library = b"/usr/lib/libSystem.B.dylib\0".ljust(32, b"\0")
  commands = struct.pack("<6I", 0xC, 24 + len(library), 24, 0, 0, 0) + library
  commands += struct.pack("<6I", 0x32, 24, 1, macos << 16, macos << 16, 0)
  commands += struct.pack("<4I", 0x1D, 16, 0, 0)
  at = 32 + len(commands) + 48
  commands += struct.pack("<12I", 0x80000022, 48, 0, 0, at, len(binds), 0, 0, 0, 0, 0, 0)
  return struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, 4, len(commands), 0, 0) + commands + binds


def test_a_module_for_macos_takes_pythons_functions_from_python_and_the_rest_from_the_system() -> (
  None
):
  mach_o = tool("mach_o")
  good = mach_o.read(mach_o_module({"_PyList_New": -2, "_mmap": 1, "__Py_Dealloc": -2}))
  assert good.bound == {"_PyList_New": -2, "_mmap": 1, "__Py_Dealloc": -2}
  assert mach_o.problems(good) == []
  bad = mach_o.read(mach_o_module({"_memfd_create": -2, "_PyList_New": 1}, macos=27))
  assert mach_o.problems(bad) == [
    "expected macOS (12, 0), got (27, 0)",
    "no library of the system has _memfd_create",
    "_PyList_New is looked for in a library of the system",
  ]
  with pytest.raises(ValueError, match="expected a 64-bit Mach-O file"):
    mach_o.read(b"\x7fELF" + bytes(60))


def test_the_conda_recipe_needs_what_the_package_does() -> None:
  yaml = pytest.importorskip("yaml")
  recipe = yaml.safe_load(read("packaging/conda/recipe.yaml"))
  assert recipe["context"]["version"] == VERSION
  needs = {line.split(" ")[0]: line for line in recipe["requirements"]["run"]}
  for requirement in PROJECT["project"]["dependencies"]:
    name, range_ = re.match(r"([\w-]+)(.*)", requirement).groups()
    assert needs.pop(name) == f"{name} {range_}"
  assert needs == {"python": "python"}
  assert recipe["about"]["license"] == PROJECT["project"]["license"]
  assert all((ROOT / name).exists() for name in recipe["about"]["license_file"])
  assert recipe["about"]["repository"] == URLS["Repository"]
  assert recipe["about"]["documentation"] == URLS["Documentation"]


# --- workflows ---------------------------------------------------------------------------------
def jobs(workflow: Path) -> dict[str, Any]:
  yaml = pytest.importorskip("yaml")
  return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


@IN_CHECKOUT
def test_workflows_call_make_targets_and_files_that_exist() -> None:
  targets = set(re.findall(r"^([a-z][\w-]*)(?: [\w-]+)*:", read("Makefile"), re.MULTILINE))
  for workflow in WORKFLOWS:
    for name, job in jobs(workflow).items():
      runs = "\n".join(step.get("run", "") for step in job.get("steps", []))
      assert set(re.findall(r"\bmake ([a-z][\w-]*)", runs)) <= targets, (workflow.name, name)
      files = [*re.findall(r"\btools/[\w.]+", runs), job.get("uses", "./README.md")]
      assert all((ROOT / file).exists() for file in files), (workflow.name, name)


@IN_CHECKOUT
def test_workflows_may_only_read_unless_a_job_says_otherwise() -> None:
  yaml = pytest.importorskip("yaml")
  for workflow in WORKFLOWS:
    assert yaml.safe_load(workflow.read_text("utf-8"))["permissions"] == {"contents": "read"}


@IN_CHECKOUT
def test_ci_tests_the_versions_of_jax_and_python_that_are_promised() -> None:
  matrix = jobs(ROOT / ".github" / "workflows" / "tests.yml")["python"]["strategy"]["matrix"]
  tested = {(each["jax"], each["python"]) for each in matrix["include"]}
  makefile = re.search(r"^MATRIX_JAX \?= (.*)$", read("Makefile"), re.MULTILINE)
  assert {jax for jax, _ in tested} == set(makefile[1].split())
  classifiers = PROJECT["project"]["classifiers"]
  promised = {c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)}
  assert {python for _, python in tested} == promised
