#define SYNCLINE_KERNELS avx2
#include "kernels_body.h"
