#include "threads/lent_threads.h"

namespace mxd {
namespace {

thread_local LentThreads *lent = nullptr;

} // namespace

LentThreads *lent_threads() { return lent; }

Lending::Lending(LentThreads &threads) { lent = &threads; }
Lending::~Lending() { lent = nullptr; }

} // namespace mxd
