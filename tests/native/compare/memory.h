// Memory between two pages that nobody may touch. What lies in it ends at the second of them, or begins at the first.
#pragma once

#include <cstddef>

namespace compare {

class GuardedMemory {
  public:
    GuardedMemory(size_t bytes, bool at_end);
    ~GuardedMemory();
    GuardedMemory(const GuardedMemory &) = delete;

    char *data() const { return contents; }
    size_t size() const { return bytes; }
    void forbid_writing();
    // Whether the bytes between what lies there and the other guard page hold what they were filled with.
    bool rest_intact() const;

    static constexpr char CANARY = 0x5a;

  private:
    const size_t bytes, pages; // pages: bytes of whole pages between the guards
    char *mapped, *contents;

    char *first_page() const;
};

} // namespace compare
