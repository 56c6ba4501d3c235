#include "lent_threads.h"

#include <thread>

namespace mxd {
namespace {

thread_local LentThreads *lent = nullptr;

} // namespace

LentThreads *lent_threads() { return lent; }

Lending::Lending(LentThreads &threads) { lent = &threads; }
Lending::~Lending() { lent = nullptr; }

void let_others_run() { std::this_thread::yield(); }

} // namespace mxd
