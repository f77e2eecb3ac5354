"""The train step as a library object, without a run: state, step, optimizers."""
