# Shortens a build from nothing. Most of what a small source costs is shared with its neighbours: the
# standard library's headers and the instances of its templates.
#
# freshet_merge_sources(TARGET [BATCH count] [SEPARATE source...])
#   Compiles the sources in batches of 16, or of BATCH (0: all), a "unity build". Names in anonymous
#   namespaces of one batch must differ; a source that clashes with others is named after SEPARATE.
# freshet_precompiled_headers(TARGET SET)
#   Includes the headers of SET (std, tests) first, precompiled once per set. For targets whose
#   sources cannot be merged. Needs the same flags in all targets that share a set.
#
# Both hide a missing #include, and after an edit more is compiled than the edited source. Builds with
# FRESHET_FAST_BUILD=OFF (presets dev, debug, asan, tsan, fuzz, arm64; `make lint`) compile every source
# alone.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(FRESHET_FAST_BUILD OFF)  # clang-tidy and the fuzzers do without
endif()

function(freshet_merge_sources target)
  cmake_parse_arguments(ARG "" "BATCH" "SEPARATE" ${ARGN})
  if(NOT FRESHET_FAST_BUILD)
    return()
  endif()
  if(NOT DEFINED ARG_BATCH)
    set(ARG_BATCH 16)
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${ARG_BATCH})
  target_compile_options(${target} PRIVATE -Wno-subobject-linkage)  # GCC takes the sources for headers
  set_source_files_properties(${ARG_SEPARATE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

set(freshet_headers_std
    <algorithm> <array> <atomic> <charconv> <chrono> <cmath> <condition_variable> <cstdint> <cstring>
    <deque> <filesystem> <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional>
    <random> <set> <span> <sstream> <string> <string_view> <thread> <unordered_map> <utility>
    <variant> <vector> <fmt/format.h>)
set(freshet_headers_tests ${freshet_headers_std} <gmock/gmock.h> <gtest/gtest.h>)
# The flags with which a set is used.
set(freshet_flags_std -O3)
set(freshet_flags_tests -O1)
set(freshet_libs_tests GTest::gmock)

function(freshet_precompiled_headers target set)
  if(NOT FRESHET_FAST_BUILD)
    return()
  endif()
  if(NOT TARGET freshet_headers_${set})
    set(empty ${CMAKE_BINARY_DIR}/headers_${set}.cc)
    file(GENERATE OUTPUT ${empty} CONTENT "")
    add_library(freshet_headers_${set} OBJECT EXCLUDE_FROM_ALL ${empty})
    target_link_libraries(freshet_headers_${set} PRIVATE freshet_options ${freshet_libs_${set}})
    target_compile_options(freshet_headers_${set} PRIVATE $<$<CONFIG:Release>:${freshet_flags_${set}}>)
    target_compile_options(freshet_headers_${set} PRIVATE -fpch-preprocess)  # for ccache
    target_precompile_headers(freshet_headers_${set} PRIVATE ${freshet_headers_${set}})
  endif()
  target_compile_options(${target} PRIVATE -fpch-preprocess)
  target_precompile_headers(${target} REUSE_FROM freshet_headers_${set})
endfunction()
