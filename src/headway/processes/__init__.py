"""Child processes that serve over loopback: starting and ending them, and both ends of the socket."""
