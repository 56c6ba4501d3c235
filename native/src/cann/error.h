// Errors of the CANN-style interface. The code inside throws a status with a sentence; a C function returns the status
// and keeps the sentence for aclGetRecentErrMsg.
#pragma once

#include "acl/acl.h"
#include "call/words.h"

#include <new>
#include <string>
#include <system_error>

namespace acl {

struct Outcome {
    aclError status = ACL_SUCCESS;
    std::string sentence;
};

// What checks throw.
struct Refusal : Outcome {
    explicit Refusal(Outcome why) : Outcome(std::move(why)) {}
    Refusal(aclError why, const std::string &name, const std::string &rule, const std::string &fact)
        : Outcome{why, mxd::sentence(name, rule, fact)} {}
};

// Keeps the sentence for this thread's aclGetRecentErrMsg and returns the status.
aclError report(const Outcome &outcome) noexcept;

// Runs fn and returns how it ended: an exception becomes an outcome.
template <class Fn> Outcome outcome_of(Fn &&fn) noexcept {
    try {
        fn();
        return {};
    } catch (const Refusal &refusal) {
        return refusal;
    } catch (const std::bad_alloc &) {
        return {ACL_ERROR_BAD_ALLOC, {}}; // no sentence: it may need memory, and report() has one
    } catch (const std::system_error &error) {
        return {ACL_ERROR_INTERNAL_ERROR, error.what()};
    }
}

// Runs the body of a C function: what the body throws becomes the status that the function returns.
template <class Fn> aclError guarded(Fn &&fn) noexcept { return report(outcome_of(fn)); }

} // namespace acl
