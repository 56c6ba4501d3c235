// Zig's C++ runtime for macOS exports the operators that allocate, and its linker takes no list of exports. These take
// their place, and are compiled hidden.
#include <cstdlib>
#include <new>

void *operator new(std::size_t size) {
    if (void *memory = std::malloc(size ? size : 1)) return memory;
    throw std::bad_alloc();
}
void *operator new[](std::size_t size) { return operator new(size); }
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete[](void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void *memory, std::size_t) noexcept { std::free(memory); }
