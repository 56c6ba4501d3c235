// What aclGetRecentErrMsg returns: each thread's last sentence.
#include "cann/error.h"

namespace acl {
namespace {

struct Recent {
    std::string sentence, handed_out;
};

Recent &recent() {
    thread_local Recent message;
    return message;
}

} // namespace

aclError report(const Outcome &outcome) noexcept {
    if (outcome.status == ACL_SUCCESS) return ACL_SUCCESS;
    try {
        recent().sentence = outcome.status == ACL_ERROR_BAD_ALLOC ? "out of memory" : outcome.sentence;
    } catch (const std::bad_alloc &) {
    }
    return outcome.status;
}

} // namespace acl

extern "C" const char *aclGetRecentErrMsg(void) {
    acl::Recent &message = acl::recent();
    message.handed_out.swap(message.sentence);
    message.sentence.clear();
    return message.handed_out.empty() ? nullptr : message.handed_out.c_str();
}
