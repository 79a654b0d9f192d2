"""Configuration of the profiler."""

from pydantic import Field, PositiveInt

from d9d_loop.config.section import Section


class ProfileConfig(Section):
    """Selection of the steps to profile, and options of the traces."""

    first_step: PositiveInt | None = Field(
        default=None, description="First step to profile; null disables the profiler."
    )
    steps: PositiveInt = Field(default=2, description="Number of consecutive steps per profile.")
    every: PositiveInt | None = Field(
        default=None, description="Steps from the start of one profile to the next; null: one profile."
    )
    record_shapes: bool = Field(default=False, description="Record the shapes of operator arguments.")
    profile_memory: bool = Field(default=False, description="Record memory allocations.")

    def begins_after(self, step: int) -> bool:
        """Return True if step `step + 1` is the first of a range of profiled steps."""
        if self.first_step is None:
            return False
        since = step + 1 - self.first_step
        return since == 0 or (self.every is not None and since > 0 and since % self.every == 0)
