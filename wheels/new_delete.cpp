// Zig's C++ runtime for macOS exports operator new and delete, and its linker accepts no list of exports. These operators
// replace them and are compiled as hidden. The list is complete: a missing operator would link all of the runtime's.
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

constexpr std::size_t USUAL = alignof(std::max_align_t);

void *allocated(std::size_t size, std::size_t alignment = USUAL) noexcept {
    void *memory = nullptr;
    return posix_memalign(&memory, alignment < USUAL ? USUAL : alignment, size ? size : 1) == 0 ? memory : nullptr;
}

void *or_throw(void *memory) {
    if (!memory) throw std::bad_alloc();
    return memory;
}

} // namespace

typedef std::size_t Size;
typedef std::align_val_t Align;
typedef const std::nothrow_t &Nothrow;

void *operator new(Size size) { return or_throw(allocated(size)); }
void *operator new[](Size size) { return or_throw(allocated(size)); }
void *operator new(Size size, Align to) { return or_throw(allocated(size, Size(to))); }
void *operator new[](Size size, Align to) { return or_throw(allocated(size, Size(to))); }
void *operator new(Size size, Nothrow) noexcept { return allocated(size); }
void *operator new[](Size size, Nothrow) noexcept { return allocated(size); }
void *operator new(Size size, Align to, Nothrow) noexcept { return allocated(size, Size(to)); }
void *operator new[](Size size, Align to, Nothrow) noexcept { return allocated(size, Size(to)); }

void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete[](void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, Size) noexcept { std::free(memory); }
void operator delete[](void *memory, Size) noexcept { std::free(memory); }
void operator delete(void *memory, Align) noexcept { std::free(memory); }
void operator delete[](void *memory, Align) noexcept { std::free(memory); }
void operator delete(void *memory, Size, Align) noexcept { std::free(memory); }
void operator delete[](void *memory, Size, Align) noexcept { std::free(memory); }
void operator delete(void *memory, Nothrow) noexcept { std::free(memory); }
void operator delete[](void *memory, Nothrow) noexcept { std::free(memory); }
void operator delete(void *memory, Align, Nothrow) noexcept { std::free(memory); }
void operator delete[](void *memory, Align, Nothrow) noexcept { std::free(memory); }
