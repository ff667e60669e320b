# Python3_EXECUTABLE, the Python that runs the tests: the first python3 on PATH that has the modules which
# tools/packages-test.txt installs. Debian's packages serve Debian's own interpreter, and one of pyenv or of an
# environment often comes before it on PATH. If none has them, the first python3 is taken, and the tests that
# need a module are skipped. -DPython3_EXECUTABLE=... chooses another.
set(freshet_python_modules pyte)

function(freshet_has_python_modules result python)
  foreach(module ${freshet_python_modules})
    execute_process(COMMAND ${python} -c "import ${module}" RESULT_VARIABLE code OUTPUT_QUIET ERROR_QUIET)
    if(NOT code EQUAL 0)
      set(${result} FALSE PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

if(NOT Python3_EXECUTABLE)
  find_program(FRESHET_TEST_PYTHON python3 VALIDATOR freshet_has_python_modules
               DOC "The Python that runs the tests")
  if(FRESHET_TEST_PYTHON)
    set(Python3_EXECUTABLE ${FRESHET_TEST_PYTHON})
  else()
    message(STATUS "No python3 has ${freshet_python_modules} (Debian: python3-pyte): some tests will be skipped")
  endif()
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
