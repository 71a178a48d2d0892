// SPDX-License-Identifier: Apache-2.0
// Graphs and their nodes: made one by one, or by capturing a stream.
#include <algorithm>
#include <cstdio>

#include "graphs.h"

namespace fakecuda {

extern thread_local bool in_host_function;

Graph* find_graph(World& world, cu::Graph graph) {
  auto it = world.graphs.find(graph);
  return it == world.graphs.end() ? nullptr : it->second.get();
}

namespace {

Graph* new_graph(World& world) {
  auto owned = std::make_unique<Graph>();
  Graph* graph = owned.get();
  world.graphs.emplace(graph, std::move(owned));
  return graph;
}

// A copy: its nodes depend on each other as those of the graph do.
Graph* clone(World& world, const Graph& graph) {
  Graph* made = new_graph(world);
  made->launch_values = graph.launch_values;
  std::map<const Node*, Node*> now;
  for (const auto& node : graph.nodes) {
    auto copied = std::make_unique<Node>(*node);
    now[node.get()] = copied.get();
    for (Graph*& body : copied->bodies) body = clone(world, *body);
    made->nodes.push_back(std::move(copied));
  }
  for (const auto& node : made->nodes) {
    for (Node*& before : node->after) before = now[before];
  }
  return made;
}

// The frame of what adds a node: `fill` makes it, and may refuse.
Result add_node(const char* symbol, cu::GraphNode* made, cu::Graph graph,
                const cu::GraphNode* after, std::size_t count, NodeKind kind,
                const std::function<Result(World&, Node&)>& fill) {
  return call(symbol, kInit, [&](World& world, Lock&) {
    Graph* found = find_graph(world, graph);
    if (found == nullptr || made == nullptr) return Result::kInvalidValue;
    auto node = std::make_unique<Node>();
    node->kind = kind;
    for (std::size_t i = 0; i < count; ++i) node->after.push_back(node_of(after[i]));
    if (Result bad = fill(world, *node); bad != Result::kSuccess) return bad;
    *made = reinterpret_cast<cu::GraphNode>(node.get());
    found->nodes.push_back(std::move(node));
    return Result::kSuccess;
  });
}

template <typename Parameters>
Result add_work(const char* symbol, cu::GraphNode* made, cu::Graph graph,
                const cu::GraphNode* after, std::size_t count, NodeKind kind,
                const Parameters& parameters) {
  return add_node(symbol, made, graph, after, count, kind,
                  [&](World& world, Node& node) { return work_of(world, parameters, node.work); });
}

Result add_bodies(World& world, ConditionalNodeParameters& parameters, Node& node) {
  static std::vector<std::unique_ptr<std::vector<cu::Graph>>> arrays;  // the callers read them on
  if (parameters.size == 0) return Result::kInvalidValue;
  node.condition = parameters.condition;
  node.handle = parameters.handle;
  arrays.push_back(std::make_unique<std::vector<cu::Graph>>());
  for (unsigned i = 0; i < parameters.size; ++i) {
    node.bodies.push_back(new_graph(world));
    arrays.back()->push_back(handle_of(node.bodies.back()));
  }
  parameters.bodies = arrays.back()->data();
  return Result::kSuccess;
}

Result list(const std::vector<Node*>& nodes, cu::GraphNode* to, std::size_t* count) {
  if (to != nullptr) {
    std::size_t room = std::min(*count, nodes.size());
    for (std::size_t i = 0; i < room; ++i) to[i] = reinterpret_cast<cu::GraphNode>(nodes[i]);
  }
  *count = nodes.size();
  return Result::kSuccess;
}

std::uint64_t address(const CopyPlace& place, std::size_t row, std::size_t plane) {
  std::uint64_t base = place.kind == 1 ? reinterpret_cast<std::uint64_t>(place.host) : place.device;
  return base + place.x + (place.y + row) * place.pitch +
         (place.z + plane) * place.pitch * place.height;
}

}  // namespace

Result work_of(World& world, const NodeParameters& parameters, Work& work) {
  switch (parameters.kind) {
    case NodeKind::kKernel: return work_of(world, parameters.kernel, work);
    case NodeKind::kMemset: return work_of(world, parameters.memset, work);
    case NodeKind::kMemcpy: return work_of(world, parameters.memcpy.copy, work);
    case NodeKind::kHost: return work_of(world, parameters.host, work);
    case NodeKind::kEmpty: return Result::kSuccess;
    default: return Result::kNotSupported;
  }
}

Result work_of(World& world, const KernelNodeParameters& parameters, Work& work) {
  const auto& [function, grid, block, shared_bytes, values, extra, kernel, context] = parameters;
  fakecuda_launch shape{nullptr,
                        {grid[0], grid[1], grid[2]},
                        {block[0], block[1], block[2]},
                        {0, 0, 0},
                        shared_bytes,
                        nullptr,
                        /*replayed=*/0};
  return kernel_work(world,
                     {"cuGraphAddKernelNode_v2", function != nullptr ? function : kernel, shape,
                      values, extra, /*cooperative=*/false},
                     -1, work);
}
Result work_of(World&, const MemsetNodeParameters& parameters, Work& work) {
  std::vector<Work> rows;
  for (std::size_t row = 0; row < std::max<std::size_t>(parameters.height, 1); ++row) {
    rows.push_back(fill_work("a fill of a graph", parameters.to + row * parameters.pitch,
                             parameters.value, parameters.value_bytes, parameters.width));
  }
  work.what = "a fill of a graph";
  work.kind = NodeKind::kMemset;
  for (const Work& row : rows) {
    work.accesses.insert(work.accesses.end(), row.accesses.begin(), row.accesses.end());
  }
  work.run = [rows = std::move(rows)](bool replayed) {
    for (const Work& row : rows) {
      if (Result bad = row.run(replayed); bad != Result::kSuccess) return bad;
    }
    return Result::kSuccess;
  };
  return Result::kSuccess;
}
Result work_of(World&, const CopyNodeParameters& parameters, Work& work) {
  constexpr int kHost = 1, kArray = 3;
  const auto& [from, to, width, height, depth] = parameters;
  if (from.kind == kArray || to.kind == kArray) return Result::kNotSupported;
  std::vector<Work> rows;
  for (std::size_t plane = 0; plane < std::max<std::size_t>(depth, 1); ++plane) {
    for (std::size_t row = 0; row < std::max<std::size_t>(height, 1); ++row) {
      rows.push_back(
          copy_work({"a copy of a graph", address(to, row, plane), address(from, row, plane), width,
                     to.kind == kHost, from.kind == kHost},
                    nullptr));
    }
  }
  work.what = "a copy of a graph";
  work.kind = NodeKind::kMemcpy;
  work.run = [rows = std::move(rows)](bool replayed) {
    for (const Work& row : rows) {
      if (Result bad = row.run(replayed); bad != Result::kSuccess) return bad;
    }
    return Result::kSuccess;
  };
  return Result::kSuccess;
}
Result work_of(World&, const HostNodeParameters& parameters, Work& work) {
  work.what = "a host function of a graph";
  work.kind = NodeKind::kHost;
  work.run = [parameters](bool) {
    in_host_function = true;
    parameters.function(parameters.data);
    in_host_function = false;
    return Result::kSuccess;
  };
  return Result::kSuccess;
}

FAKECUDA_API Result cuGraphCreate(cu::Graph* graph, unsigned) {
  return call("cuGraphCreate", kInit, [&](World& world, Lock&) {
    *graph = handle_of(new_graph(world));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphClone(cu::Graph* made, cu::Graph graph) {
  return call("cuGraphClone", kInit, [&](World& world, Lock&) {
    Graph* found = find_graph(world, graph);
    if (found == nullptr) return Result::kInvalidValue;
    *made = handle_of(clone(world, *found));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphDestroy(cu::Graph graph) {
  return call("cuGraphDestroy", kInit, [&](World& world, Lock& lock) {
    auto owned = world.graphs.extract(graph);
    if (owned.empty()) return Result::kInvalidValue;
    destroy_graph(world, lock, std::move(owned.mapped()));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphAddEmptyNode(cu::GraphNode* made, cu::Graph graph,
                                        const cu::GraphNode* after, std::size_t count) {
  return add_node("cuGraphAddEmptyNode", made, graph, after, count, NodeKind::kEmpty,
                  [](World&, Node&) { return Result::kSuccess; });
}
FAKECUDA_API Result cuGraphAddKernelNode_v2(cu::GraphNode* made, cu::Graph graph,
                                            const cu::GraphNode* after, std::size_t count,
                                            const KernelNodeParameters* parameters) {
  return add_work("cuGraphAddKernelNode_v2", made, graph, after, count, NodeKind::kKernel,
                  *parameters);
}
FAKECUDA_API Result cuGraphAddMemsetNode(cu::GraphNode* made, cu::Graph graph,
                                         const cu::GraphNode* after, std::size_t count,
                                         const MemsetNodeParameters* parameters, cu::Context) {
  return add_work("cuGraphAddMemsetNode", made, graph, after, count, NodeKind::kMemset,
                  *parameters);
}
FAKECUDA_API Result cuGraphAddMemcpyNode(cu::GraphNode* made, cu::Graph graph,
                                         const cu::GraphNode* after, std::size_t count,
                                         const CopyNodeParameters* parameters, cu::Context) {
  return add_work("cuGraphAddMemcpyNode", made, graph, after, count, NodeKind::kMemcpy,
                  *parameters);
}
FAKECUDA_API Result cuGraphAddHostNode(cu::GraphNode* made, cu::Graph graph,
                                       const cu::GraphNode* after, std::size_t count,
                                       const HostNodeParameters* parameters) {
  return add_work("cuGraphAddHostNode", made, graph, after, count, NodeKind::kHost, *parameters);
}
FAKECUDA_API Result cuGraphAddChildGraphNode(cu::GraphNode* made, cu::Graph graph,
                                             const cu::GraphNode* after, std::size_t count,
                                             cu::Graph child) {
  return add_node("cuGraphAddChildGraphNode", made, graph, after, count, NodeKind::kGraph,
                  [&](World& world, Node& node) {
                    Graph* found = find_graph(world, child);
                    if (found == nullptr) return Result::kInvalidValue;
                    node.bodies.push_back(clone(world, *found));
                    return Result::kSuccess;
                  });
}
FAKECUDA_API Result cuGraphAddNode_v2(cu::GraphNode* made, cu::Graph graph,
                                      const cu::GraphNode* after, const void*, std::size_t count,
                                      NodeParameters* parameters) {
  return add_node("cuGraphAddNode_v2", made, graph, after, count, parameters->kind,
                  [&](World& world, Node& node) {
                    switch (parameters->kind) {
                      case NodeKind::kConditional:
                        return add_bodies(world, parameters->conditional, node);
                      case NodeKind::kGraph: {
                        Graph* found = find_graph(world, parameters->child);
                        if (found == nullptr) return Result::kInvalidValue;
                        node.bodies.push_back(clone(world, *found));
                        return Result::kSuccess;
                      }
                      default: return work_of(world, *parameters, node.work);
                    }
                  });
}
FAKECUDA_API Result cuGraphAddNode(cu::GraphNode* made, cu::Graph graph, const cu::GraphNode* after,
                                   std::size_t count, NodeParameters* parameters) {
  return cuGraphAddNode_v2(made, graph, after, nullptr, count, parameters);
}
FAKECUDA_API Result cuGraphConditionalHandleCreate(std::uint64_t* handle, cu::Graph graph,
                                                   cu::Context, unsigned value, unsigned flags) {
  return call("cuGraphConditionalHandleCreate", kInit, [&](World& world, Lock&) {
    static std::uint64_t next = 1;
    Graph* found = find_graph(world, graph);
    if (found == nullptr) return Result::kInvalidValue;
    *handle = next++;
    if ((flags & 1) != 0) found->launch_values.emplace_back(*handle, value);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphAddDependencies(cu::Graph, const cu::GraphNode* from,
                                           const cu::GraphNode* to, std::size_t count) {
  return call("cuGraphAddDependencies", kInit, [&](World&, Lock&) {
    for (std::size_t i = 0; i < count; ++i) node_of(to[i])->after.push_back(node_of(from[i]));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphGetNodes(cu::Graph graph, cu::GraphNode* nodes, std::size_t* count) {
  return call("cuGraphGetNodes", kInit, [&](World& world, Lock&) {
    Graph* found = find_graph(world, graph);
    if (found == nullptr) return Result::kInvalidValue;
    std::vector<Node*> all;
    for (const auto& node : found->nodes) all.push_back(node.get());
    return list(all, nodes, count);
  });
}
FAKECUDA_API Result cuGraphGetRootNodes(cu::Graph graph, cu::GraphNode* nodes, std::size_t* count) {
  return call("cuGraphGetRootNodes", kInit, [&](World& world, Lock&) {
    Graph* found = find_graph(world, graph);
    if (found == nullptr) return Result::kInvalidValue;
    std::vector<Node*> roots;
    for (const auto& node : found->nodes) {
      if (node->after.empty()) roots.push_back(node.get());
    }
    return list(roots, nodes, count);
  });
}
FAKECUDA_API Result cuGraphNodeGetDependencies(cu::GraphNode node, cu::GraphNode* nodes,
                                               std::size_t* count) {
  return call("cuGraphNodeGetDependencies", kInit,
              [&](World&, Lock&) { return list(node_of(node)->after, nodes, count); });
}
FAKECUDA_API Result cuGraphNodeGetDependencies_v2(cu::GraphNode node, cu::GraphNode* nodes, void*,
                                                  std::size_t* count) {
  return cuGraphNodeGetDependencies(node, nodes, count);
}
FAKECUDA_API Result cuGraphNodeGetType(cu::GraphNode node, NodeKind* kind) {
  *kind = node_of(node)->kind;
  return Result::kSuccess;
}
FAKECUDA_API Result cuGraphChildGraphNodeGetGraph(cu::GraphNode node, cu::Graph* graph) {
  if (node_of(node)->kind != NodeKind::kGraph) return Result::kInvalidValue;
  *graph = handle_of(node_of(node)->bodies[0]);
  return Result::kSuccess;
}
FAKECUDA_API Result cuGraphKernelNodeSetAttribute(cu::GraphNode, int, const void*) {
  return Result::kSuccess;  // priorities and the like, which change no result
}
FAKECUDA_API Result cuGraphDebugDotPrint(cu::Graph graph, const char* path, unsigned) {
  return call("cuGraphDebugDotPrint", kInit, [&](World& world, Lock&) {
    Graph* found = find_graph(world, graph);
    if (found == nullptr) return Result::kInvalidValue;
    std::FILE* file = std::fopen(path, "w");
    if (file == nullptr) return Result::kInvalidValue;
    std::fprintf(file, "digraph {\n");
    for (const auto& node : found->nodes) {
      std::fprintf(file, "  \"%p\" [label=\"%s\"];\n", static_cast<void*>(node.get()),
                   node->work.what);
      for (const Node* before : node->after) {
        std::fprintf(file, "  \"%p\" -> \"%p\";\n", static_cast<const void*>(before),
                     static_cast<void*>(node.get()));
      }
    }
    std::fprintf(file, "}\n");
    std::fclose(file);
    return Result::kSuccess;
  });
}

FAKECUDA_API Result cuStreamBeginCapture_v2(cu::Stream stream, cu::CaptureMode mode) {
  return call("cuStreamBeginCapture_v2", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamBeginCapture_v2");
    if (found == nullptr) return Result::kInvalidHandle;
    return begin_capture(world, *found, mode) ? Result::kSuccess : Result::kInvalidCapture;
  });
}
FAKECUDA_API Result cuStreamBeginCaptureToGraph(cu::Stream stream, cu::Graph graph,
                                                const cu::GraphNode* after, const void*,
                                                std::size_t count, cu::CaptureMode mode) {
  return call("cuStreamBeginCaptureToGraph", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamBeginCaptureToGraph");
    Graph* into = find_graph(world, graph);
    if (found == nullptr || into == nullptr) return Result::kInvalidHandle;
    if (!begin_capture(world, *found, mode)) return Result::kInvalidCapture;
    found->capture->own = nullptr;
    found->capture->graph = into;
    if (count > 0) found->capture->last = node_of(after[count - 1]);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuStreamEndCapture(cu::Stream stream, cu::Graph* graph) {
  return call("cuStreamEndCapture", kInit, [&](World& world, Lock& lock) {
    StreamState* found = find_stream(world, stream, "cuStreamEndCapture");
    if (found == nullptr) return Result::kInvalidHandle;
    if (found->capture == nullptr) return Result::kInvalidCapture;
    if (found->capture->origin != found) return Result::kCaptureUnmatched;
    Graph* made = end_capture(world, lock, *found);
    if (graph != nullptr) *graph = handle_of(made);
    return made == nullptr ? Result::kStreamCaptureInvalidated : Result::kSuccess;
  });
}
FAKECUDA_API Result cuStreamGetCaptureInfo_v2(cu::Stream stream, cu::CaptureStatus* status,
                                              std::uint64_t* id, cu::Graph* graph,
                                              const cu::GraphNode** dependencies,
                                              std::size_t* count);
FAKECUDA_API Result cuStreamGetCaptureInfo_v3(cu::Stream stream, cu::CaptureStatus* status,
                                              std::uint64_t* id, cu::Graph* graph,
                                              const cu::GraphNode** dependencies,
                                              const void** edges, std::size_t* count) {
  if (edges != nullptr) *edges = nullptr;
  return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

}  // namespace fakecuda
