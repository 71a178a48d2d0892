// SPDX-License-Identifier: Apache-2.0
// The worker's side: answers requests until it is told to stop, or its parent has ended.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "core/call.h"

namespace callgate {

// The exception of a worker's function, in the form for its parent.
struct Raised : std::runtime_error {
  explicit Raised(std::string bytes) : std::runtime_error("raised"), raised(std::move(bytes)) {}
  std::string raised;
};

// A worker's answers to requests; each may throw Raised. On one thread, one after the other.
class Served {
 public:
  virtual ~Served() = default;
  virtual void start(std::string_view text) = 0;
  // `of` is another definition's id, or 0.
  virtual void define(std::uint64_t id, std::uint64_t of, std::string_view bytes) = 0;
  virtual void forget(std::uint64_t id) noexcept = 0;  // a definition's, or with kObject
  // One lane's call.
  virtual void run(std::uint64_t site, const Call& call, std::int64_t lane) = 0;
  virtual void check_writes(bool on) = 0;
};

// The command line that the pool gives a worker.
struct ServeOptions {
  int memory = -1, calls = -1, parent_socket = -1;  // descriptors, which it takes over
  pid_t parent = 0;
};

// True if the parent wants the running code of serve()'s thread to end. It signals this by SIGUSR2.
bool is_interrupted() noexcept;

// Returns when the pool is closed. If the parent ends in another way, so does the process.
void serve(const ServeOptions& options, Served& served);

}  // namespace callgate
