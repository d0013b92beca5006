"""`profiler`: a torch trace of some steps."""

from __future__ import annotations

from kenotron.config.section import LocalPath, Section, key


class Profiler(Section):
    profiler_export_path: LocalPath | None = key("Folder that the trace is written to; null: no trace.", None)
    wait: int = key("Steps to wait before each warm-up.", 1, ge=0)
    warmup: int = key("Steps that run under the profiler without being recorded.", 1, ge=0)
    active: int = key("Steps recorded.", 1, ge=1)
    repeat: int = key("How often wait, warm-up and recording are gone through.", 1, ge=1)
    skip_first: int = key("Steps left out at the start of the run.", 3, ge=0)
    record_shapes: bool = key("Record the shapes of inputs.", False)
    profile_memory: bool = key("Record allocations.", False)
    with_stack: bool = key("Record the source line of each call.", True)
    export_chrome_trace: bool = key("Also write a trace that chrome://tracing and Perfetto open.", False)

    @property
    def steps(self) -> int:
        """Steps that the run must have for the whole trace."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)
