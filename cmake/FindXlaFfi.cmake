# SPDX-License-Identifier: Apache-2.0
# Finds XLA's typed FFI headers and defines the target XlaFfi::headers.
#
# They are the headers of the *oldest* supported jaxlib, because XLA runs handlers that were built
# against an older minor version of its FFI and refuses newer ones: one binary then serves every
# supported JAX. They are header-only, so nothing of jaxlib is linked and nothing is imported.
#
# Looked for, in this order: CALLGATE_XLA_INCLUDE_DIR; build/xla-headers, where
# tools/fetch_xla_headers.py puts them; the jaxlib installed beside the Python that runs the build
# (pip's isolated build environment has the right one, from pyproject.toml).

set(CALLGATE_XLA_FFI_MINOR 3)  # jaxlib 0.10.2's
set(CALLGATE_XLA_INCLUDE_DIR "" CACHE PATH "Folder that holds xla/ffi/api/ffi.h")

# Sets <minor> to the XLA_FFI_API_MINOR of the headers in <dir>, or to "" where there are none.
function(_xla_ffi_minor dir minor)
  set(${minor} "" PARENT_SCOPE)
  if(EXISTS "${dir}/xla/ffi/api/c_api.h" AND EXISTS "${dir}/xla/ffi/api/ffi.h")
    file(STRINGS "${dir}/xla/ffi/api/c_api.h" line REGEX "^#define XLA_FFI_API_MINOR +[0-9]+")
    if(line MATCHES "([0-9]+) *$")
      set(${minor} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

set(_xla_candidates "${CALLGATE_XLA_INCLUDE_DIR}")
if(NOT CALLGATE_XLA_INCLUDE_DIR)
  set(_xla_candidates "${PROJECT_SOURCE_DIR}/build/xla-headers/include")
  if(Python_Interpreter_FOUND)
    # find_spec locates the package without running it.
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('jaxlib'); print((s.submodule_search_locations or [''])[0] if s else '')"
      OUTPUT_VARIABLE _xla_jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(_xla_jaxlib)
      list(APPEND _xla_candidates "${_xla_jaxlib}/include")
    endif()
  endif()
endif()

set(XlaFfi_INCLUDE_DIR "")
set(_xla_seen "")
foreach(dir IN LISTS _xla_candidates)
  _xla_ffi_minor("${dir}" _xla_minor)
  if(_xla_minor STREQUAL CALLGATE_XLA_FFI_MINOR)
    set(XlaFfi_INCLUDE_DIR "${dir}")
    break()
  elseif(_xla_minor STREQUAL "")
    string(APPEND _xla_seen "\n  ${dir}: no FFI headers")
  else()
    string(APPEND _xla_seen "\n  ${dir}: XLA_FFI_API_MINOR ${_xla_minor}")
  endif()
endforeach()

if(XlaFfi_INCLUDE_DIR)
  set(XlaFfi_FOUND TRUE)
elseif(XlaFfi_FIND_REQUIRED)
  message(FATAL_ERROR
    "callgate is built against XLA's FFI headers with XLA_FFI_API_MINOR ${CALLGATE_XLA_FFI_MINOR}, "
    "those of the oldest supported jaxlib: headers of a newer one make a binary that older JAX "
    "refuses. Looked in:${_xla_seen}\n"
    "Run `python tools/fetch_xla_headers.py`, which puts the right ones into build/xla-headers, "
    "or set CALLGATE_XLA_INCLUDE_DIR.")
endif()

if(XlaFfi_FOUND AND NOT TARGET XlaFfi::headers)
  # An imported target's include folders are SYSTEM ones: no warnings from them.
  add_library(XlaFfi::headers INTERFACE IMPORTED)
  target_include_directories(XlaFfi::headers INTERFACE "${XlaFfi_INCLUDE_DIR}")
endif()
