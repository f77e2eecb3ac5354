"""The canonical parameters as blocks and pieces, and which server owns which."""
