// SPDX-License-Identifier: Apache-2.0
// What collectives do to memory, and how ranks meet. See the header.
#include "nccl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../ptx/numbers.h"

extern "C" char* virtual_gpu_memory(std::uint64_t pointer, std::size_t bytes);

namespace vgpu::nccl {
namespace {

using ptx::Brain;
using ptx::Half;

template <ptx::Format kFormat>
struct Byte {
  std::uint8_t bits;
  static Byte from(float value) { return {static_cast<std::uint8_t>(ptx::pack(value, kFormat))}; }
  float get() const { return static_cast<float>(ptx::unpack(bits, kFormat)); }
};

// The type that elements of a format are added in: their own where C++ has it.
template <typename T>
auto widened(T value) {
  if constexpr (requires { value.get(); }) {
    return value.get();
  } else {
    return value;
  }
}
template <typename T, typename Wide>
T narrowed(Wide value) {
  if constexpr (requires { T::from(value); }) {
    return T::from(value);
  } else {
    return static_cast<T>(value);
  }
}

template <typename Wide>
Wide combined(Wide a, Wide b, Reduction reduction) {
  // Sums of integers wrap around, also of signed ones.
  auto bits = [](Wide value) {
    if constexpr (std::is_integral_v<Wide>) {
      return static_cast<std::uint64_t>(value);
    } else {
      return value;
    }
  };
  switch (reduction) {
    case Reduction::kProduct: return static_cast<Wide>(bits(a) * bits(b));
    case Reduction::kMax: return a > b || a != a ? a : b;
    case Reduction::kMin: return a < b || a != a ? a : b;
    default: return static_cast<Wide>(bits(a) + bits(b));
  }
}

template <typename T>
void reduce_as(const std::vector<const char*>& from, char* to, std::size_t count,
               Reduction reduction) {
  for (std::size_t i = 0; i < count; ++i) {
    auto element = [&](const char* source) {
      T value;
      std::memcpy(&value, source + i * sizeof(T), sizeof(T));
      return widened(value);
    };
    auto total = element(from[0]);
    for (std::size_t rank = 1; rank < from.size(); ++rank) {
      total = combined(total, element(from[rank]), reduction);
    }
    if (reduction == Reduction::kAverage) {
      total = static_cast<decltype(total)>(total / static_cast<decltype(total)>(from.size()));
    }
    T value = narrowed<T>(total);
    std::memcpy(to + i * sizeof(T), &value, sizeof(T));
  }
}

void reduce(const std::vector<const char*>& from, char* to, std::size_t count, Type type,
            Reduction how) {
  switch (type) {
    case Type::kI8: return reduce_as<std::int8_t>(from, to, count, how);
    case Type::kU8: return reduce_as<std::uint8_t>(from, to, count, how);
    case Type::kI32: return reduce_as<std::int32_t>(from, to, count, how);
    case Type::kU32: return reduce_as<std::uint32_t>(from, to, count, how);
    case Type::kI64: return reduce_as<std::int64_t>(from, to, count, how);
    case Type::kU64: return reduce_as<std::uint64_t>(from, to, count, how);
    case Type::kF16: return reduce_as<Half>(from, to, count, how);
    case Type::kF32: return reduce_as<float>(from, to, count, how);
    case Type::kF64: return reduce_as<double>(from, to, count, how);
    case Type::kBF16: return reduce_as<Brain>(from, to, count, how);
    case Type::kE4M3: return reduce_as<Byte<ptx::kE4M3Format>>(from, to, count, how);
    case Type::kE5M2: return reduce_as<Byte<ptx::kE5M2Format>>(from, to, count, how);
  }
}

void copy(std::uint64_t to, std::uint64_t from, std::size_t bytes) {
  if (bytes == 0) return;
  std::memmove(virtual_gpu_memory(to, bytes), virtual_gpu_memory(from, bytes), bytes);
}

// Waits until `ready` holds or the communicator was given up; says which.
template <typename Ready>
bool wait(Clique& clique, std::unique_lock<std::mutex>& lock, Ready ready) {
  clique.changed.wait(lock, [&] { return clique.aborted || ready(); });
  return !clique.aborted;
}

void meet(Clique& clique, int rank, const Call& call) {
  std::unique_lock<std::mutex> lock(clique.mutex);
  const std::uint64_t number = clique.reached[static_cast<std::size_t>(rank)]++;
  Meeting& meeting = clique.meetings[number];
  meeting.calls.resize(static_cast<std::size_t>(clique.size));
  meeting.calls[static_cast<std::size_t>(rank)] = &call;
  if (++meeting.arrived == clique.size) {
    if (!run_collective(meeting.calls)) {
      std::fprintf(stderr, "virtual GPU: NCCL: the ranks' collectives differ\n");
      clique.aborted = true;  // ncclCommGetAsyncError tells
    }
    meeting.done = true;
    clique.changed.notify_all();
  } else if (!wait(clique, lock, [&] { return meeting.done; })) {
    return;
  }
  if (++meeting.left == clique.size) clique.meetings.erase(number);
}

}  // namespace

std::size_t size_of(Type type) {
  constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[static_cast<std::size_t>(type)];
}

bool run_collective(const std::vector<const Call*>& calls) {
  const Call& first = *calls[0];
  const std::size_t bytes = first.count * size_of(first.type), size = calls.size();
  for (const Call* call : calls) {
    if (call->kind != first.kind || call->count != first.count || call->type != first.type)
      return false;
  }
  if (bytes == 0) return true;
  const bool scatters = first.kind == Kind::kReduceScatter;
  if (scatters || first.kind == Kind::kAllReduce || first.kind == Kind::kReduce) {
    const std::size_t count = first.count * (scatters ? size : 1);
    std::vector<char> total(bytes * (scatters ? size : 1));
    std::vector<const char*> from;
    for (const Call* call : calls) from.push_back(virtual_gpu_memory(call->send, total.size()));
    reduce(from, total.data(), count, first.type, first.reduction);
    for (std::size_t rank = 0; rank < size; ++rank) {
      if (first.kind == Kind::kReduce && static_cast<int>(rank) != first.peer) continue;
      std::memcpy(virtual_gpu_memory(calls[rank]->receive, bytes),
                  total.data() + (scatters ? rank * bytes : 0), bytes);
    }
    return true;
  }
  // A result may lie over its own operand: all are read before one is written.
  const std::size_t sent = first.kind == Kind::kAllToAll ? bytes * size : bytes;
  std::vector<std::vector<char>> held;
  for (const Call* call : calls) {
    const bool unused =
        first.kind == Kind::kBroadcast && call != calls[static_cast<std::size_t>(first.peer)];
    const char* begin = unused ? nullptr : virtual_gpu_memory(call->send, sent);
    held.emplace_back(begin, begin + (unused ? 0 : sent));
  }
  for (std::size_t to = 0; to < size; ++to) {
    if (first.kind == Kind::kBroadcast) {
      const auto& root = held[static_cast<std::size_t>(first.peer)];
      std::memcpy(virtual_gpu_memory(calls[to]->receive, bytes), root.data(), bytes);
      continue;
    }
    char* target = virtual_gpu_memory(calls[to]->receive, bytes * size);
    for (std::size_t from = 0; from < size; ++from) {
      const char* part = held[from].data() + (first.kind == Kind::kAllToAll ? to * bytes : 0);
      std::memcpy(target + from * bytes, part, bytes);
    }
  }
  return true;
}

void run_batch(Clique& clique, int rank, const std::vector<Call>& calls) {
  std::vector<std::shared_ptr<Post>> sent;
  std::unique_lock<std::mutex> lock(clique.mutex);
  for (const Call& call : calls) {
    if (call.kind != Kind::kSend) continue;
    sent.push_back(std::make_shared<Post>(Post{&call}));
    clique.posts[{rank, call.peer}].push_back(sent.back());
  }
  clique.changed.notify_all();
  for (const Call& call : calls) {
    if (call.kind != Kind::kReceive) continue;
    auto& posts = clique.posts[{call.peer, rank}];
    if (!wait(clique, lock, [&] { return !posts.empty(); })) return;
    std::shared_ptr<Post> post = posts.front();
    posts.pop_front();
    copy(call.receive, post->call->send, call.count * size_of(call.type));
    post->taken = true;
    clique.changed.notify_all();
  }
  for (const auto& post : sent) {
    if (!wait(clique, lock, [&] { return post->taken; })) return;
  }
  lock.unlock();
  for (const Call& call : calls) {
    if (call.kind != Kind::kSend && call.kind != Kind::kReceive) meet(clique, rank, call);
  }
}

}  // namespace vgpu::nccl
