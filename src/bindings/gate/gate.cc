// SPDX-License-Identifier: Apache-2.0
// See the header. Calls from Python hold the GIL; calls from XLA take it.
#include "bindings/gate/gate.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays/buffer.h"
#include "bindings/arrays/views.h"
#include "bindings/gate/scopes.h"
#include "bindings/gate/thread.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/python/hooks.h"
#include "cells/check.h"
#include "core/lifetime.h"
#include "core/timeline.h"
#include "kernels/kernel_debug.h"

namespace callgate::bindings {

namespace {

using CalleeHandle = Handle<PyCallee>;

// Items for Python: lists of NumPy arrays on their way in, bytes on their way out.
struct ItemQueueHandle {
  ItemQueueHandle(std::vector<std::size_t> bytes, std::size_t most, std::size_t refill)
      : queue(std::make_shared<ItemQueue>(std::move(bytes), most, refill)) {}

  bool put(const nb::list& arrays) const {
    const std::vector<std::size_t>& expected = queue->bytes();
    if (arrays.size() != expected.size())
      raise(PyExc_ValueError, "ItemQueue.put: arrays of an item");
    std::vector<const void*> memory;
    std::size_t total = 0;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      PyObject* object = nb::handle(arrays[i]).ptr();
      auto* array = reinterpret_cast<PyArrayObject*>(object);
      if (!PyArray_Check(object) || !PyArray_IS_C_CONTIGUOUS(array) ||
          static_cast<std::size_t>(PyArray_NBYTES(array)) != expected[i])
        raise(PyExc_ValueError, "ItemQueue.put: expected contiguous arrays of an item's sizes");
      memory.push_back(PyArray_DATA(array));
      total += expected[i];
    }
    return put(memory, total);
  }
  // See its docstring.
  nb::tuple fill(nb::handle iterator, nb::handle dtype, const std::vector<npy_intp>& shape) const {
    auto* type = reinterpret_cast<PyArray_Descr*>(dtype.ptr());
    std::array<std::byte, sizeof(npy_clongdouble)> scalar;
    auto memory_of = [&](PyObject* item) -> const void* {  // null for another form
      if (shape.empty() && write_scalar(scalar.data(), item, type)) return scalar.data();
      if (!PyArray_CheckExact(item)) return nullptr;
      auto* array = reinterpret_cast<PyArrayObject*>(item);
      std::span extents(PyArray_DIMS(array), static_cast<std::size_t>(PyArray_NDIM(array)));
      const bool is_plain = PyArray_IS_C_CONTIGUOUS(array) &&
                            PyArray_EquivTypes(PyArray_DESCR(array), type) &&
                            std::ranges::equal(extents, shape);
      return is_plain ? PyArray_DATA(array) : nullptr;
    };
    while (queue->has_room()) {
      nb::object item = nb::steal(PyIter_Next(iterator.ptr()));
      if (!item.is_valid()) {
        if (PyErr_Occurred() != nullptr) nb::raise_python_error();
        return nb::make_tuple("over", nb::none());
      }
      const void* memory = memory_of(item.ptr());
      if (memory == nullptr || !put({&memory, 1}, queue->bytes()[0]))
        return nb::make_tuple("item", item);
      if (awaited) return nb::make_tuple("awaited", nb::none());
    }
    return nb::make_tuple("full", nb::none());
  }
  std::optional<nb::bytes> pop() const {
    std::optional<ItemQueue::Item> item = queue->pop();
    if (!item) return std::nullopt;
    return nb::bytes(item->data(), item->size());
  }
  nb::list leave() const {
    nb::list items;
    for (const ItemQueue::Item& item : queue->leave())
      items.append(nb::bytes(item.data(), item.size()));
    return items;
  }

  std::shared_ptr<ItemQueue> queue;
  Shared<bool> awaited{false};  // a call waits in Python

