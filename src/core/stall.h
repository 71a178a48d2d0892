// Reports, on stderr, on calls that take long and go on (callgate.config(stall_seconds=...)).
#pragma once

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/call.h"
#include "core/lifecycle.h"
#include "core/watchdog.h"
#include "core/worker_pool.h"

namespace callgate {

// Watches one call, for as long as the object lives. `arguments` says what it was called with, and
// is asked when the report is made.
class StallWatch {
 public:
  StallWatch(std::chrono::nanoseconds delay, std::shared_ptr<Callee> callee,
             std::function<std::string()> arguments)
      : watch_(delay, [callee = std::move(callee), arguments = std::move(arguments)] {
          report(callee, arguments);
        }) {}

 private:
  // A report says where Python's threads stand, for which it waits for the GIL. The watchdog's
  // thread must not, since other calls' timeouts are its business: a worker does.
  static void report(const std::shared_ptr<Callee>& callee,
                     const std::function<std::string()>& arguments) {
    try {
      (void)WorkerPool::instance().submit([callee, text = arguments()] {
        ActiveCall active;
        if (!active.entered()) return;
        std::fprintf(stderr, "%s\n", callee->stall_report(text, /*timed_out=*/false).c_str());
      });
    } catch (const std::exception& error) {  // no thread is to be had, or no memory
      std::fprintf(stderr, "callgate: '%s' is stalled; no report on it: %s\n",
                   callee->name().c_str(), error.what());
    }
  }

  Watch watch_;
};

}  // namespace callgate
