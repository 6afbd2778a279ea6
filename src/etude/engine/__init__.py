"""Training state, step, precision, gradients, loop, evaluation and the callback protocol."""
