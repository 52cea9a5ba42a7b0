"""What a run would do before it is paid for: a simulation over the real `Admission`, and the staleness–rate law."""
