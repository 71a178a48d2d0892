// SPDX-License-Identifier: Apache-2.0
// A child process, started by spawn, never by fork alone; its end, and its stderr.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "workers/memory.h"

namespace callgate {

// The end of a process: an exit code, or a signal.
struct Ended {
  int code = 0;
  int signal = 0;  // 0 for a normal exit
};

class ChildProcess : Immovable {
 public:
  // Starts `command`, whose first element is a path, in the environment of "NAME=value". The child
  // has the descriptors `passed`, under the same numbers, and no others of this process. Throws
  // Error.
  ChildProcess(const std::vector<std::string>& command, const std::vector<std::string>& environment,
               const std::vector<int>& passed);
  ~ChildProcess();  // kills it, if it is running

  pid_t pid() const noexcept { return pid_; }
  int ended_descriptor() const noexcept {
    return ended_.get();
  }  // readable after its end; -1 if unknown
  int said_descriptor() const noexcept { return said_.get(); }  // its stderr; -1 if closed

  // Its end, if it has ended; for one thread at a time.
  std::optional<Ended> poll();
  void kill(int signal) noexcept;
  // Forwards the available output to stderr, and keeps its end.
  void read_said();
  const std::string& said() const noexcept { return text_; }

 private:
  pid_t pid_ = -1;
  Descriptor ended_, said_;
  std::optional<Ended> how_;
  std::string text_;
};

}  // namespace callgate
