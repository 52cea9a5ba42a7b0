"""What a run says of itself: metric sinks, the live terminal view, summaries. Reads records and run folders only."""
