// See the header. The loop's state is shared: a helper that starts late finds nothing left to do.
#include "core/executor.h"

#include <algorithm>
#include <atomic>
#include <memory>

namespace callgate {
namespace {

struct Loop {
  std::int64_t end;
  std::int64_t part;
  void (*body)(void*, std::int64_t, std::int64_t);
  void* data;
  std::atomic<std::int64_t> next;
  std::atomic<std::int64_t> left;  // of the elements that are not done

  // Takes parts until none is left. `body` and `data` are touched only while a part is held.
  void work() {
    for (;;) {
      // Order between parts is nobody's business; `left` publishes what they wrote.
      std::int64_t first = next.fetch_add(part, std::memory_order_relaxed);
      if (first >= end) return;
      std::int64_t last = std::min(end, first + part);
      body(data, first, last);
      if (left.fetch_sub(last - first, std::memory_order_acq_rel) == last - first)
        left.notify_all();
    }
  }
};

// Enough parts to even out threads of unlike speed, few enough that taking one costs nothing.
constexpr std::int64_t kPartsAThread = 4;

}  // namespace

void parallel_for(Executor* executor, std::int64_t begin, std::int64_t end, std::int64_t grain,
                  void (*body)(void*, std::int64_t, std::int64_t), void* data) {
  std::int64_t count = end - begin;
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  std::int64_t threads = executor == nullptr ? 1 : std::max(executor->threads(), 1);
  std::int64_t helpers = std::min(threads, (count - 1) / grain + 1) - 1;
  if (helpers <= 0) return body(data, begin, end);
  std::int64_t parts = (helpers + 1) * kPartsAThread;
  auto loop = std::make_shared<Loop>();
  loop->end = end;
  loop->part = std::max(grain, (count + parts - 1) / parts);
  loop->body = body;
  loop->data = data;
  loop->next.store(begin, std::memory_order_relaxed);  // published by schedule()
  loop->left.store(count, std::memory_order_relaxed);
  for (std::int64_t i = 0; i < helpers; ++i) {
    if (!executor->schedule([loop] { loop->work(); })) break;
  }
  loop->work();
  for (std::int64_t left; (left = loop->left.load(std::memory_order_acquire)) != 0;)
    loop->left.wait(left, std::memory_order_acquire);
}

}  // namespace callgate
