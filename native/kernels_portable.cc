#define SYNCLINE_KERNELS portable
#include "kernels_body.h"
#include "codec_kernels_body.h"
#include "low_rank_kernels_body.h"
#include "digest_kernels_body.h"
