// SPDX-License-Identifier: Apache-2.0
// Names, who owns what they stand for, and what a missing name says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/call.h"
#include "fake_callee.h"

namespace callgate {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::shared_ptr<Callee> make_callee(const std::string& name) {
  return std::make_shared<fake::FunctionCallee>(name);
}

std::string find_error(const Registry& registry, std::string_view name) {
  try {
    registry.find(name);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    return error.what();
  }
  ADD_FAILURE() << name << " was found";
  return "";
}

TEST(Registry, FindsWhatWasAdded) {
  Registry registry;
  auto f = make_callee("f"), g = make_callee("g");
  registry.add(f);
  registry.add(g);
  EXPECT_EQ(registry.find("f"), f);
  EXPECT_EQ(registry.find("g"), g);
}

TEST(Registry, OwnsNoCallee) {
  Registry registry;
  auto callee = make_callee("f");
  std::weak_ptr<Callee> watched = callee;
  registry.add(callee);
  EXPECT_EQ(callee.use_count(), 1);
  callee.reset();
  EXPECT_TRUE(watched.expired());
  find_error(registry, "f");
  EXPECT_THAT(registry.names(), ElementsAre());
}

TEST(Registry, ACalleeThatClaimsItsNameIsFoundUntilItReleasesIt) {
  Registry registry;
  auto old = make_callee("f"), anew = make_callee("f");
  registry.add(old);
  registry.claim(old);
  registry.remove(*old);
  registry.add(anew);
  EXPECT_EQ(registry.find("f"), old);
  registry.release(*old);
  EXPECT_EQ(registry.find("f"), anew);
  registry.claim(old);
  old.reset();
  EXPECT_EQ(registry.find("f"), anew) << "a claim owns no callee";
}

TEST(Registry, ANameOfALiveCalleeIsTaken) {
  Registry registry;
  auto first = make_callee("f"), second = make_callee("f");
  registry.add(first);
  EXPECT_NO_THROW(registry.add(first)) << "the same callee again";
  try {
    registry.add(second);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists);
    EXPECT_THAT(error.what(), HasSubstr("'f'"));
  }
  EXPECT_EQ(registry.find("f"), first);
  first.reset();
  registry.add(second);
  EXPECT_EQ(registry.find("f"), second);
}

TEST(Registry, RemoveFreesTheNameOfACalleeThatGoesOnLiving) {
  Registry registry;
  auto first = make_callee("f"), second = make_callee("f");
  registry.add(first);
  registry.remove(*first);
  registry.remove(*first);  // once more does nothing
  registry.add(second);
  registry.remove(*first);  // has the name no longer
  EXPECT_EQ(registry.find("f"), second);
}

TEST(Registry, NamesAreTheLiveOnesSorted) {
  Registry registry;
  auto c = make_callee("c"), a = make_callee("a"), b = make_callee("b");
  for (const auto& callee : {c, a, b}) registry.add(callee);
  EXPECT_THAT(registry.names(), ElementsAre("a", "b", "c"));
  b.reset();
  EXPECT_THAT(registry.names(), ElementsAre("a", "c"));
}

TEST(Registry, AMissingNameSaysWhatIsDefinedAndHowToDefineIt) {
  Registry registry;
  EXPECT_THAT(find_error(registry, "nothing"), Not(HasSubstr("Defined here")));
  std::vector<std::shared_ptr<Callee>> callees;
  for (char letter = 'a'; letter <= 'i'; ++letter) {
    callees.push_back(make_callee(std::string("gate_") + letter));
    registry.add(callees.back());
  }
  std::string message = find_error(registry, "module.missing");
  EXPECT_THAT(message, HasSubstr("no gate or kernel named 'module.missing'"));
  EXPECT_THAT(message, HasSubstr("name='module.missing'"));
  EXPECT_THAT(message, HasSubstr("'gate_a', 'gate_b'"));
  EXPECT_THAT(message, HasSubstr("'gate_h', …"));
  EXPECT_THAT(message, Not(HasSubstr("gate_i")));
}

TEST(Registry, AMissingNameListsTheNamesThatAreDefinedLater) {
  Registry registry;
  auto callee = make_callee("z");
  registry.add(callee);
  registry.set_resolver([](const std::string& name, std::vector<std::string>& defined) {
    defined = {name + "s", "z"};
    return nullptr;
  });
  EXPECT_THAT(find_error(registry, "wind"), HasSubstr("Defined here: 'winds', 'z'"));
}

// A callee's end may look at the registry, as a Python object's destructor can.
class Reentrant final : public Callee {
 public:
  explicit Reentrant(Registry& registry) : registry_(registry) {}
  ~Reentrant() override { registry_.remove(*this); }
  Reentrant(const Reentrant&) = delete;
  Reentrant& operator=(const Reentrant&) = delete;
  std::shared_ptr<Site> specialise(SiteSpec) override { return nullptr; }
  const std::string& name() const noexcept override { return name_; }

 private:
  Registry& registry_;
  std::string name_ = "reentrant";
};

TEST(Registry, ManyThreadsAddFindAndRemove) {
  Registry registry;
  auto shared = make_callee("shared");
  registry.add(shared);
  std::atomic<int> added{0}, taken{0};
  {
    std::vector<std::jthread> threads;
    for (int worker = 0; worker < 8; ++worker) {
      threads.emplace_back([&, worker] {
        for (int round = 0; round < 200; ++round) {
          auto own = make_callee("own" + std::to_string(worker));
          registry.add(own);
          EXPECT_EQ(registry.find(own->name()), own);
          EXPECT_EQ(registry.find("shared"), shared);
          auto contended = std::make_shared<Reentrant>(registry);
          try {
            registry.add(contended);
            added.fetch_add(1);
          } catch (const Error&) {
            taken.fetch_add(1);
          }
          registry.names();
          contended.reset();
          registry.remove(*own);
        }
      });
    }
  }
  EXPECT_EQ(added + taken, 8 * 200);
  EXPECT_GT(added, 0);
  EXPECT_THAT(registry.names(), ElementsAre("shared"));
}

}  // namespace
}  // namespace callgate
