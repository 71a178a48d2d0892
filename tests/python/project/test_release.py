# SPDX-License-Identifier: Apache-2.0
"""The pieces of a release agree: versions, addresses, licences, workflows."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import callgate as cg

ROOT = Path(__file__).resolve().parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
VERSION: str = PROJECT["project"]["version"]
URLS: dict[str, str] = PROJECT["project"]["urls"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


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


# --- addresses, licences -----------------------------------------------------------------------
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


def test_the_licence_names_who_gives_it() -> None:
  (owner,) = PROJECT["project"]["authors"]
  assert re.search(rf"^   Copyright \d{{4}} {owner['name']}$", read("LICENSE"), re.MULTILINE)


def test_licences_of_compiled_in_code_come_from_the_builds_packages(tmp_path: Path) -> None:
  headers = ROOT / "build" / "xla-headers" / "include"
  if not headers.is_dir():
    pytest.skip("no XLA headers in build/xla-headers: tools/fetch_xla_headers.py brings them")
  nanobind = pytest.importorskip("nanobind")
  tool = ROOT / "tools" / "third_party.py"
  command = [sys.executable, str(tool), "1.2.3", str(headers), str(tmp_path)]
  subprocess.run(command, check=True, timeout=60)
  text = (tmp_path / "licenses" / "THIRD_PARTY_LICENSES.txt").read_text(encoding="utf-8")
  names = ("nanobind", "robin-map", "numpy", "OpenXLA", "Redistribution and use", "MIT License")
  assert [name for name in names if name not in text] == []
  sbom = json.loads((tmp_path / "sboms" / "callgate.cdx.json").read_text(encoding="utf-8"))
  assert (sbom["bomFormat"], sbom["metadata"]["component"]["version"]) == ("CycloneDX", "1.2.3")
  found = {part["name"]: part for part in sbom["components"]}
  assert set(found) == {"nanobind", "robin-map", "numpy", "xla"}
  assert found["nanobind"]["purl"] == f"pkg:pypi/nanobind@{nanobind.__version__}"
  assert all(part["licenses"][0]["license"]["id"] for part in found.values())


def test_every_source_file_names_its_licence() -> None:
  licence = f"SPDX-License-Identifier: {PROJECT['project']['license']}\n"
  folders = ("benchmarks", "cmake", "examples", "include", "python", "src", "tests", "tools")
  sources = [file for folder in folders for file in (ROOT / folder).rglob("*.*")]
  sources = [file for file in sources if file.suffix in (".c", ".cc", ".cmake", ".h", ".py", ".sh")]
  assert len(sources) > 600
  assert not [file for file in sources if licence not in file.read_text(encoding="utf-8")[:200]]


def test_the_installed_package_says_what_is_compiled_in() -> None:
  files = {"/".join(file.parts[1:]) for file in importlib.metadata.files("callgate") or []}
  assert {"licenses/LICENSE", "licenses/THIRD_PARTY_LICENSES.txt"} <= files
  assert "sboms/callgate.cdx.json" in files


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
  assert recipe["about"]["repository"] == URLS["Repository"]
  assert recipe["about"]["documentation"] == URLS["Documentation"]


# --- workflows ---------------------------------------------------------------------------------
def jobs(workflow: Path) -> dict[str, Any]:
  yaml = pytest.importorskip("yaml")
  return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


IN_CHECKOUT = pytest.mark.skipif(not WORKFLOWS, reason="a source archive has no workflows")


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
