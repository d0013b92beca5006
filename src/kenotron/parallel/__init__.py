"""The mesh, the device, and one file per axis of parallelism."""
