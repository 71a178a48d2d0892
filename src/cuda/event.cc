// See the header.
#include "cuda/event.h"

#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "core/lifetime.h"
#include "cuda/driver.h"

namespace callgate::cuda {
namespace {

// Events that nobody uses, by device; never destroyed.
struct EventPool {
  std::mutex mutex;
  std::map<const Device*, std::vector<Event>> free;
};

EventPool& pool() { return immortal<EventPool>(); }

Event take(const Device& device) {
  {
    std::lock_guard lock(pool().mutex);
    std::vector<Event>& free = pool().free[&device];
    if (!free.empty()) {
      Event event = free.back();
      free.pop_back();
      return event;
    }
  }
  Event event = nullptr;
  // Who waits for it sleeps: it may be long.
  check(driver().event_create(&event, kEventBlockingSync | kEventDisableTiming), "cuEventCreate");
  return event;
}

void give_back(const Device& device, Event event) noexcept try {
  std::lock_guard lock(pool().mutex);
  pool().free[&device].push_back(event);
} catch (const std::bad_alloc&) {
  driver().event_destroy(event);
}

}  // namespace

StreamEvent::StreamEvent(Device& device, Stream stream) : device_(&device), event_(take(device)) {
  Result recorded = driver().event_record(event_, stream);
  if (recorded == Result::kSuccess) [[likely]]
    return;
  give_back(device, event_);
  check(recorded, "cuEventRecord");
}

StreamEvent::~StreamEvent() {
  if (event_ != nullptr) give_back(*device_, event_);
}

Result StreamEvent::wait() const noexcept { return driver().event_synchronize(event_); }

bool StreamEvent::reached() const noexcept {
  return driver().event_query(event_) != Result::kNotReady;
}

void StreamEvent::hold_back(Stream stream) const {
  check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

}  // namespace callgate::cuda
