# SPDX-License-Identifier: Apache-2.0
# What find_package(callgate CONFIG) reads: the target callgate::kernel, for libraries of kernels.
#
#   execute_process(COMMAND python -m callgate cmake-dir
#                   OUTPUT_VARIABLE callgate_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
#   find_package(callgate CONFIG REQUIRED)
#   add_library(mine SHARED kernels.cc)
#   target_link_libraries(mine PRIVATE callgate::kernel)
#
# There is nothing to link: the target holds the folder of callgate/kernel.h, and C++17. The folder
# is found from this file's own place, so that an installed package may be moved.
if(NOT TARGET callgate::kernel)
  get_filename_component(callgate_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
  if(NOT EXISTS "${callgate_INCLUDE_DIR}/callgate/kernel.h")
    set(callgate_FOUND FALSE)
    set(callgate_NOT_FOUND_MESSAGE "${callgate_INCLUDE_DIR}/callgate/kernel.h is missing")
    return()
  endif()
  add_library(callgate::kernel INTERFACE IMPORTED)
  set_target_properties(callgate::kernel PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${callgate_INCLUDE_DIR}"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()
