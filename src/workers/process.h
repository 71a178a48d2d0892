// SPDX-License-Identifier: Apache-2.0
// A process of ours: started by spawn, never by fork alone; its end, and what it says on stderr.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "workers/memory.h"

namespace callgate {

// How a process has ended: with an exit code, or by a signal.
struct Ended {
  int code = 0;
  int signal = 0;  // 0: by itself
};

class ChildProcess : Immovable {
 public:
  // Starts `command`, of which the first is a path, in the environment of "NAME=value". It has the
  // descriptors `passed`, under the same numbers, and no others of ours. Throws Error.
  ChildProcess(const std::vector<std::string>& command, const std::vector<std::string>& environment,
               const std::vector<int>& passed);
  ~ChildProcess();  // ends it, if it has not ended

  pid_t pid() const noexcept { return pid_; }
  int ended_descriptor() const noexcept {
    return ended_.get();
  }  // readable when it has; -1: unknown
  int said_descriptor() const noexcept {
    return said_.get();
  }  // its stderr; -1 when that is closed

  // How it has ended, if it has; for one thread at a time.
  std::optional<Ended> poll();
  void kill(int signal) noexcept;
  // Passes on to our stderr what is there, and keeps the end of it.
  void read_said();
  const std::string& said() const noexcept { return text_; }

 private:
  pid_t pid_ = -1;
  Descriptor ended_, said_;
  std::optional<Ended> how_;
  std::string text_;
};

}  // namespace callgate
