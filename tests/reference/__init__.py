"""Slow references of the methods, written from the definitions and sharing no code with the library."""
