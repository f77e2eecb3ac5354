"""A server: holds blocks of the parameters and applies commits to them."""
