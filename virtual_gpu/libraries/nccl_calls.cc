// SPDX-License-Identifier: Apache-2.0
// The functions of libnccl that XLA calls. See nccl.h.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "nccl.h"

extern "C" {
int cuCtxGetDevice(int*);
int cuLaunchHostFunc(void*, void (*)(void*), void*);
int cuMemAlloc_v2(std::uint64_t*, std::size_t);
int cuMemFree_v2(std::uint64_t);
}

namespace vgpu::nccl {
namespace {

struct Id {
  std::array<char, 128> bytes;
};

std::mutex cliques_mutex;
std::map<std::uint64_t, std::weak_ptr<Clique>>& cliques() {
  static auto* all = new std::map<std::uint64_t, std::weak_ptr<Clique>>();
  return *all;
}

// What a thread has called since ncclGroupStart, by communicator and stream.
struct Batch {
  Communicator* communicator;
  void* stream;
  std::vector<Call> calls;
};
struct Waiting {
  Communicator *made, *parent;
  std::size_t split;
};
thread_local int depth = 0;
thread_local std::vector<Batch> batches;
thread_local std::vector<Waiting> waiting;

struct Given {
  std::shared_ptr<Clique> clique;
  int rank;
  std::vector<Call> calls;
};

// Not freed: a graph may run it again.
void run(void* data) {
  const auto& given = *static_cast<const Given*>(data);
  run_batch(*given.clique, given.rank, given.calls);
}

// The clique of a split's color, once all ranks have asked; its ranks are in the order of the keys.
void finish_split(const Waiting& one) {
  Clique& parent = *one.parent->clique;
  std::unique_lock<std::mutex> lock(parent.mutex);
  parent.changed.wait(lock, [&] {
    return parent.aborted ||
           parent.splits[one.split].asked.size() == static_cast<std::size_t>(parent.size);
  });
  const auto& asked = parent.splits[one.split].asked;
  auto mine = asked.find(one.parent->rank);
  if (mine == asked.end()) return;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (const auto& [rank, what] : asked) {
    if (what.first == mine->second.first) members.emplace_back(what.second, rank);
  }
  std::ranges::sort(members);
  auto& clique = parent.parts[{one.split, mine->second.first}];
  if (clique == nullptr) clique = std::make_shared<Clique>(static_cast<int>(members.size()));
  one.made->clique = clique;
  auto place = std::ranges::find(members, one.parent->rank, &std::pair<int, int>::second);
  one.made->rank = static_cast<int>(place - members.begin());
}

int end_group() {
  if (--depth > 0) return kSuccess;
  int result = kSuccess;
  for (Batch& batch : std::exchange(batches, {})) {
    auto* given =
        new Given{batch.communicator->clique, batch.communicator->rank, std::move(batch.calls)};
    if (cuLaunchHostFunc(batch.stream, &run, given) != 0) result = kInternalError;
  }
  for (const Waiting& one : std::exchange(waiting, {})) finish_split(one);
  return result;
}

int add(Communicator* communicator, void* stream, const Call& call) {
  if (communicator == nullptr || communicator->clique == nullptr) return kInvalidArgument;
  ++depth;
  auto same = [&](const Batch& b) { return b.communicator == communicator && b.stream == stream; };
  auto found = std::ranges::find_if(batches, same);
  if (found == batches.end()) found = batches.insert(found, {communicator, stream, {}});
  found->calls.push_back(call);
  return end_group();
}

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

int make(Communicator** made, int ranks, const Id& id, int rank) {
  if (ranks < 1 || rank < 0 || rank >= ranks) return kInvalidArgument;
  std::uint64_t number = 0;
  std::memcpy(&number, id.bytes.data(), sizeof(number));
  std::lock_guard lock(cliques_mutex);
  std::shared_ptr<Clique> clique = cliques()[number].lock();
  if (clique == nullptr) cliques()[number] = clique = std::make_shared<Clique>(ranks);
  if (clique->size != ranks) return kInvalidUsage;
  auto* communicator = new Communicator{std::move(clique), rank};
  cuCtxGetDevice(&communicator->device);
  *made = communicator;
  return kSuccess;
}

}  // namespace
}  // namespace vgpu::nccl

using vgpu::nccl::add;
using vgpu::nccl::address;
using vgpu::nccl::Communicator;
using vgpu::nccl::Id;
using vgpu::nccl::Kind;
using vgpu::nccl::make;
using vgpu::nccl::Reduction;
using vgpu::nccl::Type;

#define NCCL extern "C" __attribute__((visibility("default")))

NCCL int ncclGetVersion(int* version) {
  *version = 22706;
  return 0;
}
NCCL const char* ncclGetErrorString(int) { return "an error of the virtual GPU's NCCL"; }
NCCL const char* ncclGetLastError(Communicator*) { return ""; }
NCCL int ncclGetUniqueId(Id* id) {
  static std::atomic<std::uint64_t> next{1};
  const std::uint64_t number = next.fetch_add(1, std::memory_order_relaxed);  // a number, no order
  *id = {};
  std::memcpy(id->bytes.data(), &number, sizeof(number));
  return 0;
}

