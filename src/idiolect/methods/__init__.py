"""The methods, one file each; a file is all that a new method needs. `idiolect.catalogue` finds them by file name."""
