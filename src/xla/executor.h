// XLA's own threads, for one call.
#pragma once

#include "core/executor.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// Borrows the frame, which lives until the handler returns; so does the executor.
class XlaExecutor final : public Executor {
 public:
  explicit XlaExecutor(const XLA_FFI_CallFrame& frame) noexcept
      : api_(frame.api), context_(frame.ctx) {}

  int threads() const noexcept override;
  bool schedule(std::function<void()> task) noexcept override;
  std::int64_t device() const noexcept override;

 private:
  const XLA_FFI_Api* api_;
  XLA_FFI_ExecutionContext* context_;
};

}  // namespace callgate::xla_ffi
