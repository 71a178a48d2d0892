// See the header.
#include "core/kernel_frame.h"

#include "core/crash_report.h"

namespace callgate {

constexpr callgate_services KernelFrame::kServices = {&run_parallel, &allocate, &threads, &device,
                                                      &fail};

void KernelFrame::run_parallel(const callgate_call* call, std::int64_t begin, std::int64_t end,
                               std::int64_t grain, void (*body)(void*, std::int64_t, std::int64_t),
                               void* data) {
  if (const KernelRecord* record = running_kernel()) [[unlikely]] {
    // The helpers' crashes are this kernel's.
    struct Recorded {
      const KernelRecord* record;
      void (*body)(void*, std::int64_t, std::int64_t);
      void* data;
    } recorded{record, body, data};
    auto run = [](void* all, std::int64_t first, std::int64_t last) {
      const auto& part = *static_cast<Recorded*>(all);
      RunningKernel running(part.record);
      part.body(part.data, first, last);
    };
    return parallel_for(of(call).executor_, begin, end, grain, run, &recorded);
  }
  parallel_for(of(call).executor_, begin, end, grain, body, data);
}

void* KernelFrame::allocate(const callgate_call* call, std::size_t bytes, std::size_t alignment) {
  if (of(call).source_ != nullptr) return of(call).source_->take(bytes, alignment);
  return of(call).scratch_.take(bytes, alignment);
}

std::int32_t KernelFrame::threads(const callgate_call* call) {
  return of(call).executor_ == nullptr ? 1 : of(call).executor_->threads();
}

std::int64_t KernelFrame::device(const callgate_call* call) {
  return of(call).executor_ == nullptr ? -1 : of(call).executor_->device();
}

void KernelFrame::fail(const callgate_call* call, const char* message) {
  auto kept = std::make_unique<std::string>(message);
  std::string* none = nullptr;
  // The first one counts; release publishes its text to the thread that reads it.
  if (of(call).message_.compare_exchange_strong(none, kept.get(), std::memory_order_release,
                                                std::memory_order_relaxed))
    kept.release();  // NOLINT: the frame's now
}

}  // namespace callgate
