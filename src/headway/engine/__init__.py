"""Engines that sample tokens: the built-in one on torch, in process or behind a socket."""
