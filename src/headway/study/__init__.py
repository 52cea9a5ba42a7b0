"""Studies: many runs that differ in a few settings, and what they come to over seeds."""
