// See the header. Whatever waits gives the GIL up meanwhile, and looks for signals now and then.
#include "bindings/channel/channel.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "channel/tap.h"
#include "core/call.h"
#include "core/lifecycle.h"

namespace callgate::bindings {
namespace {

using Clock = Channel::Clock;
constexpr auto kSlice = std::chrono::milliseconds(50);

// Calls `wait(slice)` until it says true; false when `timeout` (seconds) is over, and in a fork's
// child, where nobody is left to wait for. Raises what a signal handler raises.
template <typename Wait>
bool wait_in_slices(std::optional<double> timeout, Wait&& wait) {
  auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(timeout.value_or(0)));
  while (!Channel::abandoned()) {
    Clock::duration slice = kSlice;
    if (timeout) slice = std::min<Clock::duration>(slice, deadline - Clock::now());
    if (without_gil([&] { return wait(std::max(slice, Clock::duration::zero())); })) return true;
    if (timeout && Clock::now() >= deadline) return false;
    if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  }
  return false;
}

// -- channels ------------------------------------------------------------------------------------
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

// An open channel. Python closes it; one that is dropped open is closed without a wait for it.
class ChannelHandle {
 public:
  ChannelHandle(std::string name, std::size_t capacity, const std::string& on_full, double rate)
      : slot_(&Channels::instance().slot(name)) {
    Interrupts::watch();
    ChannelOptions options{std::move(name), capacity, parse_on_full(on_full), rate};
    channel_ = std::make_shared<Channel>(std::move(options), &report_error);
    without_gil([&] { slot_->open(channel_); });  // it waits for senders
  }
  ChannelHandle(ChannelHandle&&) = default;

  Channel& channel() const { return *channel_; }

  bool close(std::optional<double> timeout) {
    if (Channel::abandoned()) return true;  // the parent's is open; locks may be held for ever
    without_gil([&] { slot_->vacate(*channel_); });
    return wait_in_slices(timeout,
                          [this](Clock::duration slice) { return channel_->close(slice); });
  }

 private:
  ChannelSlot* slot_;
  std::shared_ptr<Channel> channel_;
};

// -- taps ----------------------------------------------------------------------------------------
class TapHandle : public Handle<TapCallee> {
 public:
  TapHandle(std::string name, const std::string& channel, std::shared_ptr<Consumer> consumer)
      : Handle(std::make_shared<TapCallee>(std::move(name), channel, std::move(consumer))) {}

  // A record from Python: what programs that cannot call the runtime send through JAX's callbacks.
  // `key` stands for `held`, all that the program's call of the tap holds.
  void send(const std::string& key, const nb::dict& held, std::int64_t device,
            const std::vector<nb::object>& arrays) {
    std::vector<ArrayView> views;
    std::string of_site = key;
    for (const nb::object& array : arrays) {
      views.push_back(view_of(array, "a tap's value"));
      of_site += '\n' + to_string(views.back());  // a site's shapes are those of its first call
    }
    std::shared_ptr<Site>& site = sites_[of_site];
    if (site == nullptr) {
      Attributes attributes = attributes_of(held);
      SiteSpec spec;
      spec.spec = attributes.text("spec");
      spec.lanes = Lanes::of(attributes.dictionary("batch"));
      spec.held = std::move(attributes);
      site = callee().specialise(std::move(spec));
    }
    CallContext context;
    context.device = device;
    without_gil([&] { site->run(Call{views, {}, context}); });  // the channel may be full
  }

 private:
  std::map<std::string, std::shared_ptr<Site>> sites_;
};

void bind_handles(nb::module_& module) {
  nb::class_<ChannelHandle>(module, "Channel", nb::is_weak_referenceable(),
                            "The runtime's handle on an open channel.")
      .def(nb::init<std::string, std::size_t, const std::string&, double>(), nb::arg("name"),
           nb::kw_only(), nb::arg("capacity"), nb::arg("on_full"), nb::arg("rate"))
      .def("add",
           [](ChannelHandle& handle, const nb::sequence& consumers) {
             std::vector<std::shared_ptr<Consumer>> all;
             for (nb::handle one : consumers)
               all.push_back(nb::cast<ConsumerHandle&>(one).consumer);
             handle.channel().add_all(std::move(all));
           })
      .def("remove",
           [](ChannelHandle& handle, ConsumerHandle& consumer) {
             // It waits for what is in delivery.
             const std::uint64_t delivery =
                 without_gil([&] { return handle.channel().request_removal(consumer.consumer); });
             wait_in_slices(std::nullopt, [&](Clock::duration slice) {
               return handle.channel().removed(delivery, slice);
             });
           })
      .def("start", [](ChannelHandle& handle) { handle.channel().start(); })
      .def(
          "flush",
          [](ChannelHandle& handle, std::optional<double> timeout) {
            std::uint64_t request = handle.channel().request_flush();
            return wait_in_slices(timeout, [&](Clock::duration slice) {
              return handle.channel().flushed(request, slice);
            });
          },
          nb::arg("timeout").none() = nb::none())
      .def("close", &ChannelHandle::close, nb::arg("timeout").none() = nb::none())
      .def("stats", [](const ChannelHandle& handle) { return to_dict(handle.channel().stats()); });
  bind_handle<TapHandle>(module, "Tap", "The runtime's handle on a tap, by name.")
      .def(
          "__init__",
          [](TapHandle* self, std::string name, const std::string& channel,
             ConsumerHandle* consumer) {
            new (self) TapHandle(std::move(name), channel,
                                 consumer == nullptr ? nullptr : consumer->consumer);
          },
          nb::arg("name"), nb::kw_only(), nb::arg("channel"),
          nb::arg("consumer").none() = nb::none())
      .def("send", &TapHandle::send, nb::arg("key"), nb::arg("held"), nb::arg("device"),
           nb::arg("arrays"));
}

}  // namespace

void bind_channel(nb::module_& module) {
  nb::class_<ConsumerHandle>(module, "Consumer", "A native consumer of a channel's records.")
      .def("__repr__",
           [](const ConsumerHandle& handle) {
             return "<native consumer: " + handle.consumer->description() + ">";
           })
      .def(
          "close",
          [](const ConsumerHandle& handle) { without_gil([&] { handle.consumer->close(); }); },
          "No record follows; after it was removed from its channel.");
  module.def("set_consumer_failed", [](nb::callable hook) {
    g_on_error = nb::object(hook).release().ptr();  // held for the life of the process
  });
  bind_py_consumer(module);
  bind_handles(module);
  module.def(
      "flush_channels",
      [](std::optional<double> timeout) {
        std::vector<std::pair<std::shared_ptr<Channel>, std::uint64_t>> requests;
        for (const auto& channel : Channels::instance().all())
          requests.emplace_back(channel, channel->request_flush());
        return wait_in_slices(timeout, [&](Clock::duration slice) {
          return std::ranges::all_of(
              requests, [&](const auto& one) { return one.first->flushed(one.second, slice); });
        });
      },
      nb::arg("timeout").none() = nb::none());
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
