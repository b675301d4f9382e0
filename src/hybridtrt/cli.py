"""Command line of hybridtrt."""


def main() -> int:
    return 0
