// SPDX-License-Identifier: Apache-2.0
// System calls that fail when a test says so. system_faults.cc replaces those of the C library in
// the test program, for code that is linked into it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace callgate::fake {

// While it lives the call number `nth`, from 0, that this thread makes of the kind fails with
// `error`, as EIO or EMFILE. One at a time.
class SystemFault {
 public:
  enum class Calls : std::uint8_t {
    kWrite,  // write, pwrite, writev, ftruncate
    kOpen,   // open, socket, pipe
  };

  SystemFault(Calls calls, std::size_t nth, int error);
  ~SystemFault();
  SystemFault(const SystemFault&) = delete;
  SystemFault& operator=(const SystemFault&) = delete;

  // True if the call has failed.
  bool struck() const noexcept { return met_ > nth_; }

  // A call is made: whether it fails. errno is set then.
  static bool strikes(Calls calls) noexcept;

 private:
  Calls calls_;
  std::size_t nth_, met_ = 0;
  int error_;
};

}  // namespace callgate::fake
