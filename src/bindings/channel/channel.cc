// SPDX-License-Identifier: Apache-2.0
// Channels, taps and consumers for Python. Waits release the GIL and regularly check for signals.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/channel/py_consumer.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/python/hooks.h"
#include "channel/tap.h"
#include "core/call.h"
#include "core/lifecycle.h"

namespace callgate::bindings {
namespace {

using Clock = Channel::Clock;
constexpr auto kSlice = std::chrono::milliseconds(50);

// Calls `wait(slice)` until it returns true. False if `timeout` (seconds) is over, and in a fork's
// child, where no thread would end the wait. Raises the exception of a signal handler.
template <typename Wait>
bool wait_in_slices(std::optional<double> timeout, Wait&& wait) {
  auto deadline = Clock::now() + seconds_of(timeout.value_or(0));
  while (!Channel::abandoned()) {
    Clock::duration slice = kSlice;
    if (timeout) slice = std::min<Clock::duration>(slice, deadline - Clock::now());
    if (without_gil([&] { return wait(std::max(slice, Clock::duration::zero())); })) return true;
    if (timeout && Clock::now() >= deadline) return false;
    if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  }
  return false;
}

PyObject* g_on_error = nullptr;  // (channel, consumer, message, lost so far); set once

void report_error(const Channel& channel, const Consumer& consumer, const std::string& message) {
  GilScope gil;
  call_unraisable(g_on_error, "sssK", channel.options().name.c_str(),
                  consumer.description().c_str(), message.c_str(),
                  static_cast<unsigned long long>(consumer.lost()));
}

OnFull parse_on_full(const std::string& text) {
  constexpr std::string_view kNames[] = {"block", "drop_new", "drop_old", "sample"};  // as OnFull's
  const auto* found = std::ranges::find(kNames, text);
  if (found != std::end(kNames)) return static_cast<OnFull>(found - kNames);
  throw Error("a channel's on_full", "'block', 'drop_new', 'drop_old' or 'sample'",
              "'" + text + "'");
}

nb::dict to_dict(const ChannelStats& stats) {
  return dict_of("sent", stats.sent, "delivered", stats.delivered, "dropped", stats.dropped,
                 "pending", stats.pending, "lost", stats.lost, "bytes", stats.bytes, "high_water",
                 stats.high_water);
}

// Python closes it.
std::shared_ptr<Channel> open_channel(std::string name, std::size_t capacity,
                                      const std::string& on_full, double rate) {
  Interrupts::watch();
  ChannelSlot& slot = Channels::instance().slot(name);
  auto channel = std::make_shared<Channel>(
      ChannelOptions{std::move(name), capacity, parse_on_full(on_full), rate}, &report_error);
  without_gil([&] { slot.open(channel); });  // waits for senders
  return channel;
}

bool close(Channel& channel, std::optional<double> timeout) {
  if (Channel::abandoned()) return true;  // the parent's is open; locks may never be released
  without_gil([&] { Channels::instance().slot(channel.options().name).vacate(channel); });
  return wait_in_slices(timeout, [&](Clock::duration slice) { return channel.close(slice); });
}

bool flush(const std::vector<std::shared_ptr<Channel>>& channels, std::optional<double> timeout) {
  std::vector<std::uint64_t> requests;
  requests.reserve(channels.size());
  for (const auto& channel : channels) requests.push_back(channel->request_flush());
  return wait_in_slices(timeout, [&](Clock::duration slice) {
    return std::ranges::equal(channels, requests, [&](const auto& channel, std::uint64_t request) {
      return channel->flushed(request, slice);
    });
  });
}

struct TapHandle : Handle<TapCallee> {
  TapHandle(std::string name, const std::string& channel, std::shared_ptr<Consumer> consumer)
      : Handle(std::make_shared<TapCallee>(std::move(name), channel, std::move(consumer))) {}

  // A record from Python, from programs that can't call the runtime and use JAX's callbacks
  // instead. `key` identifies `held`, the attributes of the program's tap call.
  void send(const std::string& key, const nb::dict& held, std::int64_t device,
            const std::vector<nb::object>& arrays) {
    std::vector<ArrayView> views;
    std::string of_site = key;
    for (const nb::object& array : arrays) {
      views.push_back(view_of(array, "a tap's value"));
      of_site += '\n' + to_string(views.back());  // a site's shapes are those of its first call
    }
    std::shared_ptr<Site> site;
    {
      nb::ft_lock_guard lock(mutex);
      site = sites[of_site];
    }
    if (site == nullptr) {
      Attributes attributes = attributes_of(held);
      SiteSpec spec;
      spec.spec = attributes.text("spec");
      spec.lanes = Lanes::of(attributes.dictionary("batch"));
      spec.held = std::move(attributes);
      auto made = callee->specialise(std::move(spec));
      nb::ft_lock_guard lock(mutex);
      std::shared_ptr<Site>& first = sites[of_site];
      if (first == nullptr) first = std::move(made);
      site = first;
    }
    CallContext context;
    context.device = static_cast<std::int32_t>(device);
    without_gil([&] { site->run(Call{views, {}, context}); });  // the channel may be full
  }

