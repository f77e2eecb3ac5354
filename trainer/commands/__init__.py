"""The subcommands of `meshloom`, one per file: flags, and what they do."""
