// SPDX-License-Identifier: Apache-2.0
// What the driver's functions for graphs share: their parameters as CUDA lays them out, and the
// graphs that are ready to run.
//
// An executable graph is steps, one for each node: what may run is what all steps before have
// ended for, and which of those runs next is drawn at random, so that a dependency that is missing
// shows. One launch runs on its stream's thread, a step after the other.
#pragma once

#include <memory>
#include <vector>

#include "../fake_driver/world.h"

namespace fakecuda {

struct KernelNodeParameters {
  cu::Function function;
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  cu::Function kernel;  // where `function` is null
  cu::Context context;
};

struct MemsetNodeParameters {
  std::uint64_t to;
  std::size_t pitch;
  unsigned value, value_bytes;
  std::size_t width, height;  // elements, rows
};

struct CopyPlace {
  std::size_t x, y, z, level;
  int kind;
  void* host;
  std::uint64_t device;
  void *array, *reserved;
  std::size_t pitch, height;
};
struct CopyNodeParameters {
  CopyPlace from, to;
  std::size_t width, height, depth;  // bytes, rows, planes
};

struct HostNodeParameters {
  void (*function)(void*);
  void* data;
};

struct ConditionalNodeParameters {
  std::uint64_t handle;
  Condition condition;
  unsigned size;
  cu::Graph* bodies;  // the caller's, filled
  cu::Context context;
};

// CUgraphNodeParams
struct NodeParameters {
  NodeKind kind;
  int reserved[3];
  union {
    long long room[29];
    KernelNodeParameters kernel;
    MemsetNodeParameters memset;
    HostNodeParameters host;
    cu::Graph child;
    ConditionalNodeParameters conditional;
    struct {
      int flags, reserved;
      cu::Context context;
      CopyNodeParameters copy;
    } memcpy;
  };
  long long more;
};

// With the mutex held. Null where the handle is none.
Graph* find_graph(World& world, cu::Graph graph);
inline Node* node_of(cu::GraphNode node) { return reinterpret_cast<Node*>(node); }
inline cu::Graph handle_of(Graph* graph) { return reinterpret_cast<cu::Graph>(graph); }
Result work_of(World& world, const NodeParameters& parameters,
               Work& work);  // neither body nor child
Result work_of(World& world, const KernelNodeParameters& parameters, Work& work);
Result work_of(World& world, const MemsetNodeParameters& parameters, Work& work);
Result work_of(World& world, const CopyNodeParameters& parameters, Work& work);
Result work_of(World& world, const HostNodeParameters& parameters, Work& work);

struct Exec;
struct Step {
  Node* node = nullptr;  // what it was made of; not looked into
  NodeKind kind = NodeKind::kEmpty;
  Work work;
  std::vector<std::size_t> after;
  std::vector<std::shared_ptr<Exec>> bodies;
  Condition condition = Condition::kIf;
  std::uint64_t handle = 0;
  bool enabled = true;
};
struct Exec {
  std::vector<Step> steps;
  std::vector<std::pair<std::uint64_t, unsigned>> launch_values;
};

}  // namespace fakecuda
