// SPDX-License-Identifier: Apache-2.0
// The fake driver's state: one world for the process, under one mutex, never destroyed.
//
// Streams are threads. Work is checked when it is given to a stream and runs on the stream's thread
// without the mutex. Order is checked with vector clocks: a stream's clock says up to which work of
// every stream its own next work is ordered after; events carry clocks from stream to stream, and
// the host has one clock for all its threads, so what the host has waited for is known to all.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../ptx/ptx.h"
#include "cuda_types.h"
#include "fakecuda.h"

namespace fakecuda {

using cu::Result;

using Clock = std::map<int, std::uint64_t>;  // by the stream's number
void join(Clock& clock, const Clock& other);

struct Access {
  std::uint64_t begin, end;
  bool writes;
};

// A use of memory that later ones must be ordered after.
struct Past {
  Access access;
  int stream;
  std::uint64_t epoch;
  const char* what;
};
using History = std::vector<Past>;

struct Allocation {
  std::uint64_t base = 0;
  std::size_t bytes = 0;
  int device = 0;
  bool pinned = false, freed = false;
  bool foreign = false;  // a test's own, so that it counts as no leak
  bool dropped = false;  // to be freed when no work uses it any more
  char* host = nullptr;
  int pending = 0;  // works that use it and have not ended
  History history;
};

enum class NodeKind : int {  // CUgraphNodeType
  kKernel = 0,
  kMemcpy = 1,
  kMemset = 2,
  kHost = 3,
  kGraph = 4,
  kEmpty = 5,
  kConditional = 13,
};

// One thing for a stream to do. Copies are replayed by graphs.
struct Work {
  const char* what = "";
  NodeKind kind = NodeKind::kKernel;
  std::vector<Access> accesses;
  std::function<Result(bool replayed)> run;
  bool copies = false;
};

// A point in a stream that something waits for.
struct Marker {
  bool done = false;
  Result result = Result::kSuccess;
  Clock clock;
};

struct StreamState;

// Something that graphs own together: `destroy` is called when the last lets it go.
struct UserObject {
  void* data = nullptr;
  void (*destroy)(void*) = nullptr;
  unsigned references = 0;
};

struct Node;

// Its nodes, in an order that their dependencies allow.
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  std::map<UserObject*, unsigned> objects;                        // and its references of each
  std::vector<std::pair<std::uint64_t, unsigned>> launch_values;  // of conditions, set at a launch
};

enum class Condition : int { kIf = 0, kWhile = 1, kSwitch = 2 };

struct Node {
  NodeKind kind = NodeKind::kEmpty;
  Work work;
  std::vector<Node*> after;
  std::vector<Graph*> bodies;  // the child, or what the condition's value decides upon
  Condition condition = Condition::kIf;
  std::uint64_t handle = 0;  // the condition's
};

struct Capture {
  cu::CaptureMode mode = cu::CaptureMode::kThreadLocal;
  std::thread::id thread;
  bool invalidated = false;
  StreamState* origin = nullptr;
  std::set<StreamState*> streams;
  std::unique_ptr<Graph> own = std::make_unique<Graph>();
  Graph* graph = own.get();  // or one that was there before
  Node* last = nullptr;
  History history;
};

struct Queued {
  Work work;
  std::shared_ptr<Marker> marker;  // set when the work has ended
  bool replayed = false;
  std::vector<std::shared_ptr<Allocation>> uses;
};

struct StreamState {
  int number = 0;
  int device = 0;
  bool alive = true, held = false;
  bool foreign = false;  // as memory may be
  Result failed = Result::kSuccess;
  Result fails_next = Result::kSuccess;
  Clock clock;
  std::deque<Queued> queue;  // the front is what runs
  std::condition_variable changed;
  std::shared_ptr<Capture> capture;
  Clock capture_clock;
};

struct EventState {
  int device = 0;
  bool alive = true;
  std::shared_ptr<Marker> marker;    // of its last record
  std::shared_ptr<Capture> capture;  // where that was captured
  Clock capture_clock;
};

struct Kernel {
  std::string name;
  fakecuda_kernel function = nullptr;  // a test's
  std::vector<std::size_t> sizes;
  vgpu::ptx::Function* ptx = nullptr;  // what runs where no function is registered
  std::map<std::size_t, int> accesses;
  void* user = nullptr;
};

struct ModuleState {
  bool alive = true;
  int device = 0;
  std::string image;
  std::unique_ptr<vgpu::ptx::Module> ptx;  // of text, where there is an interpreter
};

struct FunctionState {
  ModuleState* module = nullptr;
  std::shared_ptr<Kernel> kernel;
  int dynamic_shared = 48 * 1024;
};

struct DeviceState {
  std::map<int, int> attributes;
  StreamState* default_stream = nullptr;
  StreamState* thread_stream = nullptr;
};

struct Failure {
  std::string symbol;
  Result result;
  int after, count;
};

struct World {
  std::mutex mutex;
  std::condition_variable ended;  // some work has, or was let go

