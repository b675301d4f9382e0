#include "attention_below.h"
#include "linear_attention_from.h"
