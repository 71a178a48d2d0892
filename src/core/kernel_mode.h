// What is on for all kernels of the process, and is off by default: one relaxed load a call.
// Relaxed throughout: a call that starts while a mode changes may see either.
#pragma once

#include <atomic>
#include <cstdint>

namespace callgate {

enum class KernelMode : std::uint32_t {
  kCheckMemory = 1,  // see memory_check.h
  kCrashReport = 2,  // see crash_report.h
};

namespace detail {
inline constinit std::atomic<std::uint32_t> kernel_modes{0};
inline constinit std::atomic<std::int64_t> kernel_stall_ns{0};
}  // namespace detail

inline bool any_kernel_mode() noexcept {
  return detail::kernel_modes.load(std::memory_order_relaxed) != 0;
}
inline bool kernel_mode(KernelMode mode) noexcept {
  auto bit = static_cast<std::uint32_t>(mode);
  return (detail::kernel_modes.load(std::memory_order_relaxed) & bit) != 0;
}
inline void set_kernel_mode(KernelMode mode, bool on) noexcept {
  auto bit = static_cast<std::uint32_t>(mode);
  if (on) detail::kernel_modes.fetch_or(bit, std::memory_order_relaxed);
  if (!on) detail::kernel_modes.fetch_and(~bit, std::memory_order_relaxed);
}

// After this long a call is reported on stderr, and goes on; 0 for never.
inline std::int64_t kernel_stall_ns() noexcept {
  return detail::kernel_stall_ns.load(std::memory_order_relaxed);
}
inline void set_kernel_stall_ns(std::int64_t delay) noexcept {
  detail::kernel_stall_ns.store(delay, std::memory_order_relaxed);
}

}  // namespace callgate
