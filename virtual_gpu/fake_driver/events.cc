// SPDX-License-Identifier: Apache-2.0
// Events, and what waits for them. See world.h.
#include "world.h"

namespace fakecuda {
namespace {

EventState* find_event(World& world, cu::Event event, const char* symbol) {
  auto it = world.events.find(event);
  if (it != world.events.end() && it->second->alive) return it->second.get();
  world.violation(std::string(symbol) +
                  (it == world.events.end() ? ": no event" : ": a destroyed event"));
  return nullptr;
}

// Asking a captured event ends the capture; asking another may be forbidden during one.
Result may_ask(World& world, const EventState& event) {
  if (event.capture != nullptr) {
    event.capture->invalidated = true;
    return Result::kCapturedEvent;
  }
  return disturbs_capture(world) ? Result::kStreamCaptureUnsupported : Result::kSuccess;
}

// A wait across the border of a capture joins the stream to it, or is refused.
Result wait_captured(StreamState& stream, const EventState& event) {
  if (stream.capture != nullptr && stream.capture != event.capture) {
    stream.capture->invalidated = true;
    if (event.capture != nullptr) event.capture->invalidated = true;
    return Result::kCaptureIsolation;
  }
  stream.capture = event.capture;
  stream.capture->streams.insert(&stream);
  join(stream.capture_clock, event.capture_clock);
  return Result::kSuccess;
}

}  // namespace

FAKECUDA_API Result cuEventCreate(cu::Event* event, unsigned flags) {
  return call("cuEventCreate", kContext, [&](World& world, Lock&) {
    if (flags > 7) return Result::kInvalidValue;
    auto owned = std::make_unique<EventState>();
    owned->device = current_device();
    *event = reinterpret_cast<cu::Event>(owned.get());
    world.events.emplace(owned.get(), std::move(owned));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuEventDestroy_v2(cu::Event event) {
  return call("cuEventDestroy_v2", kInit, [&](World& world, Lock&) {
    EventState* found = find_event(world, event, "cuEventDestroy_v2");
    if (found == nullptr) return Result::kInvalidHandle;
    found->alive = false;
    found->marker = nullptr;
    found->capture = nullptr;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuEventRecord(cu::Event event, cu::Stream stream) {
  return call("cuEventRecord", kContext, [&](World& world, Lock&) {
    EventState* found = find_event(world, event, "cuEventRecord");
    StreamState* here = nullptr;
    if (Result bad = stream_here(world, stream, "cuEventRecord", here); bad != Result::kSuccess)
      return bad;
    if (found == nullptr) return Result::kInvalidHandle;
    if (found->device != here->device) {
      world.violation("cuEventRecord: an event of device " + std::to_string(found->device) +
                      " on a stream of device " + std::to_string(here->device));
      return Result::kInvalidHandle;
    }
    found->capture = here->capture;
    if (here->capture != nullptr) {
      if (here->capture->invalidated) return Result::kStreamCaptureInvalidated;
      found->capture_clock = here->capture_clock;
      found->marker = nullptr;
      return Result::kSuccess;
    }
    found->marker = mark(world, *here);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuEventQuery(cu::Event event) {
  return call("cuEventQuery", kInit, [&](World& world, Lock&) {
    EventState* found = find_event(world, event, "cuEventQuery");
    if (found == nullptr) return Result::kInvalidHandle;
    if (Result bad = may_ask(world, *found); bad != Result::kSuccess) return bad;
    if (found->marker == nullptr) return Result::kSuccess;
    if (!found->marker->done) return Result::kNotReady;
    join(world.host_clock, found->marker->clock);
    return found->marker->result;
  });
}
FAKECUDA_API Result cuEventSynchronize(cu::Event event) {
  return call("cuEventSynchronize", kInit, [&](World& world, Lock& lock) {
    EventState* found = find_event(world, event, "cuEventSynchronize");
    if (found == nullptr) return Result::kInvalidHandle;
    if (Result bad = may_ask(world, *found); bad != Result::kSuccess) return bad;
    return found->marker == nullptr ? Result::kSuccess : wait_on_host(world, lock, found->marker);
  });
}
FAKECUDA_API Result cuStreamWaitEvent(cu::Stream stream, cu::Event event, unsigned flags) {
  return call("cuStreamWaitEvent", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamWaitEvent");
    EventState* point = find_event(world, event, "cuStreamWaitEvent");
    if (found == nullptr || point == nullptr) return Result::kInvalidHandle;
    if (flags != 0) return Result::kInvalidValue;
    if (found->capture != nullptr && found->capture->invalidated)
      return Result::kStreamCaptureInvalidated;
    if (point->capture == nullptr && point->marker == nullptr) return Result::kSuccess;
    if (found->capture != nullptr || point->capture != nullptr)
      return wait_captured(*found, *point);
    join(found->clock, point->marker->clock);
    Queued wait;
    wait.work.what = "a wait for an event";
    wait.work.run = [marker = point->marker](bool) { return wait_on_stream(marker); };
    wait.marker = std::make_shared<Marker>();
    found->queue.push_back(std::move(wait));
    found->changed.notify_one();
    return Result::kSuccess;
  });
}

}  // namespace fakecuda
