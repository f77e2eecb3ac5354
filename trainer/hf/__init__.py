"""Models from and to Hugging Face. See docs/huggingface.md."""
