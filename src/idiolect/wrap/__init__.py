"""The wrappers, one file each: methods that hold a method. `fedrep+fedlag` is FedLAG around FedRep."""
