# FRESHET_STATIC_LIBS: the program holds all libraries but glibc, so that one file runs on any Linux
# with that glibc or a newer one. Used for packages (`make package`).
option(FRESHET_STATIC_LIBS "Link all libraries but glibc into the program" OFF)
if(FRESHET_STATIC_LIBS)
  set(CMAKE_FIND_LIBRARY_SUFFIXES .a)
  set(OPENSSL_USE_STATIC_LIBS ON)
  add_link_options(-static-libstdc++ -static-libgcc)
endif()
