"""Where the log-probs of π_prox come from: exact routes, averaged parameters, or the behavior policy itself."""
