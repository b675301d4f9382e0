#!/usr/bin/env python3
"""Build an engine from a checkpoint: `hybridtrt build` under the name that scripts expect."""

import sys

from hybridtrt.cli import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
