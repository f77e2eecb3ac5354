"""Calls and tensor streams between processes, over gRPC."""
