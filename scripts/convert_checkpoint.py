#!/usr/bin/env python3
"""Convert a Hugging Face folder to a checkpoint: `hybridtrt convert` under the name that TensorRT-LLM uses."""

import sys

from hybridtrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