 private:
  bool put(std::span<const void* const> memory, std::size_t total) const {
    constexpr std::size_t kLong = 1 << 16;  // bytes; larger copies release the GIL
    if (total < kLong) return queue->put(memory);
    return without_gil([&] { return queue->put(memory); });
  }
};

void bind_items(nb::module_& module) {
  nb::class_<ItemQueueHandle>(module, "ItemQueue",
                              "A feed's items, which programs take without the GIL.")
      .def(nb::init<std::vector<std::size_t>, std::size_t, std::size_t>(), nb::arg("bytes"),
           nb::arg("most"), nb::arg("refill"))
      .def(
          "put", [](const ItemQueueHandle& h, const nb::list& arrays) { return h.put(arrays); },
          nb::arg("arrays"), "Adds an item; False if the queue accepts no more items.")
      .def("fill", &ItemQueueHandle::fill, nb::arg("iterator"), nb::arg("dtype"), nb::arg("shape"),
           "Adds an iterator's items while there is room. Each must be a single contiguous array, "
           "or a\n"
           "NumPy scalar, of the given type. Returns the reason for the stop and the remaining "
           "item: 'full',\n"
           "'over', 'item' (another form, or not accepted), or 'awaited'.")
      .def_prop_rw(
          "awaited", [](const ItemQueueHandle& h) -> bool { return h.awaited; },
          [](ItemQueueHandle& h, bool on) { h.awaited = on; },
          "True if `fill` stops after each item.")
      .def("has_room", [](const ItemQueueHandle& h) { return h.queue->has_room(); })
      .def(
          "wait_for_room",
          [](const ItemQueueHandle& h) {
            return without_gil([&] { return h.queue->wait_for_room(); });
          },
          "False if the queue accepts no more items.")
      .def("pop", &ItemQueueHandle::pop, "The next item, if there is one.")
      .def("leave", &ItemQueueHandle::leave, "Stops accepting items; returns the waiting ones.")
      .def("size", [](const ItemQueueHandle& h) { return h.queue->size(); })
      .def("taken", [](const ItemQueueHandle& h) { return h.queue->taken(); })
      .def("put_count", [](const ItemQueueHandle& h) { return h.queue->put(); })
      .def("waited", [](const ItemQueueHandle& h) { return h.queue->waited(); });
}

struct CheckHandle : Handle<CheckCallee> {
  CheckHandle(std::string name, const CalleeHandle& failed, bool breakpoint)
      : Handle(std::make_shared<CheckCallee>(
            std::move(name), failed.callee,
            breakpoint ? check_switches.breakpoints : check_switches.checks, breakpoint)) {}
};

// (extents of the batch levels, the lane's number, device, shard, layout)
std::optional<
    std::tuple<std::vector<std::int64_t>, std::int64_t, std::int64_t, std::int32_t, std::string>>
current_place() {
  const CallPlace* place = CallPlace::current_;
  if (place == nullptr) return std::nullopt;
  return std::tuple(std::vector(place->lanes.begin(), place->lanes.end()), place->lane,
                    place->context->device, place->context->shard, *place->layout);
}

std::optional<std::int64_t> current_run() {
  const CallPlace* place = CallPlace::current_;
  return place == nullptr ? std::nullopt : std::optional(place->context->run);
}

Style style_of(const std::string& text) {
  return text == "inplace" ? Style::kInplace : text == "context" ? Style::kContext : Style::kReturn;
}

std::uintptr_t stream_number(const Context& context) { return number_of(context.stream); }

int ordinal_of(const Context& context) {
  return context.stream == nullptr ? -1 : DeviceCall::of(context).device->ordinal();
}

std::int64_t rank_of(const Context& context) { return std::max(context.shard, 0); }

nb::dict coordinates_of(const Context& context) {
  nb::dict coordinates;
  std::int64_t inner = context.mesh->devices;
  for (const auto& [name, extent] : context.mesh->axes) {
    inner /= extent;
    coordinates[name.c_str()] = rank_of(context) / inner % extent;
  }
  return coordinates;
}

enum class Stage { kInstantiate, kPrepare, kInitialize, kExecute };

void bind_context(nb::module_& module) {
  nb::enum_<Stage>(module, "ExecutionStage",
                   "The stages of a call in XLA; callables run in EXECUTE.")
      .value("INSTANTIATE", Stage::kInstantiate)
      .value("PREPARE", Stage::kPrepare)
      .value("INITIALIZE", Stage::kInitialize)
      .value("EXECUTE", Stage::kExecute);
  nb::class_<Context>(module, "Context",
                      "The first argument of a style=\"context\" gate: the device, the stream and "
                      "the shard of a call.")
      .def_prop_ro(
          "stage", [](const Context&) { return Stage::kExecute; },
          "The call's stage in XLA, always `ExecutionStage.EXECUTE`.")
      .def_prop_ro("stream", &stream_number,
                   "XLA's CUDA stream as an integer (a CUstream); 0 on the CPU.")
      .def(
          "stream_as",
          [](const Context& c, const std::string& library) {
            return nb::handle(hooks.stream_as)(library, stream_number(c), ordinal_of(c));
          },
          nb::arg("library"),
          "Returns XLA's stream as an object of a library.\n\n"
          "Args:\n  library: \"cupy\", \"torch\", \"numba\" or \"cuda\" (a CUstream of "
          "cuda.bindings).\n\n"
          "Raises:\n  GateDefinitionError: the call runs on the CPU, or the library is missing.")
      .def_prop_ro("ordinal", &ordinal_of,
                   "CUDA's number of the GPU in this process; -1 on the CPU.")
      .def_ro("device", &Context::device, "The device's global id (`jax.Device.id`).")
      .def_ro("run", &Context::run,
              "XLA's id of this run of the program, the same on all its devices.")
      .def_prop_ro("rank", &rank_of,
                   "The device's index among the devices of the program: 0 to size - 1.")
      .def_prop_ro(
          "size", [](const Context& c) { return c.mesh->devices; },
          "The number of devices that run the program.")
      .def_prop_ro("coordinates", &coordinates_of,
                   "The device's index along each axis of the program's mesh, by the axis's name; "
                   "empty if the mesh is unknown.");
}

// Process settings that watch calls and traces.
void bind_settings(nb::module_& module) {
  auto set = [](int bit, bool on) {
    // Relaxed: see Settings.
    on ? settings.recorded.fetch_or(bit, std::memory_order_relaxed)
       : settings.recorded.fetch_and(~bit, std::memory_order_relaxed);
  };
  module.def("set_timing", [set](bool on) { set(Settings::kTiming, on); });
  module.def("set_profiling", [set](bool on) { set(Settings::kProfiling, on); });
  module.def("start_trace", [set] {
    const std::size_t first = Timeline::start();
    set(Settings::kTracing, /*on=*/true);
    return first;
  });
  module.def(
      "stop_trace",
      [set](std::size_t first) {
        nb::list events;
        for (const TimelineEvent& one : Timeline::stop(first))
          events.append(nb::make_tuple(one.kind, one.name, one.thread, one.start_ns, one.wait_ns,
                                       one.duration_ns));
        set(Settings::kTracing, Timeline::on());
        return events;
      },
      nb::arg("first"),
      "(kind, name, the system's thread number, and in nanoseconds the start, the wait for the "
      "GIL, and the duration including this wait) of each call since the start_trace that returned "
      "`first`.");
  module.def("tracing", [] { return Timeline::on(); });
  module.def("trace_event",
             [](const std::string& kind, const std::string& name, std::int64_t start_ns) {
               Timeline::add(kind, name, start_ns, 0, Timeline::now_ns() - start_ns);
             });
  module.def("now_ns", &Timeline::now_ns);
  module.def("set_check_writes", [](bool on) {
    settings.check_writes.store(on, std::memory_order_relaxed);  // as above
  });
  // Relaxed: see CheckSwitches.
  module.def("set_checks",
             [](bool on) { check_switches.checks.store(on, std::memory_order_relaxed); });
  module.def("set_breakpoints",
             [](bool on) { check_switches.breakpoints.store(on, std::memory_order_relaxed); });
  module.def("set_stall_seconds", [](double seconds) {
    settings.stall_ns.store(seconds_of(seconds).count(), std::memory_order_relaxed);  // as above
    kernel_stall_ns.store(seconds_of(seconds).count(), std::memory_order_relaxed);    // as above
  });
}

}  // namespace

