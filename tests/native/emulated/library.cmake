# AMX's kernels with tiles that are emulated, in a library that only tests load: tests/support/emulated_amx.py builds it.
set(LANES)
if(MILLRACE_EMULATED_ON STREQUAL avx2)
  set(LANES -mavx2 -mfma -mf16c)
endif()
set(HERE ${CMAKE_CURRENT_LIST_DIR})
set(NATIVE ${CMAKE_SOURCE_DIR}/native)

# -O1: the kernels' templates take most of the time.
add_library(isa_amx_emulated OBJECT EXCLUDE_FROM_ALL ${NATIVE}/isa_unit.cpp ${NATIVE}/probe_unit.cpp ${GENERATED})
target_link_libraries(isa_amx_emulated PRIVATE options)
target_include_directories(isa_amx_emulated PRIVATE ${HERE})
target_compile_definitions(isa_amx_emulated PRIVATE MILLRACE_ISA=amx_emulated MILLRACE_LANES="${HERE}/lanes.hpp")
target_compile_options(isa_amx_emulated PRIVATE -O1 ${LANES})

add_library(millrace_emulated SHARED EXCLUDE_FROM_ALL
  ${NATIVE}/abi.cpp ${NATIVE}/executor.cpp ${NATIVE}/language_model.cpp ${NATIVE}/pool.cpp ${NATIVE}/platform.cpp
  ${NATIVE}/probe.cpp ${NATIVE}/sampling.cpp ${HERE}/isas.cpp ${HERE}/tiles.cpp ${HERE}/instructions.cpp ${GENERATED} $<TARGET_OBJECTS:isa_amx_emulated>)
target_link_libraries(millrace_emulated PRIVATE options Threads::Threads -static-libstdc++ -static-libgcc)
target_compile_options(millrace_emulated PRIVATE -O1)
set_source_files_properties(${HERE}/tiles.cpp PROPERTIES COMPILE_OPTIONS "-O3;${LANES}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_source_files_properties(${HERE}/instructions.cpp PROPERTIES COMPILE_OPTIONS "-mamx-tile;-mamx-bf16;-mamx-int8")
endif()