  // For Python's cycle collector: the consumer of a tap without executables.
  int visit(visitproc visit, void* arg) const {
    return visit_consumer(callee->consumer(), visit, arg);
  }
  void clear() const { clear_consumer(callee->consumer()); }

  nb::ft_mutex mutex;  // guards the sites
  std::map<std::string, std::shared_ptr<Site>> sites;
};

// For Python's cycle collector, as for a callee's handle (bindings/python/handle.h).
int traverse_consumer(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? visit_consumer(nb::inst_ptr<Consumer>(self), visit, arg) : 0;
}

int clear_consumer_object(PyObject* self) {
  if (nb::inst_ready(self)) clear_consumer(nb::inst_ptr<Consumer>(self));
  return 0;
}

}  // namespace

void bind_channel(nb::module_& module) {
  static PyType_Slot collected[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_consumer)},
                                    {Py_tp_clear, reinterpret_cast<void*>(&clear_consumer_object)},
                                    {0, nullptr}};
  nb::class_<Consumer>(module, "Consumer", nb::type_slots(collected),
                       "A native consumer of a channel's records.")
      .def("__repr__",
           [](const Consumer& of) { return "<native consumer: " + of.description() + ">"; })
      .def(
          "close", [](Consumer& consumer) { without_gil([&] { consumer.close(); }); },
          "Closes the consumer, after its removal from its channel.");
  module.def("set_consumer_failed", [](nb::callable hook) {
    g_on_error = hook.release().ptr();  // held for the process's life
  });
  nb::class_<Channel>(module, "Channel", nb::is_weak_referenceable(),
                      "The runtime's handle on an open channel.")
      .def(nb::new_(&open_channel), nb::arg("name"), nb::kw_only(), nb::arg("capacity"),
           nb::arg("on_full"), nb::arg("rate"))
      .def("add",
           [](Channel& channel, const nb::sequence& consumers) {
             std::vector<std::shared_ptr<Consumer>> all;
             for (nb::handle one : consumers)
               all.push_back(nb::cast<Consumer&>(one).shared_from_this());
             channel.add_all(std::move(all));
           })
      .def("remove",
           [](Channel& channel, Consumer& consumer) {
             // Waits for the records in delivery.
             const std::uint64_t delivery =
                 without_gil([&] { return channel.request_removal(consumer.shared_from_this()); });
             wait_in_slices(std::nullopt, [&](Clock::duration slice) {
               return channel.removed(delivery, slice);
             });
           })
      .def("start", &Channel::start)
      .def(
          "flush",
          [](Channel& channel, std::optional<double> timeout) {
            return flush({channel.shared_from_this()}, timeout);
          },
          nb::arg("timeout").none() = nb::none())
      .def("close", &close, nb::arg("timeout").none() = nb::none())
      .def("stats", [](const Channel& channel) { return to_dict(channel.stats()); });
  bind_callee<TapHandle>(module, "Tap", "The runtime's handle on a tap, by name.")
      .def(nb::init<std::string, const std::string&, std::shared_ptr<Consumer>>(), nb::arg("name"),
           nb::kw_only(), nb::arg("channel"), nb::arg("consumer").none() = nb::none())
      .def("send", &TapHandle::send, nb::arg("key"), nb::arg("held"), nb::arg("device"),
           nb::arg("arrays"));
  module.def(
      "flush_channels",
      [](std::optional<double> timeout) { return flush(Channels::instance().all(), timeout); },
      nb::arg("timeout").none() = nb::none());
  module.def("delivers_here", &Channel::on_thread_of_any,
             "True if this is a channel's thread, which runs consumers.");
  module.def("channel_stats", [] {
    nb::dict all;
    for (const auto& channel : Channels::instance().all())
      all[nb::str(channel->options().name.c_str())] = to_dict(channel->stats());
    return all;
  });
  module.def("abandon_channels", &Channel::abandon_all);
  module.def("channels_abandoned", &Channel::abandoned);
}

}  // namespace callgate::bindings
