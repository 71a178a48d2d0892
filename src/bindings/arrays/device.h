// A call whose arrays are a GPU's: its device and stream, what orders work of other streams against
// it, and what a callable with style="return" gives back, copied to XLA's memory.
//
// The handler has made the device's context current (src/xla/cuda_gate.cc). Arrays on the same GPU
// are copied there, on XLA's stream, which first waits for the stream that they were made in; all
// others go through pinned memory of the host. Nobody waits for the copies: what they read lives
// until they have run. Nothing here waits for the GPU but device_checksums(), which debugging alone
// asks for. The GIL is held.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/python/references.h"
#include "core/call.h"
#include "core/lifetime.h"
#include "cuda/device.h"

namespace callgate::bindings {

struct DeviceCall {
  cuda::Device* device = nullptr;
  cuda::Stream stream = nullptr;

  // The call's, from its context. Throws Error.
  static DeviceCall of(const CallContext& context);

  // The stream as DLPack and CUDA's array interface number it: 1 for the legacy default stream.
  std::uintptr_t number() const noexcept;
  // Makes the device's context the thread's again, after code that may have chosen another one.
  void make_current() const;
  // Both take a stream by that number, release the GIL meanwhile, and throw Error.
  void hold_back(std::int64_t consumer) const;  // it waits for XLA's stream
  void wait_for(std::int64_t producer) const;   // XLA's stream waits for it
};

// The call that runs on this thread, for adapters of array libraries (_arrays/gpu.py).
class DeviceCallScope : Immovable {
 public:
  // Null for a call on the host.
  explicit DeviceCallScope(const DeviceCall* call) noexcept
      : before_(std::exchange(current_, call)) {}
  ~DeviceCallScope() { current_ = before_; }

  static const DeviceCall* current() noexcept { return current_; }

 private:
  static inline thread_local const DeviceCall* current_ = nullptr;
  const DeviceCall* before_;
};

// Whether what the stream was given since its capture began could not be recorded, so that the
// capture has failed. Throws Error.
bool capture_failed(const DeviceCall& call);

// A number for the contents of each array, once the stream has come this far. Waits for that,
// without the GIL. Throws Error.
std::vector<std::size_t> device_checksums(const DeviceCall& call,
                                          std::span<const ArrayView> arrays);

std::size_t checksum(const ArrayView& host_array);

// What the copies of one call read.
class CopySources : Immovable {
 public:
  explicit CopySources(const DeviceCall& call) : call_(call) {}
  ~CopySources();  // lets go of all of it once XLA's stream has come this far

  const DeviceCall& call() const noexcept { return call_; }
  void keep(nb::object object) { kept_->objects.push_back(object.release().ptr()); }
  void keep(cuda::PinnedBlock block) { kept_->blocks.push_back(std::move(block)); }

 private:
  // Dies on the thread that waits for the stream, without the GIL.
  struct Kept : Immovable {
    std::vector<PyObject*> objects;
    std::vector<cuda::PinnedBlock> blocks;
    ~Kept() {
      for (PyObject* object : objects) release_later(object);
    }
  };

  const DeviceCall& call_;
  std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
};

// Copies `value` to the result's memory. For kMismatch, `got` says what came. `cast` allows
// same-kind casts of arrays on the host.
Stored store_on_device(const ArrayView& target, PyObject* value, bool cast, CopySources& sources,
                       std::string& got);

}  // namespace callgate::bindings
