// Reports, on stderr, on calls that take long and go on (callgate.config(stall_seconds=...)).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/call.h"
#include "core/watchdog.h"

namespace callgate {

// Watches one call, for as long as the object lives. `arguments` says what it was called with, and
// is asked when the report is made.
class StallWatch {
 public:
  StallWatch(std::chrono::nanoseconds delay, std::shared_ptr<Callee> callee,
             std::function<std::string()> arguments);

 private:
  Watch watch_;
};

// "(float32[3], int32[])"
std::string types_of(std::span<const ArrayView> views);

}  // namespace callgate
