"""One file per data set that needs no download; its `load(**options)` returns the `Dataset`."""
