"""The subcommands of `meshloom`: flags, and what they do. cli.py puts them together."""
