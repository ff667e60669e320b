# Writes OUTPUT, a source with the commit that is built and the name of the compiler:
#   cmake -D SOURCE_DIR=... -D OUTPUT=... -D COMPILER=... -P commit.cmake
# In a checkout git is asked. In an archive that git made, commit.txt holds the commit (.gitattributes).
# Elsewhere it is empty: sources below another project's checkout are not that project's commit.
file(READ ${SOURCE_DIR}/cmake/commit.txt commit)
string(STRIP "${commit}" commit)
if(commit MATCHES "^.Format:")
  set(commit "")
  find_program(GIT git)
  if(GIT)
    execute_process(COMMAND ${GIT} -C ${SOURCE_DIR} rev-parse --show-toplevel
                    OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    file(REAL_PATH ${SOURCE_DIR} here)
    if(top STREQUAL here)
      execute_process(COMMAND ${GIT} -C ${SOURCE_DIR} log -1 "--format=%h %cs"
                      OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endif()
endif()
file(WRITE ${OUTPUT} "namespace freshet::cli {
extern const char kCommit[];
extern const char kCompiler[];
const char kCommit[] = \"${commit}\";
const char kCompiler[] = \"${COMPILER}\";
}  // namespace freshet::cli
")
