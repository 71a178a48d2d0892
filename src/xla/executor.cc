// See the header.
#include "xla/executor.h"

#include <memory>
#include <new>
#include <utility>

#include "xla/decode.h"

namespace callgate::xla_ffi {

int XlaExecutor::threads() const noexcept {
  std::int64_t count = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr,
                                          context_, &count};
  if (!succeeded(api_, api_->XLA_FFI_ThreadPool_NumThreads(&args))) return 1;
  return static_cast<int>(count);
}

bool XlaExecutor::schedule(std::function<void()> task) noexcept {
  std::unique_ptr<std::function<void()>> owned(new (std::nothrow)
                                                   std::function<void()>(std::move(task)));
  if (owned == nullptr) return false;
  XLA_FFI_Task* run = [](void* data) {
    std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
    (*mine)();
  };
  XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr,
                                        context_, run, owned.get()};
  if (!succeeded(api_, api_->XLA_FFI_ThreadPool_Schedule(&args))) return false;
  owned.release();  // NOLINT: the task deletes itself
  return true;
}

std::int64_t XlaExecutor::device() const noexcept {
  XLA_FFI_DeviceOrdinal_Get_Args args{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr, context_,
                                      -1};
  if (!succeeded(api_, api_->XLA_FFI_DeviceOrdinal_Get(&args))) return -1;
  return args.device_ordinal;
}

}  // namespace callgate::xla_ffi
