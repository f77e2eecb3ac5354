"""The train step as a library object, independent of a run: state, step, optimizers."""
