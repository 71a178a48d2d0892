// SPDX-License-Identifier: Apache-2.0
// Thread state while a gate's function runs: the place of its call, and its span in a profile.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "bindings/gate/gate.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/call.h"
#include "core/lifetime.h"

namespace callgate::bindings {

// The running call of a `located` callee on this thread.
struct CallPlace {
  std::span<const std::int64_t> lanes;  // the extents of its batch levels
  std::int64_t lane = 0;                // its number, in row-major order
  const std::string* layout = nullptr;  // SiteSpec::layout
  const CallContext* context = nullptr;

  static inline thread_local const CallPlace* current_ = nullptr;  // null for no such call
};

// A span of JAX's profiler, if it is active, around a call under the GIL.
class ProfiledSpan : Immovable {
 public:
  ProfiledSpan(const std::string& name, std::int64_t gil_wait_ns) {
    if ((settings.recorded.load(std::memory_order_relaxed) & Settings::kProfiling) == 0) return;
    span_ = call_hook(hooks.profiled, "sL", name.c_str(), static_cast<long long>(gil_wait_ns));
    if (!span_.is_valid()) write_unraisable(nullptr);
  }
  ~ProfiledSpan() {
    if (!span_.is_valid() || span_.is_none()) return;
    if (!call_python(nb::getattr(span_, "__exit__").ptr(), "OOO", Py_None, Py_None, Py_None)
             .is_valid())
      write_unraisable(nullptr);
  }

 private:
  nb::object span_;
};

// A call's function may run another program, whose calls have their own places.
class CallPlaceScope : Immovable {
 public:
  // Null leaves the place unchanged.
  explicit CallPlaceScope(const CallPlace* place) : place_(place) {
    if (place_ != nullptr) before_ = std::exchange(CallPlace::current_, place_);
  }
  ~CallPlaceScope() {
    if (place_ != nullptr) CallPlace::current_ = before_;
  }

 private:
  const CallPlace* place_;
  const CallPlace* before_ = nullptr;
};

}  // namespace callgate::bindings
