// The kernels of one instruction set by name.
#include "kernel.h"

namespace hybridtrt {
namespace HT_ISA {

#define KERNEL(name) void name(const Step&, const Call&, Team&);
#include "kernels.def"
#undef KERNEL

extern const Kernel TABLE[];
const Kernel TABLE[] = {
#define KERNEL(name) name,
#include "kernels.def"
#undef KERNEL
};

}  // namespace HT_ISA
}  // namespace hybridtrt
