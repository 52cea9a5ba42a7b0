"""Teachers: models that score what the student sampled, in a process of their own or behind an HTTP server."""
