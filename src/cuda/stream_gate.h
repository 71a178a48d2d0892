// Holds a stream back until the host says so, without a thread that waits.
//
// By a memory operation, where the device takes it: the stream waits for a word of pinned memory.
// Else by a host function that blocks.
#pragma once

#include <condition_variable>
#include <mutex>

#include "core/lifetime.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace callgate::cuda {

class StreamGate : Immovable {
 public:
  StreamGate();

  // Work that the stream is given from here on starts after open(). Throws Error. Whoever calls it
  // keeps the gate until the stream has come by.
  void hold(Stream stream);

  // What was written to host memory before is seen by the work behind. Any thread, once.
  void open() noexcept;

 private:
  PinnedBlock word_;
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

}  // namespace callgate::cuda
