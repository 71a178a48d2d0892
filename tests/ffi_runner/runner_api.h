// SPDX-License-Identifier: Apache-2.0
// XLA's side of an FFI call, for tests that drive callgate's handlers from Python's ctypes.
//
// A site is one custom call of one executable. It owns the state that its instantiate handler gave.
// Functions return an XLA_FFI_Error_Code, 0 for success, and put the error's message into
// `message`.
#pragma once

#include <cstddef>
#include <cstdint>

#define RUNNER_API extern "C" __attribute__((visibility("default")))

namespace runner {

struct Site;
struct Dictionary;

struct Array {
  int dtype;  // an XLA_FFI_DataType
  std::int64_t rank;
  std::int64_t* dims;
  void* data;
};

// Where and when the program runs.
struct Run {
  void* stream;
  int device;
  std::int64_t id;
};

}  // namespace runner

// The source of scratch memory, which runner_release_scratch() frees.
RUNNER_API void runner_use_memory(std::uint64_t (*allocate)(int, std::size_t),
                                  void (*release)(std::uint64_t));

// Handlers may be null, but for that of the execute stage.
RUNNER_API runner::Site* runner_new_site(void* instantiate, void* prepare, void* initialize,
                                         void* execute);
RUNNER_API void runner_delete_site(runner::Site* site);

// Its attributes, to be filled before it is instantiated.
RUNNER_API runner::Dictionary* runner_attributes(runner::Site* site);
RUNNER_API void runner_add_string(runner::Dictionary* to, const char* name, const char* text,
                                  std::size_t size);
RUNNER_API void runner_add_scalar(runner::Dictionary* to, const char* name, int dtype,
                                  const void* value, std::size_t size);
RUNNER_API void runner_add_array(runner::Dictionary* to, const char* name, int dtype,
                                 std::size_t count, const void* values, std::size_t size);
RUNNER_API runner::Dictionary* runner_add_dictionary(runner::Dictionary* to, const char* name);

RUNNER_API int runner_instantiate(runner::Site* site, char* message, std::size_t capacity);
// All stages of one execution. Waits for the handler's future where it gives one.
RUNNER_API int runner_execute(runner::Site* site, const runner::Array* operands,
                              std::size_t operand_count, const runner::Array* results,
                              std::size_t result_count, const runner::Run* run, char* message,
                              std::size_t capacity);
// When the stream has nothing to do any more.
RUNNER_API void runner_release_scratch(runner::Site* site);

// The traits that a handler tells: XLA_FFI_Handler_Traits; -1 where it failed to.
RUNNER_API int runner_traits(void* handler);
// Errors that were made and not destroyed, and states whose type nobody registered here.
RUNNER_API std::size_t runner_live_errors();
RUNNER_API std::size_t runner_leaked_states();
