// All kernels for one instruction set. Compiled once per set: MILLRACE_ISA names it, MILLRACE_LANES its sixteen lanes.
// Only this unit gets that set's compiler flags, so it holds no inline code of the standard library: such a function,
// compiled for AVX-512, could be the copy that the linker keeps for all units.
#include "isa.hpp"
#include MILLRACE_LANES
#include "lanes/math.hpp"
#include "lanes/rows.hpp"
#include "kernels_of_isa.hpp"
#include "sample/native.hpp"

#define MILLRACE_STRING_(x) #x
#define MILLRACE_STRING(x) MILLRACE_STRING_(x)
#define MILLRACE_JOIN_(a, b) a##b
#define MILLRACE_JOIN(a, b) MILLRACE_JOIN_(a, b)

namespace millrace {

extern const ProbeLoops MILLRACE_JOIN(probe_, MILLRACE_ISA);
extern const Isa MILLRACE_JOIN(isa_, MILLRACE_ISA);
const Isa MILLRACE_JOIN(isa_, MILLRACE_ISA) = {
    MILLRACE_STRING(MILLRACE_ISA),
    MILLRACE_ISA::kKernelTable,
    {MILLRACE_ISA::row_look, MILLRACE_ISA::row_weigh, MILLRACE_ISA::row_exp2, MILLRACE_ISA::row_find,
     MILLRACE_ISA::row_collect, MILLRACE_ISA::row_count, MILLRACE_ISA::row_mass, MILLRACE_ISA::row_rank},
    MILLRACE_ISA::scratch_bytes(),
    &MILLRACE_JOIN(probe_, MILLRACE_ISA),
};

}  // namespace millrace
