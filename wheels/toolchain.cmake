# Cross-compiles with the Clang of ziglang, which contains every system's C library and links its own C++ runtime statically.
# MXD_ZIG_TARGET: the argument of `zig c++ -target`, which includes the lowest version of the system.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MXD_ZIG MXD_ZIG_TARGET)
set(CMAKE_CXX_COMPILER ${MXD_ZIG} c++ -target ${MXD_ZIG_TARGET})

string(REGEX MATCH "^[a-z0-9_]+" CMAKE_SYSTEM_PROCESSOR ${MXD_ZIG_TARGET})
if(MXD_ZIG_TARGET MATCHES "windows")
  set(CMAKE_SYSTEM_NAME Windows)
elseif(MXD_ZIG_TARGET MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_INSTALL_NAME_TOOL install_name_tool CACHE STRING "") # CMake requires this tool but never calls it
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()

# Zig keeps frame pointers and writes debug information, with this machine's paths, unless it is told otherwise.
set(CMAKE_CXX_FLAGS_INIT "-fomit-frame-pointer -g0")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s")
