#define SYNCLINE_KERNELS portable
#include "kernels_body.h"
