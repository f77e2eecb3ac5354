"""All processes say what they are before a step is trained: see docs/rollcall.md."""
