# SPDX-License-Identifier: Apache-2.0
# Writes OUTPUT, which tells ctest the suites of the GoogleTest PROGRAM; each may take TIMEOUT seconds.
# PROGRAM may be a list: an emulator with its options, and the program.
list(REMOVE_ITEM PROGRAM "")
list(TRANSFORM PROGRAM REPLACE "(.+)" "[[\\1]]" OUTPUT_VARIABLE quoted)
list(JOIN quoted " " quoted)
execute_process(COMMAND ${PROGRAM} --gtest_list_tests
  OUTPUT_VARIABLE listed COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "\n[A-Za-z][A-Za-z0-9_/]*[.]" lines "\n${listed}")
set(text "")
foreach(line IN LISTS lines)
  string(REGEX REPLACE "[\n.]" "" suite "${line}")
  string(APPEND text
    "add_test([[${suite}]] ${quoted} [[--gtest_filter=${suite}.*]])\n"
    "set_tests_properties([[${suite}]] PROPERTIES TIMEOUT ${TIMEOUT})\n")
endforeach()
file(WRITE "${OUTPUT}" "${text}")
