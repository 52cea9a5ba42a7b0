"""The running system: one loop, the one place that wires it, and the processes it runs on."""
