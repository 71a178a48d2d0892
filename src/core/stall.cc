// See the header. A report says where Python's threads stand, for which it waits for the GIL. The
// watchdog's thread must not, since other calls' timeouts are its business: a worker does.
#include "core/stall.h"

#include <cstdio>
#include <exception>
#include <utility>

#include "core/lifecycle.h"
#include "core/worker_pool.h"

namespace callgate {

StallWatch::StallWatch(std::chrono::nanoseconds delay, std::shared_ptr<Callee> callee,
                       std::function<std::string()> arguments)
    : watch_(delay, [callee = std::move(callee), arguments = std::move(arguments)] {
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
      }) {}

std::string types_of(std::span<const ArrayView> views) {
  std::string text;
  for (const ArrayView& view : views) text += (text.empty() ? "" : ", ") + to_string(view);
  return "(" + text + ")";
}

}  // namespace callgate
