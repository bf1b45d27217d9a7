/* For any processor: what the compiler makes of vectors of four on its own. */
#define VW 4
#define NAME base
#include "isa.h"
