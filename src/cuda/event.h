// Events, from a pool for each device: making one costs more than recording it.
#pragma once

#include <utility>

#include "cuda/device.h"

namespace callgate::cuda {

// A point in a stream. Goes back to its device's pool when it dies.
class StreamEvent {
 public:
  // Throws Error. The device's context is current.
  StreamEvent(Device& device, Stream stream);
  ~StreamEvent();
  StreamEvent(StreamEvent&& other) noexcept
      : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  StreamEvent& operator=(StreamEvent&&) = delete;

  // Blocks the calling thread, which needs no current context. Success, or what the stream failed
  // with.
  Result wait() const noexcept;
  bool reached() const noexcept;
  // Work that `stream` is given from here on starts after it.
  void hold_back(Stream stream) const;

 private:
  Device* device_;
  Event event_ = nullptr;
};

}  // namespace callgate::cuda
