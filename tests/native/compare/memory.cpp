#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#ifdef _WIN32
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace compare {
namespace {

constexpr size_t PAGE = 16384; // a multiple of every system's own: 16 KiB on Macs

void must(bool holds) {
    if (holds) return;
    std::fprintf(stderr, "compare: the system gives no memory\n");
    std::exit(3);
}

enum Access { NONE, READ };

#ifdef _WIN32
char *map(size_t bytes) { return static_cast<char *>(VirtualAlloc(nullptr, bytes, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE)); }
void unmap(char *from, size_t) { VirtualFree(from, 0, MEM_RELEASE); }
bool protect(char *from, size_t bytes, Access access) {
    DWORD before;
    return VirtualProtect(from, bytes, access == READ ? PAGE_READONLY : PAGE_NOACCESS, &before) != 0;
}
#else
char *map(size_t bytes) {
    void *found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    return found == MAP_FAILED ? nullptr : static_cast<char *>(found);
}
void unmap(char *from, size_t bytes) { munmap(from, bytes); }
bool protect(char *from, size_t bytes, Access access) {
    return mprotect(from, bytes, access == READ ? PROT_READ : PROT_NONE) == 0;
}
#endif

} // namespace

GuardedMemory::GuardedMemory(size_t wanted, bool at_end)
    : bytes(wanted), pages(std::max<size_t>(1, (wanted + PAGE - 1) / PAGE) * PAGE), mapped(map(pages + 2 * PAGE)) {
    must(mapped);
    must(protect(mapped, PAGE, NONE) && protect(first_page() + pages, PAGE, NONE));
    contents = first_page() + (at_end ? pages - bytes : 0);
    std::fill_n(first_page(), pages, CANARY);
}

GuardedMemory::~GuardedMemory() { unmap(mapped, pages + 2 * PAGE); }

char *GuardedMemory::first_page() const { return mapped + PAGE; }

void GuardedMemory::forbid_writing() { must(protect(first_page(), pages, READ)); }

bool GuardedMemory::rest_intact() const {
    const auto canary = [](char byte) { return byte == CANARY; };
    return std::all_of(first_page(), contents, canary) && std::all_of(contents + bytes, first_page() + pages, canary);
}

} // namespace compare
