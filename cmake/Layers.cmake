# SPDX-License-Identifier: Apache-2.0
# The options that all of callgate's own targets share, and the function that makes a layer.

# What every target of ours is compiled with. Third-party headers come in as SYSTEM, so the
# warnings are about our own code.
add_library(callgate_options INTERFACE)
target_compile_options(callgate_options INTERFACE -Wall -Wextra -Wconversion)
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # It takes the .cc files that are compiled at once for headers.
  target_compile_options(callgate_options INTERFACE -Wno-subobject-linkage)
endif()
if(CALLGATE_WERROR)
  target_compile_options(callgate_options INTERFACE -Werror)
endif()
target_compile_definitions(callgate_options INTERFACE $<$<CONFIG:Debug>:_GLIBCXX_ASSERTIONS>)
if(CALLGATE_SANITIZE)
  # A report ends the process, so that a test fails on it; frame pointers make its stacks whole.
  target_compile_options(callgate_options INTERFACE
    "-fsanitize=${CALLGATE_SANITIZE}" -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(callgate_options INTERFACE "-fsanitize=${CALLGATE_SANITIZE}")
endif()

# callgate_add_layer(<layer> [DEPENDS <lower layer>...] [LINKS <library>...])
#
# Makes the static library callgate_<layer> of every .cc file below the current folder. A new file
# needs no edit, a new layer one CMakeLists.txt that holds this call. DEPENDS names the layers that
# it may include; they have to exist already, so a dependency can only point down.
# tests/check_layers.py holds the #include lines to the same order.
function(callgate_add_layer layer)
  cmake_parse_arguments(PARSE_ARGV 1 LAYER "" "" "DEPENDS;LINKS")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cc")
  add_library(callgate_${layer} STATIC ${sources})
  target_include_directories(callgate_${layer} PUBLIC
    "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include")
  target_link_libraries(callgate_${layer} PRIVATE callgate_options
                                          PUBLIC Threads::Threads ${LAYER_LINKS})
  foreach(lower IN LISTS LAYER_DEPENDS)
    if(NOT TARGET callgate_${lower})
      message(FATAL_ERROR "src/${layer} depends on src/${lower}, which does not exist or is above "
                          "it: the order is ${CALLGATE_LAYERS} (CMakeLists.txt)")
    endif()
    target_link_libraries(callgate_${layer} PUBLIC callgate_${lower})
  endforeach()
endfunction()
