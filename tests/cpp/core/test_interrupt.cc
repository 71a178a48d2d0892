// SPDX-License-Identifier: Apache-2.0
// Ctrl-C as programs see it: which runs end, and whose handler is called how often.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>

#include "core/lifecycle.h"

namespace callgate {
namespace {

int g_before = 0, g_other = 0;
struct sigaction g_chained;

void before(int) { ++g_before; }
void other(int number, siginfo_t* info, void* context) {
  if (++g_other < 100) g_chained.sa_sigaction(number, info, context);
}

struct Handler {
  explicit Handler(void (*handler)(int)) {
    struct sigaction action{};
    action.sa_handler = handler;
    sigaction(SIGINT, &action, &was);
  }
  ~Handler() { sigaction(SIGINT, &was, nullptr); }
  struct sigaction was;
};

TEST(Interrupt, RunsThatHadBegunEndAndLaterOnesDoNot) {
  Handler handler(&before);
  Interrupts::watch();
  Interrupts::set_judge([] { return true; });
  EXPECT_FALSE(Interrupts::ends(1001));
  EXPECT_FALSE(Interrupts::ends(1001));
  raise(SIGINT);
  EXPECT_TRUE(Interrupts::ends(1001));
  EXPECT_TRUE(Interrupts::ends(1001));
  EXPECT_FALSE(Interrupts::ends(1002));
  EXPECT_FALSE(Interrupts::ends(1002));
  EXPECT_FALSE(Interrupts::ends(-1)) << "a run without a number";
}

TEST(Interrupt, ARunThatHadBegunEndsHoweverManyOthersHaveCalledSince) {
  Handler handler(&before);
  Interrupts::watch();
  Interrupts::set_judge([] { return true; });
  EXPECT_FALSE(Interrupts::ends(10'001));
  for (std::int64_t run = 10'002; run < 15'000; ++run) EXPECT_FALSE(Interrupts::ends(run));
  raise(SIGINT);
  EXPECT_TRUE(Interrupts::ends(10'001));
  EXPECT_FALSE(Interrupts::ends(20'001));
  EXPECT_TRUE(Interrupts::ends(10'001));
}

TEST(Interrupt, AHandlerThatDoesNotRaiseEndsNothing) {
  Handler handler(&before);
  Interrupts::watch();
  Interrupts::set_judge([] { return false; });
  EXPECT_FALSE(Interrupts::ends(2001));
  raise(SIGINT);
  EXPECT_FALSE(Interrupts::ends(2001));
  Interrupts::set_judge([] { return true; });
  EXPECT_FALSE(Interrupts::ends(2001)) << "asked once an interrupt";
}

TEST(Interrupt, AtTheEndEveryRunIsEndedUntilFurtherNotice) {
  EXPECT_FALSE(Interrupts::ends(3001));
  Interrupts::end_all(true);
  EXPECT_TRUE(Interrupts::ends(3001));
  EXPECT_TRUE(Interrupts::ends(3002));
  Interrupts::end_all(false);
  EXPECT_TRUE(Interrupts::ends(3001));
  EXPECT_FALSE(Interrupts::ends(3003));
}

TEST(Interrupt, AHandlerThatCallsOursIsNotCalledByIt) {
  Handler handler(&before);
  Interrupts::watch();
  struct sigaction mine{};
  mine.sa_sigaction = &other;
  mine.sa_flags = SA_SIGINFO;
  sigaction(SIGINT, &mine, &g_chained);
  Interrupts::watch();
  g_before = g_other = 0;
  raise(SIGINT);
  EXPECT_EQ(g_other, 1);
  EXPECT_EQ(g_before, 1);
  EXPECT_TRUE(Interrupts::recent());
}

TEST(Interrupt, OursIsPutBackWhereTheFirstHandlerIsAlone) {
  Handler handler(&before);
  Interrupts::watch();
  signal(SIGINT, &before);
  Interrupts::watch();
  Interrupts::set_judge([] { return true; });
  EXPECT_FALSE(Interrupts::ends(4001));
  raise(SIGINT);
  EXPECT_TRUE(Interrupts::ends(4001));
}

}  // namespace
}  // namespace callgate