  bool initialised = false, lost = false, hold_all = false;
  int version = 12080;
  int device_count = 2;
  std::map<int, DeviceState> devices;
  unsigned copy_delay = 0;
  unsigned delay = 0;  // each work waits for up to so many microseconds
  std::minstd_rand random;
  // Strict: uses that real drivers allow and a careful program avoids are violations, and the order
  // of all work is checked. Programs such as XLA's run without.
  bool strict = true;
  // Compiles PTX; null where the library has no interpreter.
  std::unique_ptr<vgpu::ptx::Module> (*load_ptx)(std::string_view text) = nullptr;
  Result sticky = Result::kSuccess;  // of a kernel that failed: every call's result from then on
  Clock host_clock;
  int next_stream = 1;

  // Objects are kept when they are destroyed, so that their use is noticed.
  std::map<const void*, std::unique_ptr<StreamState>> streams;
  std::vector<StreamState*> stream_order;
  std::map<const void*, std::unique_ptr<EventState>> events;
  std::map<const void*, std::unique_ptr<ModuleState>> modules;
  std::map<const void*, std::unique_ptr<FunctionState>> functions;
  std::map<const void*, std::unique_ptr<Graph>> graphs;
  std::map<const void*, std::unique_ptr<UserObject>> objects;
  std::map<std::uint64_t, std::shared_ptr<Allocation>> memory;  // by its first address
  std::map<std::string, std::shared_ptr<Kernel>> kernels;
  std::set<std::shared_ptr<Capture>> captures;

  std::vector<Failure> failures;
  std::map<std::string, std::size_t> calls;
  std::deque<std::string> violations;  // grows without moving text
  std::deque<fakecuda_launch> launches;
  std::set<std::string> names;  // of launches

  static World& instance();
  void violation(const std::string& what) {
    if (strict) violations.push_back(what);
  }
};

using Lock = std::unique_lock<std::mutex>;

// What a function of the driver needs.
enum Needs : unsigned {
  kNothing = 0,
  kInit = 1,         // cuInit
  kContext = 2 | 1,  // a current context
  kUnsafe = 4,       // no capture that it might disturb
  kAnyway = 8,       // also where a kernel has failed before
};

// The frame of every function of the driver: counts the call, fails it where it has to.
Result call(const char* symbol, unsigned needs, const std::function<Result(World&, Lock&)>& body);

// Contexts: one a device. A device of -1 is none.
int current_device();
void set_current_device(int device);
cu::Context context_of(int device);
int device_of(cu::Context context);

// Streams. All with the mutex held.
StreamState* new_stream(World& world, int device);
// Null, with a violation, for one that is not alive; the device's own for the null stream.
StreamState* find_stream(World& world, cu::Stream stream, const char* symbol);
// The same, for functions that need the stream's context to be current.
Result stream_here(World& world, cu::Stream stream, const char* symbol, StreamState*& found);
Result enqueue(World& world, StreamState& stream, Work work, const char* symbol,
               bool replayed = false);
// A point after all that the stream has.
std::shared_ptr<Marker> mark(World& world, StreamState& stream);
// On a stream's thread, without the mutex.
Result wait_on_stream(const std::shared_ptr<Marker>& marker);
Result wait_on_host(World& world, Lock& lock, const std::shared_ptr<Marker>& marker);
Result synchronise(World& world, Lock& lock, StreamState& stream);
// Where the checks are not strict, memory is freed when nothing runs any more, as real drivers do.
void wait_for_all(World& world, Lock& lock);

// True while the thread runs a host function, which may not call the driver.
extern thread_local bool in_host_function;

// Kernels, copies and fills as works, for graphs. With the mutex held.
struct Launch {
  const char* symbol;
  cu::Function function;
  fakecuda_launch shape;
  void** parameters;
  void** extra;
  bool cooperative;
};
// A device of -1 is any.
Result kernel_work(World& world, const Launch& launch, int device, Work& work);
Work fill_work(const char* symbol, std::uint64_t to, std::uint32_t value, std::size_t value_bytes,
               std::size_t count);
// From `staged` where that is given.
Work copy_work(const struct Copy& copy, std::shared_ptr<std::vector<char>> staged);

// Graphs. With the mutex held; the first two let it go meanwhile.
void destroy_graph(World& world, Lock& lock, std::unique_ptr<Graph> graph);
// Null where the capture failed.
Graph* end_capture(World& world, Lock& lock, StreamState& stream);
bool begin_capture(World& world, StreamState& stream, cu::CaptureMode mode);

// True, with the captures invalidated, where the thread may not make unsafe calls.
bool disturbs_capture(World& world);

// Memory. With the mutex held.
std::shared_ptr<Allocation> find_memory(World& world, std::uint64_t pointer);
// Adds the access and reports what it isn't ordered after.
void check_order(World& world, History& history, const Past& now, const Clock& clock);
void free_memory(Allocation& allocation);
std::shared_ptr<Allocation> new_device_memory(World& world, int device, std::size_t bytes);
// A copy as real drivers do it, where the checks are not strict.
struct Copy {
  const char* symbol;
  std::uint64_t to, from;
  std::size_t bytes;
  bool to_host, from_host;
};
Result loose_copy(World& world, Lock& lock, const Copy& copy, StreamState& stream);
// Without the mutex: where the host finds it, for work that runs.
char* resolve(std::uint64_t pointer, std::size_t bytes);

std::string hex(std::uint64_t value);

}  // namespace fakecuda