NCCL int ncclCommInitRank(Communicator** made, int ranks, Id id, int rank) {
  return make(made, ranks, id, rank);
}
NCCL int ncclCommInitRankConfig(Communicator** made, int ranks, Id id, int rank, void*) {
  return make(made, ranks, id, rank);
}
NCCL int ncclCommInitRankScalable(Communicator** made, int ranks, int rank, int, const Id* ids,
                                  void*) {
  return make(made, ranks, ids[0], rank);
}
NCCL int ncclCommSplit(Communicator* parent, int color, int key, Communicator** made, void*) {
  const std::size_t split = parent->splits++;
  vgpu::nccl::Clique& clique = *parent->clique;
  {
    std::lock_guard lock(clique.mutex);
    if (clique.splits.size() <= split) clique.splits.resize(split + 1);
    clique.splits[split].asked[parent->rank] = {color, key};
    clique.changed.notify_all();
  }
  *made = nullptr;
  if (color < 0) return 0;  // NCCL_SPLIT_NOCOLOR
  *made = new Communicator{nullptr, 0, parent->device};
  ++vgpu::nccl::depth;
  vgpu::nccl::waiting.push_back({*made, parent, split});
  return vgpu::nccl::end_group();
}
NCCL int ncclCommDestroy(Communicator* communicator) {
  delete communicator;
  return 0;
}
NCCL int ncclCommFinalize(Communicator*) { return 0; }
NCCL int ncclCommAbort(Communicator* communicator) {
  {
    std::lock_guard lock(communicator->clique->mutex);
    communicator->clique->aborted = true;
    communicator->clique->changed.notify_all();
  }
  return ncclCommDestroy(communicator);
}
NCCL int ncclCommGetAsyncError(Communicator* communicator, int* error) {
  std::lock_guard lock(communicator->clique->mutex);
  *error = communicator->clique->aborted ? vgpu::nccl::kInternalError : 0;
  return 0;
}
NCCL int ncclCommCount(const Communicator* communicator, int* count) {
  *count = communicator->clique->size;
  return 0;
}
NCCL int ncclCommCuDevice(const Communicator* communicator, int* device) {
  *device = communicator->device;
  return 0;
}
NCCL int ncclCommUserRank(const Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return 0;
}
NCCL int ncclCommRegister(const Communicator*, void* buffer, std::size_t, void** handle) {
  *handle = buffer;
  return 0;
}
NCCL int ncclCommDeregister(const Communicator*, void*) { return 0; }
NCCL int ncclMemAlloc(void** pointer, std::size_t bytes) {
  std::uint64_t at = 0;
  const int bad = cuMemAlloc_v2(&at, bytes);
  *pointer = reinterpret_cast<void*>(at);
  return bad == 0 ? 0 : vgpu::nccl::kInternalError;
}
NCCL int ncclMemFree(void* pointer) {
  return cuMemFree_v2(address(pointer)) == 0 ? 0 : vgpu::nccl::kInternalError;
}

NCCL int ncclGroupStart() {
  ++vgpu::nccl::depth;
  return 0;
}
NCCL int ncclGroupEnd() {
  return vgpu::nccl::depth == 0 ? vgpu::nccl::kInvalidUsage : vgpu::nccl::end_group();
}

NCCL int ncclAllReduce(const void* send, void* receive, std::size_t count, Type type, Reduction how,
                       Communicator* communicator, void* stream) {
  return add(communicator, stream,
             {Kind::kAllReduce, address(send), address(receive), count, type, how});
}
NCCL int ncclReduce(const void* send, void* receive, std::size_t count, Type type, Reduction how,
                    int root, Communicator* communicator, void* stream) {
  return add(communicator, stream,
             {Kind::kReduce, address(send), address(receive), count, type, how, root});
}
NCCL int ncclBroadcast(const void* send, void* receive, std::size_t count, Type type, int root,
                       Communicator* communicator, void* stream) {
  return add(communicator, stream,
             {Kind::kBroadcast, address(send), address(receive), count, type, {}, root});
}
NCCL int ncclBcast(void* buffer, std::size_t count, Type type, int root, Communicator* communicator,
                   void* stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
NCCL int ncclAllGather(const void* send, void* receive, std::size_t count, Type type,
                       Communicator* communicator, void* stream) {
  return add(communicator, stream,
             {Kind::kAllGather, address(send), address(receive), count, type});
}
NCCL int ncclReduceScatter(const void* send, void* receive, std::size_t count, Type type,
                           Reduction how, Communicator* communicator, void* stream) {
  return add(communicator, stream,
             {Kind::kReduceScatter, address(send), address(receive), count, type, how});
}
NCCL int ncclAlltoAll(const void* send, void* receive, std::size_t count, Type type,
                      Communicator* communicator, void* stream) {
  return add(communicator, stream, {Kind::kAllToAll, address(send), address(receive), count, type});
}
NCCL int ncclSend(const void* send, std::size_t count, Type type, int peer,
                  Communicator* communicator, void* stream) {
  return add(communicator, stream, {Kind::kSend, address(send), 0, count, type, {}, peer});
}
NCCL int ncclRecv(void* receive, std::size_t count, Type type, int peer, Communicator* communicator,
                  void* stream) {
  return add(communicator, stream, {Kind::kReceive, 0, address(receive), count, type, {}, peer});
}
