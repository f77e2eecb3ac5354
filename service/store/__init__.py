"""Where a coordinator keeps what must not be lost, and how one of several leads."""
