// SPDX-License-Identifier: Apache-2.0
// Executable graphs: made of a graph, changed, launched. See graphs.h.
#include <algorithm>
#include <atomic>

#include "graphs.h"

namespace fakecuda {
namespace {

constexpr Result kUpdateFailure{910};

// What a handle of the driver's stands for. A launch that is on its way keeps what it was given.
struct Handle {
  std::shared_ptr<Exec> exec;
};

std::map<const void*, std::unique_ptr<Handle>>& handles() {
  static auto* all = new std::map<const void*, std::unique_ptr<Handle>>();
  return *all;
}

// The values of conditions, which kernels set.
class Conditions {
 public:
  static Conditions& instance() {
    static auto* all = new Conditions();
    return *all;
  }
  void set(std::uint64_t handle, unsigned value) {
    std::scoped_lock lock(mutex_);
    values_[handle] = value;
  }
  unsigned get(std::uint64_t handle) {
    std::scoped_lock lock(mutex_);
    return values_[handle];
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, unsigned> values_;
};

std::shared_ptr<Exec> instantiate(const Graph& graph) {
  auto exec = std::make_shared<Exec>();
  exec->launch_values = graph.launch_values;
  std::map<const Node*, std::size_t> places;
  for (const auto& node : graph.nodes) places.emplace(node.get(), places.size());
  for (const auto& node : graph.nodes) {
    Step step{node.get(), node->kind, node->work, {}, {}, node->condition, node->handle, true};
    for (const Node* before : node->after) step.after.push_back(places.at(before));
    for (const Graph* body : node->bodies) step.bodies.push_back(instantiate(*body));
    exec->steps.push_back(std::move(step));
  }
  return exec;
}

// All of it anew: a launch that runs keeps the old one.
std::shared_ptr<Exec> copy(const Exec& exec) {
  auto made = std::make_shared<Exec>(exec);
  for (Step& step : made->steps) {
    for (auto& body : step.bodies) body = copy(*body);
  }
  return made;
}

Step* find(Exec& exec, const Node* node) {
  for (Step& step : exec.steps) {
    if (step.node == node) return &step;
    for (auto& body : step.bodies) {
      if (Step* found = find(*body, node); found != nullptr) return found;
    }
  }
  return nullptr;
}

void add_accesses(const Exec& exec, std::vector<Access>& accesses) {
  for (const Step& step : exec.steps) {
    accesses.insert(accesses.end(), step.work.accesses.begin(), step.work.accesses.end());
    for (const auto& body : step.bodies) add_accesses(*body, accesses);
  }
}

Result run(const Exec& exec, std::minstd_rand& random);

Result run(const Step& step, std::minstd_rand& random) {
  if (!step.enabled) return Result::kSuccess;
  if (step.kind == NodeKind::kGraph) return run(*step.bodies[0], random);
  if (step.kind != NodeKind::kConditional) {
    return step.work.run == nullptr ? Result::kSuccess : step.work.run(/*replayed=*/true);
  }
  auto& conditions = Conditions::instance();
  if (step.condition == Condition::kWhile) {
    while (conditions.get(step.handle) != 0) {
      if (Result bad = run(*step.bodies[0], random); bad != Result::kSuccess) return bad;
    }
    return Result::kSuccess;
  }
  std::size_t value = conditions.get(step.handle);
  // Of two bodies of an "if" the second is for zero.
  std::size_t which = step.condition == Condition::kSwitch ? value : value != 0 ? 0 : 1;
  return which < step.bodies.size() ? run(*step.bodies[which], random) : Result::kSuccess;
}

Result run(const Exec& exec, std::minstd_rand& random) {
  for (auto [handle, value] : exec.launch_values) Conditions::instance().set(handle, value);
  std::vector<std::size_t> missing, ready;
  std::vector<std::vector<std::size_t>> behind(exec.steps.size());
  for (std::size_t i = 0; i < exec.steps.size(); ++i) {
    missing.push_back(exec.steps[i].after.size());
    if (missing[i] == 0) ready.push_back(i);
    for (std::size_t before : exec.steps[i].after) behind[before].push_back(i);
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    std::size_t now = ready.back();
    ready.pop_back();
    if (Result bad = run(exec.steps[now], random); bad != Result::kSuccess) return bad;
    for (std::size_t next : behind[now]) {
      if (--missing[next] == 0) ready.push_back(next);
    }
  }
  return Result::kSuccess;
}

Handle* find_handle(void* exec) {
  auto it = handles().find(exec);
  return it == handles().end() ? nullptr : it->second.get();
}

// The frame of what changes a step.
Result change(const char* symbol, void* exec, cu::GraphNode node,
              const std::function<Result(World&, Step&)>& set) {
  return call(symbol, kInit, [&](World& world, Lock&) {
    Handle* handle = find_handle(exec);
    if (handle == nullptr) return Result::kInvalidValue;
    if (handle->exec.use_count() > 1) handle->exec = copy(*handle->exec);
    Step* step = find(*handle->exec, node_of(node));
    return step == nullptr ? Result::kInvalidValue : set(world, *step);
  });
}

template <typename Parameters>
Result change_work(const char* symbol, void* exec, cu::GraphNode node,
                   const Parameters& parameters) {
  return change(symbol, exec, node, [&](World& world, Step& step) {
    step.work = {};
    return work_of(world, parameters, step.work);
  });
}

// The same nodes in the same order, with other parameters.
bool update(Exec& exec, const Exec& from) {
  if (exec.steps.size() != from.steps.size()) return false;
  for (std::size_t i = 0; i < exec.steps.size(); ++i) {
    Step& step = exec.steps[i];
    const Step& other = from.steps[i];
    bool same = step.kind == other.kind && step.after == other.after &&
                step.bodies.size() == other.bodies.size();
    if (!same) return false;
    step.work = other.work;
    for (std::size_t j = 0; j < step.bodies.size(); ++j) {
      if (!update(*step.bodies[j], *other.bodies[j])) return false;
    }
  }
  return true;
}

}  // namespace

// The interpreter's, of a kernel that calls cudaGraphSetConditional.
extern "C" void vgpu_set_conditional(std::uint64_t handle, unsigned value) {
  Conditions::instance().set(handle, value);
}

FAKECUDA_API Result cuGraphInstantiateWithFlags(void** exec, cu::Graph graph, std::uint64_t) {
  return call("cuGraphInstantiateWithFlags", kInit, [&](World& world, Lock&) {
    Graph* found = find_graph(world, graph);
    if (found == nullptr) return Result::kInvalidValue;
    auto handle = std::make_unique<Handle>(Handle{instantiate(*found)});
    *exec = handle.get();
    handles().emplace(handle.get(), std::move(handle));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphInstantiateWithParams(void** exec, cu::Graph graph, void*) {
  return cuGraphInstantiateWithFlags(exec, graph, 0);
}
FAKECUDA_API Result cuGraphExecDestroy(void* exec) {
  return call("cuGraphExecDestroy", kInit, [&](World&, Lock& lock) {
    auto owned = handles().extract(exec);
    if (owned.empty()) return Result::kInvalidValue;
    lock.unlock();  // its works' closures may take the mutex when they die
    owned = {};
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphUpload(void*, cu::Stream) { return Result::kSuccess; }
FAKECUDA_API Result cuGraphLaunch(void* exec, cu::Stream stream) {
  return call("cuGraphLaunch", kContext, [&](World& world, Lock&) {
    StreamState* here = find_stream(world, stream, "cuGraphLaunch");
    Handle* handle = find_handle(exec);
    if (here == nullptr || handle == nullptr) return Result::kInvalidHandle;
    Work work;
    work.what = "a graph";
    work.kind = NodeKind::kGraph;
    add_accesses(*handle->exec, work.accesses);
    auto seed = static_cast<std::uint32_t>(world.random());
    work.run = [exec = handle->exec, seed](bool) {
      std::minstd_rand random(seed);
      return run(*exec, random);
    };
    return enqueue(world, *here, std::move(work), "cuGraphLaunch");
  });
}
FAKECUDA_API Result cuGraphExecKernelNodeSetParams_v2(void* exec, cu::GraphNode node,
                                                      const KernelNodeParameters* parameters) {
  return change_work("cuGraphExecKernelNodeSetParams_v2", exec, node, *parameters);
}
FAKECUDA_API Result cuGraphExecMemsetNodeSetParams(void* exec, cu::GraphNode node,
                                                   const MemsetNodeParameters* parameters,
                                                   cu::Context) {
  return change_work("cuGraphExecMemsetNodeSetParams", exec, node, *parameters);
}
FAKECUDA_API Result cuGraphExecMemcpyNodeSetParams(void* exec, cu::GraphNode node,
                                                   const CopyNodeParameters* parameters,
                                                   cu::Context) {
  return change_work("cuGraphExecMemcpyNodeSetParams", exec, node, *parameters);
}
FAKECUDA_API Result cuGraphExecHostNodeSetParams(void* exec, cu::GraphNode node,
                                                 const HostNodeParameters* parameters) {
  return change_work("cuGraphExecHostNodeSetParams", exec, node, *parameters);
}
FAKECUDA_API Result cuGraphExecChildGraphNodeSetParams(void* exec, cu::GraphNode node,
                                                       cu::Graph child) {
  return change("cuGraphExecChildGraphNodeSetParams", exec, node, [&](World& world, Step& step) {
    Graph* found = find_graph(world, child);
    if (found == nullptr || step.kind != NodeKind::kGraph) return Result::kInvalidValue;
    step.bodies = {instantiate(*found)};
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphExecNodeSetParams(void* exec, cu::GraphNode node,
                                             const NodeParameters* parameters) {
  if (parameters->kind == NodeKind::kGraph) {
    return cuGraphExecChildGraphNodeSetParams(exec, node, parameters->child);
  }
  return change_work("cuGraphExecNodeSetParams", exec, node, *parameters);
}
FAKECUDA_API Result cuGraphNodeSetEnabled(void* exec, cu::GraphNode node, unsigned enabled) {
  return change("cuGraphNodeSetEnabled", exec, node, [&](World&, Step& step) {
    step.enabled = enabled != 0;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphNodeGetEnabled(void* exec, cu::GraphNode node, unsigned* enabled) {
  return change("cuGraphNodeGetEnabled", exec, node, [&](World&, Step& step) {
    *enabled = step.enabled ? 1 : 0;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphExecUpdate_v2(void* exec, cu::Graph graph, int* outcome) {
  return call("cuGraphExecUpdate_v2", kInit, [&](World& world, Lock&) {
    Handle* handle = find_handle(exec);
    Graph* found = find_graph(world, graph);
    if (handle == nullptr || found == nullptr) return Result::kInvalidValue;
    auto next = copy(*handle->exec);
    bool done = update(*next, *instantiate(*found));
    if (outcome != nullptr) *outcome = done ? 0 : 1;
    if (!done) return kUpdateFailure;
    handle->exec = std::move(next);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuDeviceGraphMemTrim(cu::DeviceHandle) { return Result::kSuccess; }

}  // namespace fakecuda
