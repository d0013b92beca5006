"""`profiler`: a torch profiler trace of some steps."""

from kenotron.config.section import LocalPath, Section, key, our_key


class Profiler(Section):
    """Settings of `torch.profiler`."""

    profiler_export_path: LocalPath | None = key("Folder for the trace; null: no trace.", None)
    wait: int = key("Steps to wait before each warm-up.", 1, ge=0)
    warmup: int = key("Steps that run under the profiler without being recorded.", 1, ge=0)
    active: int = key("Steps recorded.", 1, ge=1)
    repeat: int = key("Number of cycles of wait, warm-up and recording.", 1, ge=1)
    skip_first: int = key("Steps to skip at the start of the run.", 3, ge=0)
    record_shapes: bool = key("Record input shapes.", False)
    profile_memory: bool = key("Record memory allocations.", False)
    with_stack: bool = key("Record the source line of each operation.", True)
    export_chrome_trace: bool = key("Also write a trace for chrome://tracing and Perfetto.", False)
    memory_snapshot_path: LocalPath | None = our_key(
        "Folder for each GPU's memory snapshot: every allocation of the first steps, up to those of the trace, or up "
        "to the error that ends the run.",
        None,
    )
    detect_anomaly: bool = our_key("End the run at a NaN in backward, and name its operation; slow.", False)

    @property
    def steps(self) -> int:
        """The number of steps that the complete trace needs."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)
