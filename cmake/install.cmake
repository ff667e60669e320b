# What `make install` and `make package` install: the program, the CUDA plug-in if it is built, manual
# pages, completions, documents, a systemd unit and its configuration file. Nothing refers to the
# prefix but the unit: the program finds its plug-in relative to itself.
include(GNUInstallDirs)
set(share ${CMAKE_BINARY_DIR}/share)
set(written ${share}/written)
# The program writes its own manual pages and completions.
add_custom_command(OUTPUT ${written}
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${share}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${share}/man ${share}/completions
  COMMAND freshet man --all ${share}/man
  COMMAND gzip -9n ${share}/man/*.1
  COMMAND freshet completion bash > ${share}/completions/freshet
  COMMAND freshet completion zsh > ${share}/completions/_freshet
  COMMAND freshet completion fish > ${share}/completions/freshet.fish
  COMMAND ${CMAKE_COMMAND} -E touch ${written}
  DEPENDS freshet)
add_custom_target(freshet_share ALL DEPENDS ${written})

install(TARGETS freshet RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET freshet_cuda)
  install(TARGETS freshet_cuda LIBRARY DESTINATION lib/freshet)
endif()
install(DIRECTORY ${share}/man/ DESTINATION share/man/man1 FILES_MATCHING PATTERN "*.1.gz")
install(FILES ${share}/completions/freshet DESTINATION share/bash-completion/completions)
install(FILES ${share}/completions/_freshet DESTINATION share/zsh/site-functions)
install(FILES ${share}/completions/freshet.fish DESTINATION share/fish/vendor_completions.d)
install(FILES LICENSE README.md CHANGELOG.md DESTINATION share/doc/freshet)
# The licences of the libraries in the web page.
install(FILES src/server/web/vendor/NOTICE.md DESTINATION share/doc/freshet RENAME NOTICE.md)

# The prefix is known when installing. A configuration file that is already there is kept. /usr has
# its configuration in /etc, every other prefix below itself.
install(CODE "set(source \"${CMAKE_SOURCE_DIR}/packaging\")
set(scratch \"${CMAKE_BINARY_DIR}/install\")")
install(CODE [[
  set(FRESHET_BIN "${CMAKE_INSTALL_PREFIX}/bin/freshet")
  set(etc "${CMAKE_INSTALL_PREFIX}/etc/freshet")
  if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
    set(etc "/etc/freshet")
  endif()
  set(FRESHET_CONFIG "${etc}/serve.toml")
  configure_file(${source}/systemd/freshet.service.in ${scratch}/freshet.service @ONLY)
  file(INSTALL ${scratch}/freshet.service
       DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/systemd/system)
  if(NOT EXISTS "$ENV{DESTDIR}${FRESHET_CONFIG}")
    file(INSTALL ${source}/serve.toml DESTINATION ${etc})
  endif()
]])