void bind_gate(nb::module_& module) {
  struct Registered {  // for the process's life
    std::shared_ptr<Callee> callee = std::make_shared<AfterCallee>();
  };
  Registry::instance().add(immortal<Registered>().callee);
  bind_context(module);
  bind_settings(module);
  bind_items(module);
  module.def(
      "device_call",
      []() -> std::optional<std::pair<std::uintptr_t, int>> {
        const DeviceCall* call = DeviceCallScope::current_;
        if (call == nullptr) return std::nullopt;
        return std::pair(number_of(call->stream), call->device->ordinal());
      },
      "(stream, GPU's number) of this thread's running call on a GPU; None on the CPU.");
  bind_callee<CalleeHandle>(module, "Callee", "The runtime's handle on a Python callable, by name.")
      .def(
          "__init__",
          [](CalleeHandle* self, std::string name, nb::object function, nb::object bind,
             const std::string& style, const std::string& arrays, bool owned_inputs,
             bool flat_results, bool own_thread, double timeout, bool native, bool default_stream,
             bool command_buffer, bool located, bool taped, bool parallel,
             const ThreadHandle* thread) {
            const GateOptions options{style_of(style),
                                      arrays == "buffer",
                                      owned_inputs,
                                      flat_results,
                                      own_thread || timeout > 0,
                                      native,
                                      default_stream,
                                      command_buffer,
                                      located,
                                      taped,
                                      parallel,
                                      seconds_of(timeout)};
            new (self) CalleeHandle(
                std::make_shared<PyCallee>(std::move(name), std::move(function), std::move(bind),
                                           options, thread == nullptr ? nullptr : thread->thread));
          },
          nb::arg("name"), nb::arg("function"), nb::kw_only(), nb::arg("bind") = nb::none(),
          nb::arg("style") = "return", nb::arg("arrays") = "numpy", nb::arg("owned_inputs") = false,
          nb::arg("flat_results") = false, nb::arg("own_thread") = false, nb::arg("timeout") = 0.0,
          nb::arg("native") = false, nb::arg("default_stream") = false,
          nb::arg("command_buffer") = false, nb::arg("located") = false, nb::arg("taped") = false,
          nb::arg("parallel") = false, nb::arg("thread") = nb::none())
      .def(
          "serve_items",
          [](const CalleeHandle& handle, const ItemQueueHandle& items) {
            handle.callee->items = items.queue;
          },
          nb::arg("items"),
          "Makes calls on the host take their results from this queue, if possible.");
  bind_callee<CheckHandle>(module, "Check",
                           "A callee that calls another one if its first operand is False.")
      .def(nb::init<std::string, const CalleeHandle&, bool>(), nb::arg("name"), nb::arg("failed"),
           nb::arg("breakpoint") = false);
  module.def("current_place", &current_place,
             "For this thread's running call of a `located` callee: the extents of its batch "
             "levels, the lane's number, the device's id, its number in the program (-1: whole "
             "arrays), and its part of the arrays, as text.");
  module.def(
      "current_run", &current_run,
      "XLA's number of the execution, for this thread's running call of a `located` callee.");
}

}  // namespace callgate::bindings
