// The containers, one source each; container.cc lists them.
#pragma once

#include "quantizer/containers/container.h"

namespace freshet::quantizer {

extern const Container kCompressedTensorsContainer;
extern const Container kGptqContainer;
extern const Container kAwqContainer;
extern const Container kFp8Container;
extern const Container kModelOptContainer;
extern const Container kBitsAndBytesContainer;

}  // namespace freshet::quantizer
