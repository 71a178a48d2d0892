// SPDX-License-Identifier: Apache-2.0
// Copies by several threads.
#include "channel/copy.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <latch>
#include <thread>

namespace callgate {
namespace {

// `to` is aligned to 16 bytes.
void copy_part(char* to, const char* from, std::size_t bytes) noexcept {
  std::size_t streamed = 0;
#ifdef __SSE2__
  // From here on stores bypass the caches: fetching memory that was used long ago costs more than
  // the copy.
  if (bytes >= 4096) streamed = bytes / 64 * 64;
  auto* target = reinterpret_cast<__m128i*>(to);
  const auto* source = reinterpret_cast<const __m128i*>(from);
  for (std::size_t i = 0; i < streamed / 16; i += 4) {
    __m128i a = _mm_loadu_si128(source + i), b = _mm_loadu_si128(source + i + 1);
    __m128i c = _mm_loadu_si128(source + i + 2), d = _mm_loadu_si128(source + i + 3);
    _mm_stream_si128(target + i, a);
    _mm_stream_si128(target + i + 1, b);
    _mm_stream_si128(target + i + 2, c);
    _mm_stream_si128(target + i + 3, d);
  }
  if (streamed != 0) _mm_sfence();  // the atomics that publish such stores don't order them
#endif
  if (bytes != streamed) std::memcpy(to + streamed, from + streamed, bytes - streamed);
}

}  // namespace

std::size_t half_of_the_cores() noexcept {
  static const std::size_t cores = std::thread::hardware_concurrency() / 2;
  return cores;
}

void copy_leaf(char* to, const void* from, std::size_t bytes, std::size_t cores) noexcept {
  constexpr std::size_t kPart = std::size_t{8} << 20, kLine = 64, kMost = 8;
  const char* source = static_cast<const char*>(from);
  const std::size_t parts = std::min({bytes / kPart, cores, kMost});
  if (parts < 2) return copy_part(to, source, bytes);
  const std::size_t part = bytes / parts / kLine * kLine;
  std::latch others(static_cast<std::ptrdiff_t>(parts) - 1);
  for (std::size_t i = 1; i < parts; ++i) {
    auto copy = [=, &others, at = i * part] {
      copy_part(to + at, source + at, i + 1 == parts ? bytes - at : part);
      others.count_down();
    };
    auto given = [&] {
      try {
        return WorkerPool::of_copies().submit(copy);
      } catch (const std::exception&) {  // no thread or no memory
        return false;
      }
    };
    if (!given()) copy();
  }
  copy_part(to, source, part);
  others.wait();
}

}  // namespace callgate
