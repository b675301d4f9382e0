"""The network, written once as operator calls, and the engines built from it."""
