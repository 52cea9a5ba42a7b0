"""The learner: batches in, parameters of the next version out."""
