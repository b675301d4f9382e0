#!/usr/bin/env python3
"""Ask a served engine over gRPC: `client_grpc.py --prompt TEXT [--stream]`."""

import sys

from hybridtrt.model_repo.client_cli import grpc_main

if __name__ == "__main__":
    sys.exit(grpc_main())
