#!/usr/bin/env python3
"""Serve an engine folder with Triton Inference Server: `hybridtrt serve` under the name that TensorRT-LLM uses."""

import sys

from hybridtrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
