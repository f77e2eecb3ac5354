"""The step compiled for devices that are not here, and its program's time."""
