#!/usr/bin/env python3
"""Ask a served engine over HTTP: `client_http.py --prompt TEXT [--stream]`."""

import sys

from hybridtrt.model_repo.client_cli import http_main

if __name__ == "__main__":
    sys.exit(http_main())
