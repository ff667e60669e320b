# Flags that hold for every target. Instruction sets are never chosen here: kernels name their own
# per source, and everything else is plain x86-64 (or the baseline of another processor).
add_library(freshet_options INTERFACE)
target_include_directories(freshet_options INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
target_compile_options(freshet_options INTERFACE -Wall -Wextra -Wshadow -Wno-missing-field-initializers
                       -ffp-contract=off)
target_compile_definitions(freshet_options INTERFACE FRESHET_VERSION="${PROJECT_VERSION}")
if(FRESHET_SANITIZE)
  target_compile_options(freshet_options INTERFACE -fsanitize=${FRESHET_SANITIZE}
                         -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(freshet_options INTERFACE -fsanitize=${FRESHET_SANITIZE})
endif()

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE})
  # Without these settings ccache refuses every source that uses precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
endif()
